"""The direction test over a bank of suspects, with no more forwards than it needs."""

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import cycle, islice
from typing import Final

import numpy as np

from proofserve.protocol.verdict.comparison import ClaimError
from proofserve.protocol.verdict.evidence import Evidence
from proofserve.protocol.verdict.leaning import (
    LEANING_BETS,
    UNCALIBRATED_BETS,
    cosine,
    uncalibrated_log_factors,
)
from proofserve.protocol.verdict.sequential import SequentialResult
from proofserve.verifier.judges import (
    OWN,
    BankRun,
    Chances,
    Figures,
    Judge,
    KernelBank,
    Standing,
    Vectors,
    evidence_text,
    few,
)
from proofserve.verifier.populations import UNKNOWN, Expected, HonestPopulations

# Suspects that are computed for a nonce. With those that the last nonces turn out not to need, an
# honest node costs five.
PER_NONCE = 4
# Of them the most likely so far.
LIKELY = 2
NO_SUSPECTS: Final = "there are no suspects: the checkpoint is published as cheap as the whole bank"


@dataclass(slots=True)
class Suspicion:
    """One suspect: the evidence for it against each honest population, and for its innocence.

    ``refuting`` only says that the node is none of the populations. ``log_ratio`` is the likelihood
    ratio of the suspect's figures over an honest node's, both as normal.
    """

    expected: Expected
    convicting: list[Evidence]
    refuting: list[Evidence]
    nonces: int = 0
    log_ratio: float = 0.0

    def weigh(self, figure: float) -> None:
        mean = self.expected.mean
        self.nonces += 1
        self.log_ratio += (mean * figure - mean**2 / 2) / self.expected.sd**2


class CalibratedYardstick:
    """Every population of a calibration: cosines beside our own, by their measured spread."""

    form = "calibrated"
    runs = (OWN,)

    def __init__(self, honest: HonestPopulations) -> None:
        self._honest = honest
        self.populations = len(honest.members)

    def suspicion(self, suspect: str) -> Suspicion:
        known = self._honest.expected.get(suspect, UNKNOWN)
        # A deployment may spread as widely around the expected mean as an honest one around 0.
        expected = replace(known, sd=max(known.sd, self._honest.widest_sd(suspect)))
        evidence = [Evidence(LEANING_BETS) for _ in self._honest.members]
        return Suspicion(expected, evidence, evidence)

    def add(self, of: Suspicion, suspect: str, theirs: float, honest: Sequence[float]) -> None:
        figure = theirs - self._honest.shares.lean(suspect) * honest[0]
        of.weigh(figure)
        for member, evidence in zip(self._honest.members, of.convicting, strict=True):
            if (lean := member.lean(suspect)) is not None:
                evidence.add(lean.log_factors(np.array([figure]))[0])


class EmulatedYardstick:
    """Without a calibration: the honest ``kernels`` that are emulated on the same nonces.

    A suspect convicts only as far as the node leans more than all of them. What leans more than
    our own run alone has no verdict.
    """

    form = "without a calibration"
    populations = 1

    def __init__(self, kernels: Sequence[str]) -> None:
        self.runs = (OWN, *(BankRun(kernels=name) for name in kernels))

    def suspicion(self, suspect: str) -> Suspicion:  # noqa: ARG002 - none is known
        return Suspicion(UNKNOWN, [Evidence(UNCALIBRATED_BETS)], [Evidence(UNCALIBRATED_BETS)])

    def add(self, of: Suspicion, suspect: str, theirs: float, honest: Sequence[float]) -> None:  # noqa: ARG002
        beyond_own = theirs - honest[0]
        of.weigh(beyond_own)
        of.convicting[0].add(uncalibrated_log_factors(np.array([theirs - max(honest)]))[0])
        of.refuting[0].add(uncalibrated_log_factors(np.array([beyond_own]))[0])


# How far honest nodes lean to a suspect: its ``add`` takes the node's cosine with a prediction, and
# those of the honest ``runs``, our own first.
Yardstick = CalibratedYardstick | EmulatedYardstick


