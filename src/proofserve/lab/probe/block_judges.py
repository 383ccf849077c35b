"""The tests of log-probabilities: those of ``verify``, with blocks of tokens as nonces."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Final

import numpy as np

from proofserve.lab.probe.blocks import ProbeBlocks
from proofserve.lab.verify.direction import DirectionJudge, Expected
from proofserve.lab.verify.judges import Chances, Finding, PairedJudge, Vectors
from proofserve.protocol.verdict.comparison import ClaimError
from proofserve.protocol.verdict.direction import HonestSpread, cosine, honest_spread
from proofserve.protocol.verdict.scale import SCALES, ScaleFit

# Of the ratio of an endpoint's errors to our own rounding, where nothing was calibrated: twice as
# large is still honest, and three times as large is not. Without a calibration the bets have no
# measured means; an honest ratio of up to 2 makes every one of them lose.
GENEROUS: Final = ScaleFit(s=1.4, nu1=20.0, nu2=20.0, norms=(1.0,) * len(SCALES))
# Blocks on which every suspect is computed, before the direction test begins: they show how our
# own rounding lies to the suspects, and how a prover with a suspect's weights would lie.
MEASURED_ON: Final = 8
# A suspect that moves the results less than honest rounding does cannot be told from it.
LEAST_COSINE: Final = 0.2


class _SomeSuspects:
    """Implements ``lab.verify.direction.Bank`` with a part of the bank's suspects."""

    def __init__(self, blocks: ProbeBlocks, names: Sequence[str]) -> None:
        self.names = names
        self._blocks = blocks

    def predictions(self, name: str, nonces: Sequence[int]) -> Vectors:
        return self._blocks.predictions(name, nonces)


class BlockJudges:
    """The sizes of the errors, and their directions in both forms, at ``chances`` each.

    ``unseen`` are suspects that no log-probabilities of these answers tell from the published
    weights; ``ratios`` and ``errors`` are those of every block so far.
    """

    def __init__(self, blocks: ProbeBlocks, chances: Chances) -> None:
        self._blocks = blocks
        self._chances = chances
        self._paired = PairedJudge(blocks.own_errors, GENEROUS, chances)
        self._directions: tuple[tuple[str, DirectionJudge], ...] = ()
        self._waiting: list[ClaimError] = []
        self.unseen: tuple[str, ...] = ()
        self.errors: list[ClaimError] = []
        self.ratios: list[float] = []

    def add(self, errors: Sequence[ClaimError]) -> None:
        """Raises EngineFault."""
        own = self._blocks.own_errors([error.nonce for error in errors])
        self.ratios += [e.distance / float(np.linalg.norm(own[e.nonce])) for e in errors]
        self.errors += errors
        self._paired.prepare(errors)
        for error in errors:
            self._paired.add(error)
        self._waiting += errors
        if not self._directions and len(self._waiting) >= MEASURED_ON:
            self._measure([error.nonce for error in self._waiting[:MEASURED_ON]])
        if self._directions:
            # One by one: the suspects of a block are chosen by what the blocks before it showed.
            for error in self._waiting:
                for _, judge in self._directions:
                    judge.prepare([error])
                    judge.add(error)
            self._waiting.clear()

    def findings(self) -> list[Finding]:
        directions = (replace(judge.finding(), test=test) for test, judge in self._directions)
        return [self._paired.finding(), *directions]

    @property
    def names(self) -> Sequence[str]:
        return self._blocks.names

    def cosines(self, name: str, most: int) -> list[float]:
        """Those of the first blocks, ``most`` at most, with a suspect. Raises EngineFault."""
        errors = self.errors[:most]
        predicted = self._blocks.predictions(name, [error.nonce for error in errors])
        return [cosine(e.error, predicted[e.nonce]) for e in errors if e.error is not None]

    def _measure(self, numbers: Sequence[int]) -> None:
        own = self._blocks.own_errors(numbers)
        expected: dict[str, Expected] = {}
        spreads: dict[str, HonestSpread] = {}
        for name in self._blocks.names:
            moved = self._blocks.predictions(name, numbers)
            honest = np.array([cosine(own[n], moved[n]) for n in numbers])
            # A prover with these weights rounds as we do, and errs by what the weights move too.
            cheating = np.array([cosine(own[n] + moved[n], moved[n]) for n in numbers])
            if cheating.mean() >= LEAST_COSINE:
                expected[name] = Expected(float(cheating.mean()), float(cheating.std(ddof=1)))
                spreads[name] = honest_spread(honest)
        self.unseen = tuple(name for name in self._blocks.names if name not in expected)
        if not expected:
            return
        bank = _SomeSuspects(self._blocks, tuple(expected))
        self._directions = (
            ("calibrated", DirectionJudge(bank, expected, spreads, self._chances)),
            ("certified", DirectionJudge(bank, expected, {}, self._chances)),
        )
