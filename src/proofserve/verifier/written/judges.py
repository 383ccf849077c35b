"""Who wrote the answers: tests that need nothing but their tokens. They raise EngineFault."""

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Final

import numpy as np
from numpy.typing import NDArray

from proofserve.protocol.verdict.chosen_tokens import TILTS
from proofserve.protocol.verdict.counting import SequentialResult
from proofserve.protocol.verdict.evidence import SHARES, RenewedEvidence, mixed
from proofserve.verifier.judges import Chances, Figures, Judge, evidence_text, few, result_of
from proofserve.verifier.written.readings import ReadAnswer, Readings

# A greedy token may lie so many times as far below the likeliest as honest kernels move two
# likeliest tokens apart at most, over all greedy answers so far.
GAP_ROOM: Final = 3.0
# A server's rounding may keep a token that ours excludes, if its logit is nearly the least kept.
EXCLUDED_ROOM: Final = 0.5
# Greedy tokens beyond it that convict, in so many different answers: one answer with a slip of a
# token's id, or a server that breaks ties by chance, is no proof.
GREEDY_TOKENS, GREEDY_ANSWERS = 3, 2
# Before so many greedy tokens the largest rounding is not known.
GREEDY_LEAST: Final = 32
# Divergence of a suspect that text never rules out, nats.
_NO_GROWTH: Final = 1e-9
# Evidence (a natural logarithm) that shows how fast it grows.
_LIKELY: Final = 1.0
# Who clears: tokens drawn at another temperature, 5/6 or 5/4 of the right one, would have shown.
_CLEARED_OF: Final = [TILTS.index(-0.2), TILTS.index(0.2)]

# On shares of the answers: of sampled ones, of greedy ones, and of both.
_BETS: Final = 3 * len(SHARES)

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
        self._logs: Floats = np.zeros(len(TILTS))
        self._evidence = RenewedEvidence(len(self._bets))
        self._rounding = 0.0
        # How far a token that was excluded is beyond what an honest kernel may keep.
        self._impossible = 0.0
        self._lost = 0

    def add(self, read: ReadAnswer) -> None:
        if read.is_greedy:
            return
        self._reads.append(read)
        self._logs = self._logs + read.log_factors
        self._evidence.add(read.log_factors[self._bets])
        self.nonces += len(read.log_p)
        self._rounding = max(self._rounding, float(read.rounding.max()))
        if read.excluded > EXCLUDED_ROOM + GAP_ROOM * self._rounding:
            (kernels,) = self._readings.by_kernels([read])
            moved = max([self._rounding, *(each.rounding for each in kernels.values())])
            beyond = read.excluded - EXCLUDED_ROOM - GAP_ROOM * moved
            self._impossible = max(self._impossible, beyond)

    def lose(self) -> None:
        """A sampled answer was left out, whose text can be written in other tokens.

        Those that are left are then drawn from a part of the distribution, whose chances are
        larger by at most one over the share that is left.
        """
        self._lost += 1

    @property
    def log_evidence(self) -> float:
        found = self._evidence.log - self._allowance
        if found < self._chances.convicts_at:
            return found
        evidence = RenewedEvidence(len(self._bets))
        for read, kernels in zip(self._reads, self._readings.by_kernels(self._reads), strict=True):
            # What the kernel that gives most gives to each bet by this answer, 0 at least.
            means = (each.log_means for each in kernels.values())
            most = np.maximum.reduce([np.zeros(len(TILTS)), *means])
            evidence.add((read.log_factors - most)[self._bets])
        return evidence.log - self._allowance

    def result(self) -> SequentialResult:
        convicts = self._impossible > 0.0 or self.log_evidence >= self._chances.convicts_at
        return result_of(convicts=convicts, clears=self._log_clearing >= self._chances.clears_at)

    def _says(self, _result: SequentialResult) -> tuple[str, Figures]:
        log_evidence = self.log_evidence
        figures = {"log_evidence": log_evidence, "log_clearing": self._log_clearing}
        if self._impossible > 0.0:
            text = f"a token cannot have been drawn as stated, by {self._impossible:.2g} of a logit"
            return text, figures
        return evidence_text(log_evidence), figures

    @property
    def _allowance(self) -> float:
        answers = len(self._reads)
        return answers * math.log1p(self._lost / max(1, answers))

    @property
    def _log_clearing(self) -> float:
        return -float(self._logs[self._cleared_of].max()) - self._allowance


