"""The tests of errors beside our own run: where they point, and whether they are too long.

The direction test asks a bank of suspects, with no more forwards than it needs. Lengths come first.
A suspect whose weights would have made an error far longer than it is needs no forward of its own:
it is ruled out in this nonce once it is known how far its predictions reach.
"""

from abc import abstractmethod
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Final

import numpy as np
from numpy.typing import NDArray

from proofserve.protocol.verdict.comparison import ClaimError
from proofserve.protocol.verdict.counting import SequentialResult
from proofserve.protocol.verdict.directions import SUSPECT_BETS, Compared, Footprint, Reach, reach
from proofserve.protocol.verdict.evidence import SHARES, Evidence, mixed
from proofserve.protocol.verdict.scale import CONVICTING, ScaleFit, SizeBets
from proofserve.verifier.judges import (
    BankRun,
    Chances,
    Figures,
    Judge,
    KernelBank,
    Vectors,
    evidence_text,
    few,
    result_of,
)
from proofserve.verifier.populations import LEAST_REACH, OwnRun

Floats = NDArray[np.float64]
# Suspects that are computed for a nonce.
PER_NONCE: Final = 4
# If no calibration says a suspect's reach, one nonce does where it moves the result by this much of
# an honest error. Where it moves it less, and might be too little to be tested, two nonces do.
_SEEN_AT_ONCE: Final = 2 * LEAST_REACH
# A suspect is computed for a nonce if the length of the error says at least this for it, as a
# logarithm: less is as good as ruled out.
_IN_REACH: Final = -2.3
# Before a suspect convicts, honest kernels are asked to explain the nonces that speak for it, a few
# at a time, because the first ones may be enough.
_ASKED_AT_ONCE: Final = 4
NO_SUSPECTS: Final = "there are no suspects: the checkpoint is published as cheap as the whole bank"


@dataclass(slots=True)
class _Suspicion:
    """One suspect: the evidence for it and for its innocence, from the nonces so far.

    ``compared`` are the errors beside its predictions, by nonce. It ``convicts`` by what honest
    kernels do not explain.
    """

    reach: Reach | None = None
    convicting: Evidence = field(default_factory=lambda: Evidence(SUSPECT_BETS))
    clearing: float = 0.0
    compared: dict[int, Compared] = field(default_factory=dict)
    convicts: bool = False

    @property
    def is_unseen(self) -> bool:
        """Whether its weights move results less than honest rounding does."""
        return self.reach is not None and self.reach.log_mean < np.log(LEAST_REACH)

    def learn(self, nonce: int, compared: Compared) -> None:
        self.compared[nonce] = compared
        predicted = np.array([each.predicted[0] for each in self.compared.values()])
        if len(predicted) > 1 or predicted[0] >= _SEEN_AT_ONCE:
            self.reach = reach(predicted)


class _ErrorJudge(Judge[ClaimError]):
    """Judges errors beside our own run, and begins again where that is another one."""

    def __init__(self, own: OwnRun, chances: Chances) -> None:
        self._own = own
        self._chances = chances
        self._known: object = None

    def plan(self, nonces: Sequence[int]) -> None:
        self._own.expect(nonces)

    def prepare(self, errors: Sequence[ClaimError]) -> None:
        self._own.compare(errors)
        if (beside := self._beside()) != self._known:
            self._known = beside
            self._begin_again()

    def _beside(self) -> object:
        """What all evidence so far depends on."""
        return self._own.reference

    @abstractmethod
    def _begin_again(self) -> None:
        """Weigh what was judged once more."""


