"""The tests that need nothing but the tokens of an endpoint's answers. They raise EngineFault."""

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Final

import numpy as np
from numpy.typing import NDArray

from proofserve.protocol.verdict.chosen_tokens import TILTS
from proofserve.protocol.verdict.evidence import Evidence
from proofserve.verifier.judges import Chances, Figures, Judge, Standing, evidence_text, few
from proofserve.verifier.probe.readings import ReadAnswer, Readings

# A greedy token may lie so many times as far below the likeliest as honest kernels move two
# likeliest tokens apart at most, over all greedy answers so far.
GAP_ROOM: Final = 3.0
# Greedy tokens beyond it that convict, in so many different answers: one answer with a slip of a
# token's id, or a server that breaks ties by chance, is no proof.
GREEDY_TOKENS, GREEDY_ANSWERS = 3, 2
# Before so many greedy tokens the largest rounding is not known.
GREEDY_LEAST: Final = 32
# Divergence of a suspect that text never rules out, nats.
_NO_GROWTH: Final = 1e-9
# Who clears: tokens drawn at another temperature, 5/6 or 5/4 of the right one, would have shown.
_CLEARED_OF: Final = [TILTS.index(-0.2), TILTS.index(0.2)]

Floats = NDArray[np.float64]


class TokenJudge(Judge[ReadAnswer]):
    """Bets on sampled tokens that are too likely or too unlikely (``verdict.chosen_tokens``).

    An endpoint that does not take ``all_fields`` of a request may have a top-k, top-p or min-p of
    its own, which makes tokens likelier: only those that are too unlikely count against it. What
    convicts is less what honest kernels give, which read the answers only for that.
    """

    name = "tokens"

    def __init__(self, readings: Readings, chances: Chances, all_fields: bool) -> None:
        self._readings = readings
        self._chances = chances
        self._bets = [place for place, tilt in enumerate(TILTS) if all_fields or tilt > 0.0]
        self._cleared_of = [place for place in _CLEARED_OF if place in self._bets]
        self._reads: list[ReadAnswer] = []
        self._lost = 0

    def add(self, read: ReadAnswer) -> None:
        if read.is_greedy:
            return
        self._reads.append(read)
        self.nonces += len(read.log_p)

    def lose(self) -> None:
        """A sampled answer was left out, whose text can be written in other tokens.

        Those that are left are then drawn from a part of the distribution, whose chances are
        larger by at most one over the share that is left.
        """
        self._lost += 1

    @property
    def log_evidence(self) -> float:
        found = self._log_evidence([read.log_factors for read in self._reads])
        if found < self._chances.convicts_at:
            return found
        return self._log_evidence([read.log_factors - self._most(read) for read in self._reads])

    def standing(self) -> Standing:
        convicts = self.log_evidence >= self._chances.convicts_at
        return Standing(convicts=convicts, clears=self._log_clearing >= self._chances.clears_at)

    def _says(self, _standing: Standing) -> tuple[str, Figures]:
        log_evidence = self.log_evidence
        figures = {"log_evidence": log_evidence, "log_clearing": self._log_clearing}
        return evidence_text(log_evidence), figures

    def _log_evidence(self, factors: Sequence[Floats]) -> float:
        evidence = Evidence(len(self._bets))
        for each in factors:
            evidence.add(each[self._bets])
        return evidence.log - self._allowance

    def _most(self, read: ReadAnswer) -> Floats:
        """What the kernel that gives most gives to each bet by this answer, 0 at least."""
        means = (each.log_means for each in self._readings.by_kernels(read).values())
        most: Floats = np.maximum.reduce([np.zeros(len(TILTS)), *means])
        return most

    @property
    def _allowance(self) -> float:
        answers = len(self._reads)
        return answers * math.log1p(self._lost / max(1, answers))

    @property
    def _log_clearing(self) -> float:
        logs = sum((read.log_factors for read in self._reads), np.zeros(len(TILTS)))
        return -float(logs[self._cleared_of].max()) - self._allowance


