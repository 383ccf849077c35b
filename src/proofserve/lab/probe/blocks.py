"""Blocks of tokens: what nonces are to a verification, the log-probabilities are by blocks."""

from collections.abc import Callable, Sequence

import numpy as np
from numpy.typing import NDArray

from proofserve.lab.probe.readings import ReadAnswer, Readings
from proofserve.lab.verify.judges import Vectors
from proofserve.protocol.verdict.comparison import ClaimError

# Tokens in a block: enough that errors have a direction, few enough that an answer has several.
SIZE = 16

# Where a token stands: which of the answers, which of its tokens.
_Place = tuple[int, int]


class ProbeBlocks:
    """The tokens of all answers in a row, cut into blocks of ``SIZE``, numbered from 0.

    The vector of a block has those of its tokens, one behind the other. Implements
    ``lab.verify.direction.KernelBank``; tokens without log-probabilities are in no block.
    """

    def __init__(self, readings: Readings) -> None:
        self.names: Sequence[str] = readings.names
        self.kernels: Sequence[str] = readings.kernels
        self._readings = readings
        self._answers: list[ReadAnswer] = []
        self._waiting: list[_Place] = []
        self._blocks: list[tuple[_Place, ...]] = []

    def add(self, answer: ReadAnswer) -> list[ClaimError]:
        """The errors of the blocks that this answer completes."""
        index = len(self._answers)
        self._answers.append(answer)
        self._waiting += [(index, t) for t, error in enumerate(answer.errors) if error.size]
        before = len(self._blocks)
        while len(self._waiting) >= SIZE:
            self._blocks.append(tuple(self._waiting[:SIZE]))
            del self._waiting[:SIZE]
        new = range(before, len(self._blocks))
        return [ClaimError(n, self._vector(n, lambda i: self._answers[i].errors)) for n in new]

    def own_errors(self, numbers: Sequence[int]) -> Vectors:
        """What our own honest run does to each block."""
        return {n: self._vector(n, lambda i: self._answers[i].own) for n in numbers}

    def kernel_errors(self, kernel: str, numbers: Sequence[int]) -> Vectors:
        """What an honest kernel does to each block. Raises EngineFault."""

        def errors(index: int) -> Sequence[NDArray[np.float32]]:
            return self._readings.by_kernels(self._answers[index])[kernel].errors

        return {n: self._vector(n, errors) for n in numbers}

    def answers_of(self, numbers: Sequence[int]) -> NDArray[np.int64]:
        """The answer in which each block begins."""
        return np.array([self._blocks[n][0][0] for n in numbers])

    def predictions(self, name: str, nonces: Sequence[int]) -> Vectors:
        """What the suspect's weights would do to each block. Raises EngineFault."""
        needed = sorted({index for n in nonces for index, _ in self._blocks[n]})
        made = self._readings.by_suspect(name, [self._answers[index] for index in needed])
        found = {index: each.predicted for index, each in zip(needed, made, strict=True)}
        return {n: self._vector(n, found.__getitem__) for n in nonces}

    def _vector(
        self, number: int, of: Callable[[int], Sequence[NDArray[np.float32]]]
    ) -> NDArray[np.float32]:
        return np.concatenate([of(index)[t] for index, t in self._blocks[number]])