class DirectionJudge(_ErrorJudge):
    """Convicts by the union bound: each suspect of the bank at its number over alpha.

    It clears a node once every suspect is ruled out on the share. ``suspects`` are all of the bank
    for None. A suspect convicts only by what no emulated honest kernel explains in the same nonces.
    """

    name = "direction"

    def __init__(
        self, bank: KernelBank, own: OwnRun, chances: Chances, suspects: Sequence[str] | None = None
    ) -> None:
        suspects = bank.names if suspects is None else suspects
        super().__init__(own, replace(chances, alpha=chances.alpha / len(suspects)))
        self._bank = bank
        self._suspicions = {name: _Suspicion() for name in suspects}
        self._predicted: dict[str, Vectors] = {}
        self._explained: dict[int, float] = {}

    def plan(self, nonces: Sequence[int]) -> None:
        super().plan(nonces)
        known = self._own.honest.reaches
        # In the pass of the published weights one nonce says how far a suspect reaches.
        new = (n for n, of in self._suspicions.items() if not of.compared and n not in known)
        self._bank.expect({BankRun(name): nonces[:1] for name in new})

    def _begin_again(self) -> None:
        # All is in the unit of our own run, which is now another kernel's.
        self._explained = {}
        for name, of in self._suspicions.items():
            of.reach = self._own.honest.reaches.get(name)
            nonces, of.compared = tuple(of.compared), {}
            for nonce, predicted in self._bank.predictions(name, nonces).items():
                of.learn(nonce, self._own.compared(nonce, predicted))
            self._weigh(of)

    def prepare(self, errors: Sequence[ClaimError]) -> None:
        super().prepare(errors)
        wanted: defaultdict[str, list[int]] = defaultdict(list)
        planned = {name: len(of.compared) for name, of in self._suspicions.items()}
        for error in errors:
            if error.error is not None:
                for name in self._needed(error, planned):
                    wanted[name].append(error.nonce)
                    planned[name] += 1
        self._bank.expect({BankRun(name): of for name, of in wanted.items()})
        self._predicted = {n: self._bank.predictions(n, of) for n, of in wanted.items()}

    def _needed(self, error: ClaimError, planned: dict[str, int]) -> list[str]:
        """The suspects to compute for a nonce: the likeliest, and one nonce of unknown reach."""
        unknown, within = [], []
        for name, of in self._suspicions.items():
            if of.reach is None:
                if planned[name] == len(of.compared):
                    unknown.append(name)
            elif not of.is_unseen and self._by_length(of.reach, error) > _IN_REACH:
                within.append(name)
        # The likeliest first; of the others those that were compared least.
        within.sort(key=lambda n: (-max(0.0, self._suspicions[n].convicting.log), planned[n]))
        return [*unknown, *within[:PER_NONCE]]

    def _by_length(self, known: Reach, error: ClaimError) -> float:
        ratio = np.array([self._own.ratio(error.nonce, error.distance)])
        return float(known.log_ratio(self._own.honest.lengths, ratio)[0])

    def add(self, error: ClaimError) -> None:
        # A claim without a vector has no direction; the test of sizes counts it.
        if error.error is None:
            return
        self.nonces += 1
        for name, of in self._suspicions.items():
            log_ratio = None if of.reach is None else self._by_length(of.reach, error)
            if (predicted := self._predicted.get(name, {}).get(error.nonce)) is not None:
                compared = self._own.compared(error.nonce, predicted)
                log_ratio = float(compared.log_ratio(self._own.honest.lengths)[0])
                of.learn(error.nonce, compared)
                self._bet(of, error.nonce)
            if log_ratio is not None:
                of.clearing -= float(mixed(np.array(log_ratio), self._chances.share))
        for of in self._suspicions.values():
            of.convicts = of.convicts or self._convicts(of)

    @property
    def _convicting(self) -> ScaleFit:
        return self._own.honest.lengths.wider(CONVICTING)

    def _convicts(self, of: _Suspicion) -> bool:
        """Whether evidence that is enough stands after honest kernels were asked to explain it."""
        wide = self._convicting
        while of.convicting.peak >= self._chances.convicts_at:
            for_it = {n: float(each.log_factors(wide).max()) for n, each in of.compared.items()}
            open_ = [n for n, log in for_it.items() if log > 0.0 and n not in self._explained]
            asked = sorted(open_, key=for_it.__getitem__)[-_ASKED_AT_ONCE:]
            self._explained |= self._own.explained(asked, wide) if asked else {}
            self._weigh(of)
            if not asked:
                break
        return of.convicting.peak >= self._chances.convicts_at

    def _weigh(self, of: _Suspicion) -> None:
        of.convicting = Evidence(SUSPECT_BETS)
        for nonce in of.compared:
            self._bet(of, nonce)

    def _bet(self, of: _Suspicion, nonce: int) -> None:
        known = self._explained.get(nonce, 0.0)
        of.convicting.add(of.compared[nonce].log_factors(self._convicting, known)[0])

    def result(self) -> SequentialResult:
        convicts = any(each.convicts for each in self._suspicions.values())
        return result_of(convicts=convicts, clears=bool(self._suspicions) and not self._open)

    @property
    def _open(self) -> list[str]:
        """Suspects that are not ruled out, and could be."""
        needed, seen = self._chances.clears_at, self._suspicions.items()
        return [name for name, of in seen if not of.is_unseen and of.clearing < needed]

    def _says(self, result: SequentialResult) -> tuple[str, Figures]:
        unseen = [name for name, of in self._suspicions.items() if of.is_unseen]
        # The suspect with the most evidence; one that convicts if any does.
        found = ((of.convicts, of.convicting.peak, n) for n, of in self._suspicions.items())
        _, log_evidence, name = max(found, default=(False, 0.0, ""))
        figures: dict[str, float | str] = {"log_evidence": log_evidence, "suspect": name}
        if open_ := self._open:
            figures["log_clearing"] = min(self._suspicions[each].clearing for each in open_)
        text = f"not ruled out: {few(open_)}"
        if result is SequentialResult.FRAUD:
            text = f"{name}, {evidence_text(log_evidence)}"
        elif result is SequentialResult.HONEST:
            text = "all suspects ruled out"
        if unseen:
            text += f"; {few(unseen)} moves results less than honest rounding, so is not tested"
        return text, figures


