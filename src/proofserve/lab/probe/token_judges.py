"""The tests that need nothing but the tokens of an endpoint's answers."""

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Final

import numpy as np

from proofserve.lab.probe.readings import ReadAnswer, Readings
from proofserve.lab.verify.judges import Chances, Finding, evidence_text, finding_of
from proofserve.protocol.verdict.chosen_tokens import TILTS
from proofserve.protocol.verdict.evidence import Evidence
from proofserve.protocol.verdict.sequential import SequentialResult

# A greedy token may lie so many times as far below the likeliest as honest rounding moved two
# likeliest tokens apart at most, over all greedy answers so far. Real vLLM's own tokens lay below
# 0.4 times of it (docs/probe.md).
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


class TokenJudge:
    """Bets on sampled tokens that are too likely or too unlikely (``verdict.chosen_tokens``).

    An endpoint that does not take ``all_fields`` of a request may have a top-k, top-p or min-p of
    its own. That makes tokens likelier, so only those that are too unlikely count against it.
    """

    clears = True

    def __init__(self, chances: Chances, all_fields: bool) -> None:
        self._chances = chances
        self._bets = [place for place, tilt in enumerate(TILTS) if all_fields or tilt > 0.0]
        self._cleared_of = [place for place in _CLEARED_OF if place in self._bets]
        self._evidence = Evidence(len(self._bets))
        self._logs = np.zeros(len(TILTS))
        self._tokens = self._answers = self._lost = 0

    def add(self, read: ReadAnswer) -> None:
        if read.answer.prompt.greedy:
            return
        self._answers += 1
        self._tokens += len(read.log_p)
        self._logs += read.log_factors
        self._evidence.add(read.log_factors[self._bets])

    def lose(self) -> None:
        """A sampled answer was left out because its text can be written in other tokens.

        Those that are left are then drawn from a part of the distribution, whose chances are
        larger by at most one over the share that is left.
        """
        self._lost += 1

    def finding(self) -> Finding:
        allowance = self._answers * math.log1p(self._lost / max(1, self._answers))
        log_evidence = self._evidence.log - allowance
        log_clearing = -float(self._logs[self._cleared_of].max()) - allowance
        cleared = log_clearing >= self._chances.clears_at
        found = finding_of("tokens", log_evidence, cleared, self._chances, self._tokens)
        return replace(found, figures={**found.figures, "log_clearing": log_clearing})


class GreedyJudge:
    """Counts greedy tokens that no honest rounding makes the likeliest; see ``GAP_ROOM``."""

    clears = False

    def __init__(self) -> None:
        self._gaps: list[tuple[int, float]] = []
        self._rounding = 0.0

    def add(self, read: ReadAnswer) -> None:
        if not read.answer.prompt.greedy:
            return
        self._gaps += [(read.answer.prompt.number, float(gap)) for gap in read.gaps]
        self._rounding = max(self._rounding, float(read.rounding.max()))

    @property
    def bound(self) -> float:
        """The largest honest gap, in nats."""
        return GAP_ROOM * self._rounding

    @property
    def share(self) -> float:
        """Of greedy tokens that are no honest ones."""
        return sum(gap > self.bound for _, gap in self._gaps) / max(1, len(self._gaps))

    def finding(self) -> Finding:
        beyond = [number for number, gap in self._gaps if gap > self.bound]
        convicted = len(beyond) >= GREEDY_TOKENS and len({*beyond}) >= GREEDY_ANSWERS
        known = len(self._gaps) >= GREEDY_LEAST
        result = SequentialResult.FRAUD if convicted and known else SequentialResult.UNDECIDED
        text = (
            f"{len(beyond)} of {len(self._gaps)} tokens are more than {self.bound:.3g} below the"
            " likeliest"
        )
        largest = max((gap for _, gap in self._gaps), default=0.0)
        figures = {
            "beyond": len(beyond),
            "share": self.share,
            "bound": self.bound,
            "largest": largest,
        }
        return Finding("greedy", result, len(self._gaps), text, figures)


class LikelihoodJudge:
    """Whether sampled tokens are likelier by a suspect's network than by the published one.

    For tokens that the published network drew, the product of the ratios is evidence against it
    with a mean of 1, and for tokens that the suspect drew, its inverse is. It convicts and clears
    with text alone, if the suspect's distributions differ enough.
    """

    clears = True

    def __init__(self, readings: Readings, chances: Chances) -> None:
        self._readings = readings
        self._chances = replace(chances, alpha=chances.alpha / len(readings.names))
        self._logs = dict.fromkeys(readings.names, 0.0)
        self._growth = dict.fromkeys(readings.names, 0.0)
        self._open = list(readings.names)
        self._tokens = 0

    def prepare(self, reads: Sequence[ReadAnswer]) -> None:
        """Read several answers with each suspect's weights, which are made once for all of them.

        Raises EngineFault.
        """
        for name in self._open:
            self._readings.by_suspect(name, [r for r in reads if not r.answer.prompt.greedy])

    def add(self, read: ReadAnswer) -> None:
        """Raises EngineFault."""
        if read.answer.prompt.greedy:
            return
        self._tokens += len(read.log_p)
        for name in tuple(self._open):
            (suspected,) = self._readings.by_suspect(name, [read])
            self._logs[name] += float((suspected.log_p - read.log_p).sum())
            self._growth[name] += suspected.divergence
            if self._logs[name] <= -self._chances.clears_at:
                self._open.remove(name)

    def finding(self) -> Finding:
        name = max(self._logs, key=self._logs.__getitem__)
        found = finding_of(
            "likelihood", self._logs[name], not self._open, self._chances, self._tokens
        )
        text = "all suspects ruled out"
        if self._open:
            gone = len(self._logs) - len(self._open)
            text = f"{gone} of {len(self._logs)} suspects ruled out, not: {_few(self._open)}"
        if found.result is SequentialResult.FRAUD:
            text = f"{name}, {evidence_text(self._logs[name])}"
        figures = {**found.figures, "suspect": name, "missing": self._missing()}
        return replace(found, text=text, figures=figures)

    def _missing(self) -> float:
        """How many times as many tokens as so far rule out the suspect that takes longest."""
        clears_at = self._chances.clears_at
        return max(
            ((clears_at + self._logs[n]) / max(self._growth[n], _NO_GROWTH) for n in self._open),
            default=0.0,
        )


def _few(names: Sequence[str], most: int = 3) -> str:
    more = f" and {len(names) - most} more" if len(names) > most else ""
    return f"{', '.join(names[:most])}{more}"
