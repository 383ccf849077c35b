"""Answers whose receipts are checked, and blocks of their tokens.

The errors of neighbouring tokens are alike, and one token says little. A block of 16 says about as
much as a nonce of ``sketch-v1``, so the same tests judge both.
"""

import random
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from proofserve.protocol.codec import encode
from proofserve.protocol.receipts.record import Sampling
from proofserve.protocol.receipts.sketches import ReceiptScheme, sketches
from proofserve.protocol.verdict.comparison import Claim
from proofserve.rounds.records import ProofBatch
from proofserve.verifier.claims import ClaimedArtifacts

if TYPE_CHECKING:
    from proofserve.engines.reference.engine import Run

BLOCK_TOKENS = 16
# Blocks of one answer that count: answers of a calibration have as many, and only so many of one
# conversation are known to be independent enough.
MOST_BLOCKS = 8


@dataclass(frozen=True, slots=True)
class Answer:
    """``prompt`` and ``output`` are token ids, ``sketches`` float32 [len(output), k_dim]."""

    name: str
    prompt: tuple[int, ...]
    output: tuple[int, ...]
    sampling: Sampling
    scheme: ReceiptScheme
    sketches: NDArray[np.float32]


class Blocks:
    """Blocks of ``BLOCK_TOKENS`` tokens of ``answers``, numbered from 0; a block may have two.

    Of an answer longer than ``MOST_BLOCKS`` blocks, pieces of a block's length count, which
    ``seed`` chooses: its node could not know them. The last tokens that fill no block are left out.
    """

    def __init__(self, answers: Sequence[Answer], seed: str) -> None:
        self.answers = tuple(answers)
        self.k_dim = answers[0].sketches.shape[1] if answers else 0
        draw = random.Random(seed)  # noqa: S311 - the node has signed its sketches before
        rows = [
            (index, token)
            for index, answer in enumerate(answers)
            for token in _chosen(len(answer.output), draw)
        ]
        count = len(rows) // BLOCK_TOKENS
        places = np.array(rows, dtype=np.int64).reshape(-1, 2)[: count * BLOCK_TOKENS]
        self._places = places.reshape(count, BLOCK_TOKENS, 2)
        self._rows: dict[ReceiptScheme, Tensor] = {}
        # Values of a block's vector: the sketches of its tokens, one after the other.
        self.width = BLOCK_TOKENS * self.k_dim

    def __len__(self) -> int:
        return len(self._places)

    def answers_of(self, blocks: Collection[int]) -> list[int]:
        """The indices of the answers that have tokens in ``blocks``."""
        found: list[int] = np.unique(self._places[list(blocks), :, 0]).tolist()
        return found

    def within(self, answers: Collection[int]) -> list[int]:
        """The blocks all of whose tokens are of ``answers``."""
        inside = np.isin(self._places[:, :, 0], list(answers)).all(axis=1)
        found: list[int] = np.flatnonzero(inside).tolist()
        return found

    def vectors(
        self, sketches: Mapping[int, NDArray[np.float32]], blocks: Sequence[int]
    ) -> NDArray[np.float32]:
        """float32 [len(blocks), width] of ``sketches``, those of each answer by its index."""
        made = np.empty((len(blocks), BLOCK_TOKENS, self.k_dim), np.float32)
        for row, block in enumerate(blocks):
            for column, (answer, token) in enumerate(self._places[block].tolist()):
                made[row, column] = sketches[answer][token]
        return made.reshape(len(blocks), self.width)

    def claims(self) -> ClaimedArtifacts:
        """What the receipts claim, in the form in which proofs are verified."""
        numbers = range(len(self))
        theirs = {index: answer.sketches for index, answer in enumerate(self.answers)}
        claims = tuple(map(Claim, numbers, encode(self.vectors(theirs, numbers))))
        return ClaimedArtifacts("", "", tuple(numbers), claims, width=self.width)

    def conversations(self) -> dict[int, int]:
        """The index of the answer that each block begins in."""
        return dict(enumerate(self._places[:, 0, 0].tolist()))

    def by_server(self) -> dict[str, list[int]]:
        """The blocks of each server by its sketch key; every start of a server has its own."""
        found: dict[str, list[int]] = {}
        for block, answer in self.conversations().items():
            found.setdefault(self.answers[answer].scheme.key, []).append(block)
        return found

    def forwards(self, runs: "Sequence[Run]") -> list[ProofBatch]:
        """The answers' sketches by block; those of an answer come together. Raises EngineFault."""
        batches = []
        for run in runs:
            needed = self.answers_of(run.nonces)
            found = {index: self._sketches(run, self.answers[index]) for index in needed}
            computed = np.array(self.within(needed), np.int64)
            vectors = self.vectors(found, computed.tolist())
            finite = np.isfinite(vectors).all(axis=1)
            good, failed = (tuple(computed[each].tolist()) for each in (finite, ~finite))
            batches.append(ProofBatch(good, vectors[finite], failed))
        return batches

    def _sketches(self, run: "Run", answer: Answer) -> NDArray[np.float32]:
        scheme, network = answer.scheme, run.network
        if scheme not in self._rows:
            self._rows[scheme] = scheme.rows(network.facts.hidden_size, network.device)
        # This import takes seconds, and --help needs none of it.
        from proofserve.engines.reference.forward import states_of  # noqa: PLC0415

        (states,) = states_of(network, [(answer.prompt, answer.output)], run.experts)
        made: NDArray[np.float32] = sketches(states, self._rows[scheme]).cpu().numpy()
        return made


def _chosen(tokens: int, draw: random.Random) -> list[int]:
    whole = tokens // BLOCK_TOKENS
    if whole <= MOST_BLOCKS:
        return list(range(tokens))
    pieces = sorted(draw.sample(range(whole), MOST_BLOCKS))
    return [piece * BLOCK_TOKENS + i for piece in pieces for i in range(BLOCK_TOKENS)]