class GreedyJudge(Judge[ReadAnswer]):
    """Counts greedy tokens that no honest rounding makes the likeliest; see ``GAP_ROOM``."""

    name = "greedy"
    clears = False

    def __init__(self, readings: Readings) -> None:
        self._readings = readings
        self._reads: list[ReadAnswer] = []
        self._rounding = 0.0

    def add(self, read: ReadAnswer) -> None:
        if not read.is_greedy:
            return
        self._reads.append(read)
        self.nonces += len(read.gaps)
        self._rounding = max(self._rounding, float(read.rounding.max()))
        if self._convicts:
            kernels = (each for r in self._reads for each in self._readings.by_kernels(r).values())
            self._rounding = max(self._rounding, *(each.rounding for each in kernels))

    @property
    def bound(self) -> float:
        """The largest honest gap, in nats."""
        return GAP_ROOM * self._rounding

    @property
    def share(self) -> float:
        """Of greedy tokens that are no honest ones."""
        return len(self._beyond) / max(1, self.nonces)

    def standing(self) -> Standing:
        """Without evidence that grows: the bound has no alpha."""
        return Standing(convicts=self._convicts)

    def _says(self, _standing: Standing) -> tuple[str, Figures]:
        beyond, bound = len(self._beyond), self.bound
        text = f"{beyond} of {self.nonces} tokens are more than {bound:.3g} below the likeliest"
        largest = max((float(read.gaps.max()) for read in self._reads), default=0.0)
        return text, {"beyond": beyond, "share": self.share, "bound": bound, "largest": largest}

    @property
    def _beyond(self) -> list[int]:
        """The numbers of the prompts of tokens beyond the bound."""
        reads = ((read.answer.prompt.number, read.gaps.tolist()) for read in self._reads)
        return [number for number, gaps in reads for gap in gaps if gap > self.bound]

    @property
    def _convicts(self) -> bool:
        beyond = self._beyond
        convicts = len(beyond) >= GREEDY_TOKENS and len({*beyond}) >= GREEDY_ANSWERS
        return convicts and self.nonces >= GREEDY_LEAST


class LikelihoodJudge(Judge[ReadAnswer]):
    """Whether sampled tokens are likelier by a suspect's network than by the published one.

    The product of the ratios is evidence with a mean of 1 for tokens that the published network
    drew, its inverse for those that the suspect drew. It convicts and clears with text alone, if
    the suspect's distributions differ enough. What convicts is less what honest kernels give.
    """

    name = "likelihood"

    def __init__(self, readings: Readings, chances: Chances) -> None:
        self._readings = readings
        self._chances = replace(chances, alpha=chances.alpha / len(readings.names))
        self._logs = dict.fromkeys(readings.names, 0.0)
        self._growth = dict.fromkeys(readings.names, 0.0)
        self._open = list(readings.names)
        self._sampled: list[ReadAnswer] = []

    def prepare(self, reads: Sequence[ReadAnswer]) -> None:
        """Read several answers with each suspect, whose weights are made once for all of them."""
        for name in self._open:
            self._readings.by_suspect(name, [r for r in reads if not r.is_greedy])

    def add(self, read: ReadAnswer) -> None:
        if read.is_greedy:
            return
        self._sampled.append(read)
        self.nonces += len(read.log_p)
        for name in tuple(self._open):
            (suspected,) = self._readings.by_suspect(name, [read])
            self._logs[name] += float((suspected.log_p - read.log_p).sum())
            self._growth[name] += suspected.divergence
            if self._logs[name] <= -self._chances.clears_at:
                self._open.remove(name)

    def standing(self) -> Standing:
        convicts = self._strongest()[1] >= self._chances.convicts_at
        return Standing(convicts=convicts, clears=not self._open)

    def _says(self, standing: Standing) -> tuple[str, Figures]:
        name, log_evidence = self._strongest()
        text = "all suspects ruled out"
        if self._open:
            gone = len(self._logs) - len(self._open)
            text = f"{gone} of {len(self._logs)} suspects ruled out, not: {few(self._open)}"
        if standing.convicts:
            text = f"{name}, {evidence_text(log_evidence)}"
        # How many times as many tokens as so far rule out the suspect that takes longest.
        clears_at = self._chances.clears_at
        missing = max(
            ((clears_at + self._logs[n]) / max(self._growth[n], _NO_GROWTH) for n in self._open),
            default=0.0,
        )
        return text, {"log_evidence": log_evidence, "suspect": name, "missing": missing}

    def _strongest(self) -> tuple[str, float]:
        """The suspect with the most evidence for it, and its logarithm."""
        found = dict(self._logs)
        for name, log in self._logs.items():
            if log >= self._chances.convicts_at:
                found[name] -= sum(self._readings.likelihood_means(name, self._sampled))
        return max(found.items(), key=lambda pair: pair[1])