@dataclass(slots=True)
class _Kept:
    """One kernel's footprint: the evidence that a node has it, [2] as against lies, or has not."""

    of: Footprint
    clearing: Floats = field(default_factory=lambda: np.zeros(2))
    refuting: Evidence = field(default_factory=lambda: Evidence(len(SHARES)))


class FootprintJudge(_ErrorJudge):
    """Asks whether errors have the footprint of an honest kernel; it clears, and cannot convict.

    Servers with kernels that were not measured have less of it, or none.
    """

    name = "footprint"

    def __init__(self, own: OwnRun, chances: Chances) -> None:
        super().__init__(own, chances)
        self._kept: dict[str, _Kept] = {}
        self._judged: list[int] = []

    def _beside(self) -> object:
        # More becomes known of a footprint, too. Two kernels may have equal ones.
        return self._own.reference, self._own.honest.footprints

    def _begin_again(self) -> None:
        self._kept = {name: _Kept(of) for name, of in self._own.honest.footprints.items()}
        for nonce in self._judged:
            self._weigh(nonce)

    def add(self, error: ClaimError) -> None:
        self.nonces += 1
        self._judged.append(error.nonce)
        self._weigh(error.nonce)

    def _weigh(self, nonce: int) -> None:
        figure = np.array([self._own.cosine(nonce)])
        for kept in self._kept.values():
            against = kept.of.log_clearing(figure, self._chances.share, self._chances.kept)
            kept.clearing += against[0]
            kept.refuting.add(kept.of.log_refuting(figure)[0])

    def result(self) -> SequentialResult:
        every, chances = self._kept.values(), self._chances
        cleared = any(each.clearing.min() >= chances.clears_at for each in every)
        lost = bool(every) and all(each.refuting.peak >= chances.convicts_at for each in every)
        return SequentialResult.UNEXPLAINED if lost else result_of(clears=cleared)

    def _says(self, result: SequentialResult) -> tuple[str, Figures]:
        mean = float(np.mean([self._own.cosine(nonce) for nonce in self._judged]))
        # The kernel that keeps as much of our run's footprint as the node does.
        kernel = min(self._kept, key=lambda name: abs(self._kept[name].of.mean - mean))
        clearing, expected = self._kept[kernel].clearing.min(), self._kept[kernel].of.mean
        figures: dict[str, float | str] = {"log_clearing": float(clearing), "mean": mean}
        figures |= {"expected": expected, "kernel": kernel}
        if result is SequentialResult.HONEST:
            figures["excluded_share"] = self._chances.share
        has = f"{mean:.2f} of {expected:.2f} expected"
        return f"errors have {has} of the footprint of {kernel}", figures


class PairedJudge(_ErrorJudge):
    """Bets on errors that are larger than honest ones, beside our ``own`` of the nonce.

    A nonce in which rounding weighs more than in others makes both long. It cannot clear: a lie
    need not have long errors.
    """

    name = "paired"
    clears = False

    def __init__(self, own: OwnRun, chances: Chances) -> None:
        super().__init__(own, chances)
        self._evidence: dict[str, Evidence] = {}
        # Of each nonce the length of its error, and that in the honest unit.
        self._judged: list[tuple[int, float]] = []
        self._ratios: list[float] = []

    def _beside(self) -> object:
        return self._own.reference, [len(each.ratios) for each in self._own.members]

    def _begin_again(self) -> None:
        # Beside another kernel's run other kernels are the honest ones.
        self._evidence, self._ratios = {}, []
        for nonce, length in self._judged:
            self._weigh(nonce, length)

    def add(self, error: ClaimError) -> None:
        self.nonces += 1
        # A claim without a vector is infinitely far.
        self._judged.append((error.nonce, error.distance))
        self._weigh(error.nonce, error.distance)

    def _weigh(self, nonce: int, length: float) -> None:
        ratio = self._own.excess(nonce, length)
        self._ratios.append(ratio)
        for member in self._own.members:
            evidence = self._evidence.setdefault(member.name, Evidence(SizeBets.count))
            evidence.add(member.sizes.log_factors(np.array([ratio]))[0])

    def result(self) -> SequentialResult:
        return result_of(convicts=self._log_evidence >= self._chances.convicts_at)

    @property
    def _log_evidence(self) -> float:
        """Against the kernel that explains the errors best."""
        return min((each.peak for each in self._evidence.values()), default=0.0)

    def _says(self, result: SequentialResult) -> tuple[str, Figures]:
        text = f"errors are {np.median(self._ratios):.2g} times ours (median)"
        if result is SequentialResult.FRAUD or self._log_evidence > 0.0:
            text = f"{text}, {evidence_text(self._log_evidence)}"
        return text, {"log_evidence": self._log_evidence}