class GreedyJudge(Judge[ReadAnswer]):
    """Counts greedy tokens that no honest rounding makes the likeliest; see ``GAP_ROOM``."""

    name = "greedy"
    clears = False

    def __init__(self, readings: Readings) -> None:
        self._readings = readings
        self._reads: list[ReadAnswer] = []
        self._rounding = 0.0
        # Of each token beyond the bound the number of its prompt, and its gap.
        self._beyond: list[tuple[int, float]] = []
        self._largest = 0.0

    def add(self, read: ReadAnswer) -> None:
        if not read.is_greedy:
            return
        self._reads.append(read)
        self.nonces += len(read.gaps)
        self._largest = max(self._largest, float(read.gaps.max()))
        far = read.gaps[read.gaps > self.bound].tolist()
        self._beyond += [(read.answer.number, gap) for gap in far]
        self._round(float(read.rounding.max()))
        if self._convicts:
            every = (each.values() for each in self._readings.by_kernels(self._reads))
            self._round(max((each.rounding for of in every for each in of), default=0.0))

    def _round(self, most: float) -> None:
        """Honest kernels round by as much as ``most``: fewer tokens may be beyond the bound."""
        if most > self._rounding:
            self._rounding = most
            self._beyond = [each for each in self._beyond if each[1] > self.bound]

    @property
    def bound(self) -> float:
        """The largest honest gap, in nats."""
        return GAP_ROOM * self._rounding

    @property
    def share(self) -> float:
        """Of greedy tokens that are no honest ones."""
        return len(self._beyond) / max(1, self.nonces)

    def result(self) -> SequentialResult:
        """Without evidence that grows: the bound has no alpha."""
        return result_of(convicts=self._convicts)

    def _says(self, _result: SequentialResult) -> tuple[str, Figures]:
        beyond, bound = len(self._beyond), self.bound
        text = f"{beyond} of {self.nonces} tokens are more than {bound:.3g} below the likeliest"
        figures = {"beyond": beyond, "share": self.share, "bound": bound, "largest": self._largest}
        return text, figures

    @property
    def _convicts(self) -> bool:
        answers = {number for number, _ in self._beyond}
        convicts = len(self._beyond) >= GREEDY_TOKENS and len(answers) >= GREEDY_ANSWERS
        return convicts and self.nonces >= GREEDY_LEAST