class DirectionJudge(Judge[ClaimError]):
    """Convicts by the union bound: each suspect of the bank at its number over alpha.

    It clears a node once every suspect is ruled out. ``suspects`` are all of the bank for None.

    A nonce is compared with ``PER_NONCE`` suspects, because each costs a forward: at first with
    others for each nonce, in the bank's order, then with the two most likely and others in turn.
    The choice depends on earlier nonces alone, so the evidence stays valid.
    """

    name = "direction"

    def __init__(
        self,
        bank: KernelBank,
        yardstick: Yardstick,
        chances: Chances,
        suspects: Sequence[str] | None = None,
    ) -> None:
        suspects = bank.names if suspects is None else suspects
        self._bank = bank
        self._yardstick = yardstick
        self._chances = replace(chances, alpha=chances.alpha / len(suspects))
        self._suspicions = {name: yardstick.suspicion(name) for name in suspects}
        self._open = dict(self._suspicions)
        self._planned: dict[int, tuple[str, ...]] = {}
        self._predicted: dict[str, Vectors] = {}
        self._honest: list[Vectors] = []

    def plan(self, nonces: Sequence[int]) -> None:
        self._planned = dict(zip(nonces, self._plan(len(nonces)), strict=True))
        if self._open:
            suspects = {BankRun(n): them for n, them in self._nonces_of(nonces).items()}
            self._bank.expect({**suspects, **dict.fromkeys(self._yardstick.runs, nonces)})

    def prepare(self, errors: Sequence[ClaimError]) -> None:
        nonces = [error.nonce for error in errors if error.error is not None]
        of_name = self._nonces_of(nonces)
        self._predicted = {n: self._bank.predictions(n, them) for n, them in of_name.items()}
        if self._predicted:
            self._honest = [self._bank.errors(run, nonces) for run in self._yardstick.runs]

    def add(self, error: ClaimError) -> None:
        # A claim without a vector has no direction; the test of sizes counts it.
        if error.error is None:
            return
        self.nonces += 1
        for name in self._planned[error.nonce]:
            if (suspicion := self._open.get(name)) is None:
                continue
            prediction = self._predicted[name][error.nonce]
            honest = [cosine(errors[error.nonce], prediction) for errors in self._honest]
            self._yardstick.add(suspicion, name, cosine(error.error, prediction), honest)
            self._rule_out(name)

    def suppose_honest(self, nonces: Sequence[int]) -> bool:
        """Weigh ``nonces`` as if no error leaned to a suspect; whether all are now ruled out."""
        for name in [name for nonce in nonces for name in self._planned[nonce]]:
            if (suspicion := self._open.get(name)) is not None:
                suspicion.weigh(0.0)
                self._rule_out(name)
        return not self._open

    def _rule_out(self, name: str) -> None:
        """Drop a suspect whose weights would have shown by now."""
        if self._open[name].log_ratio <= -self._chances.clears_at:
            del self._open[name]

    def standings(self) -> list[Standing]:
        limit, clears = self._chances.convicts_at, not self._open
        found = []
        for index in range(self._yardstick.populations):
            convicting = self._strongest(index)[1]
            refuting = max(each.refuting[index].peak for each in self._suspicions.values())
            excess = max(convicting, refuting) - limit
            found.append(Standing(excess, excess >= 0.0, convicting >= limit, clears))
        return found

    def _says(self, standing: Standing, population: int) -> tuple[str, Figures]:
        form, result = self._yardstick.form, standing.result
        name, log_evidence = self._strongest(population)
        figures: dict[str, float | str] = {"log_evidence": log_evidence, "suspect": name}
        text = f"not ruled out: {few([*self._open])}"
        if self._open:
            figures["log_clearing"] = min(-each.log_ratio for each in self._open.values())
        if result is SequentialResult.FRAUD:
            text = f"{name}, {evidence_text(log_evidence)}"
        elif result is SequentialResult.UNEXPLAINED:
            text = "errors point to suspected weights, as far as those of honest kernels may"
        elif result is SequentialResult.HONEST:
            text = "all suspects ruled out"
        return f"{text} ({form})", {**figures, "form": form}

    def _strongest(self, population: int) -> tuple[str, float]:
        """The suspect with the most evidence against an honest population, and its logarithm."""
        peaks = ((n, each.convicting[population].peak) for n, each in self._suspicions.items())
        return max(peaks, key=lambda pair: pair[1])

    def _nonces_of(self, nonces: Sequence[int]) -> dict[str, list[int]]:
        """Of each suspect, those of ``nonces`` that are compared with it."""
        found: defaultdict[str, list[int]] = defaultdict(list)
        for nonce in nonces:
            for name in self._planned[nonce]:
                found[name].append(nonce)
        return found

    def _plan(self, count: int) -> list[tuple[str, ...]]:
        """The suspects for each of the next ``count`` nonces."""
        seen = [name for name, suspicion in self._open.items() if suspicion.nonces]
        seen.sort(key=lambda name: -self._open[name].log_ratio)
        likely = [name for name in seen[:LIKELY] if self._open[name].log_ratio > 0.0]
        unseen = [name for name in self._open if not self._open[name].nonces]
        others = [*unseen, *(name for name in seen if name not in likely)]
        turn, size = cycle(others), min(PER_NONCE - len(likely), len(others))
        return [(*likely, *islice(turn, size)) for _ in range(count)]