class LikelihoodJudge(Judge[ReadAnswer]):
    """Whether tokens are likelier by a suspect's network than by the published one.

    The product of the ratios is evidence with a mean of 1 for tokens that the published network
    drew, its inverse for those that the suspect drew. It convicts and clears with text alone, if
    the suspect's distributions differ enough. Greedy tokens, which are not drawn, have evidence of
    their own, and do not clear. What convicts is less what honest kernels give.

    With ``goes_on`` a suspect that is ruled out still counts: the node may use it later.
    """

    name = "likelihood"

    def __init__(self, readings: Readings, chances: Chances, goes_on: bool = False) -> None:
        self._readings = readings
        self._chances = replace(chances, alpha=chances.alpha / len(readings.names))
        self._goes_on = goes_on
        self._evidence = {name: RenewedEvidence(_BETS) for name in readings.names}
        self._logs = dict.fromkeys(readings.names, 0.0)
        # Evidence of greedy answers that a suspect did not write them.
        self._greedy_against = dict.fromkeys(readings.names, 0.0)
        self._growth = dict.fromkeys(readings.names, 0.0)
        self._open = list(readings.names)
        self._reads: list[ReadAnswer] = []

    def prepare(self, reads: Sequence[ReadAnswer]) -> None:
        """Read several answers with each suspect, whose weights are made once for all of them."""
        for name in self._readings.names:
            open_ = self._goes_on or name in self._open
            self._readings.by_suspect(name, [r for r in reads if open_ or r.is_greedy])

    def add(self, read: ReadAnswer) -> None:
        self._reads.append(read)
        self.nonces += len(read.log_p)
        every = self._goes_on or read.is_greedy
        for name in self._readings.names if every else tuple(self._open):
            (suspected,) = self._readings.by_suspect(name, [read])
            self._evidence[name].add(_bets(read, suspected.log_ratio))
            if read.is_greedy:
                self._greedy_against[name] += suspected.against
                continue
            self._logs[name] += suspected.log_ratio
            self._growth[name] += suspected.divergence
            if self._logs[name] <= -self._chances.clears_at and name in self._open:
                self._open.remove(name)

    def _missing(self, name: str, answers: int = 1) -> float:
        """How many more of such sampled ``answers`` as so far rule out a suspect; 0 if it is."""
        needed = self._chances.clears_at + self._logs[name] if name in self._open else 0.0
        return needed * answers / max(self._growth[name], _NO_GROWTH)

    def answers_more(self, name: str, greedy: bool) -> float:
        """How many more answers rule out a suspect, 0 if it is; infinite if that is not known."""
        answers = sum(each.is_greedy == greedy for each in self._reads)
        if not answers:
            return math.inf
        if not greedy:
            return math.ceil(self._missing(name, answers))
        # By the evidence so far, as nothing else says how fast it grows.
        against = self._greedy_against[name]
        needed = max(0.0, self._chances.clears_at - against)
        return math.ceil(needed * answers / against) if against > _LIKELY else math.inf

    def result(self) -> SequentialResult:
        convicts = self._strongest()[1] >= self._chances.convicts_at
        return result_of(convicts=convicts, clears=not self._open)

    def _says(self, result: SequentialResult) -> tuple[str, Figures]:
        name, log_evidence = self._strongest()
        text = "all suspects ruled out"
        if self._open:
            gone = len(self._logs) - len(self._open)
            text = f"{gone} of {len(self._logs)} suspects ruled out, not: {few(self._open)}"
        if result is SequentialResult.FRAUD:
            text = f"{name}, {evidence_text(log_evidence)}"
        # Of the suspect that takes longest.
        missing = max(map(self._missing, self._open), default=0.0)
        return text, {"log_evidence": log_evidence, "suspect": name, "missing": missing}

    def _strongest(self) -> tuple[str, float]:
        """The suspect with the most evidence for it, and its logarithm."""
        found = {name: evidence.log for name, evidence in self._evidence.items()}
        for name, log in found.items():
            if log >= self._chances.convicts_at:
                found[name] = self._less_kernels(name)
        return max(found.items(), key=lambda pair: pair[1])

    def _less_kernels(self, name: str) -> float:
        """The evidence for a suspect without what honest kernels give."""
        evidence, known = RenewedEvidence(_BETS), self._readings.known
        reads = [each for each in self._reads if (name, each.answer.number) in known]
        means = self._readings.likelihood_means(name, reads)
        for read, mean in zip(reads, means, strict=True):
            evidence.add(_bets(read, known[name, read.answer.number].log_ratio - mean))
        return evidence.log


def _bets(read: ReadAnswer, log_ratio: float) -> Floats:
    """What an answer gives to each bet: a node may have others written by the published weights."""
    mixtures = [float(mixed(np.array(log_ratio), share)) for share in SHARES]
    kinds = (not read.is_greedy, read.is_greedy, True)
    return np.array([log if kind else 0.0 for kind in kinds for log in mixtures])
