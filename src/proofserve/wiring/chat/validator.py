"""A validator with the published checkpoint, for chat answers with receipts."""

from collections.abc import Sequence
from typing import Self

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from proofserve.engines.reference.kernels import with_kernels
from proofserve.engines.reference.network import Network
from proofserve.engines.reference.reading import logits_of, states_of
from proofserve.lab.chat.answers import Answer, Blocks
from proofserve.protocol.receipts.sketches import ReceiptScheme, sketches
from proofserve.rounds.records import ProofBatch
from proofserve.wiring.validator import CheckpointValidator, ValidatorSetup


class AnswerForwards:
    """The sketches that a network gives for the answers of ``blocks``, by block.

    One forward reads a whole answer, so all blocks of an answer come with the first of them.
    """

    def __init__(self, blocks: Blocks) -> None:
        self._blocks = blocks
        self._rows: dict[ReceiptScheme, Tensor] = {}

    def __call__(self, network: Network, numbers: Sequence[int]) -> ProofBatch:
        """Raises EngineFault as ``states_of``."""
        needed = self._blocks.answers_of(numbers)
        found = {index: self._sketches(network, self._blocks.answers[index]) for index in needed}
        computed = self._blocks.within(needed)
        vectors = self._blocks.vectors(found, computed)
        finite = np.isfinite(vectors).all(axis=1).reshape(-1)
        numbered = list(zip(computed, finite.tolist(), strict=True))
        good = tuple(number for number, is_finite in numbered if is_finite)
        failed = tuple(number for number, is_finite in numbered if not is_finite)
        return ProofBatch(good, vectors[finite], failed)

    def _sketches(self, network: Network, answer: Answer) -> NDArray[np.float32]:
        scheme = answer.scheme
        if scheme not in self._rows:
            self._rows[scheme] = scheme.rows(network.facts.hidden_size, network.device)
        states = states_of(network, answer.prompt, answer.output)
        made: NDArray[np.float32] = sketches(states, self._rows[scheme]).cpu().numpy()
        return made


class ChatValidator(CheckpointValidator):
    """Implements ``lab.chat.verification.AnswerValidator`` beside the bank of suspects.

    At first it knows no answers: ``reading`` makes a validator of some.
    """

    def __init__(self, setup: ValidatorSetup) -> None:
        super().__init__(setup, AnswerForwards(Blocks((), "")))

    def reading(self, blocks: Blocks) -> Self:
        return self.with_other(AnswerForwards(blocks))

    def states(self, answer: Answer, kernel: str | None = None) -> NDArray[np.float32]:
        network = self._emulating(kernel)
        found: NDArray[np.float32] = states_of(network, answer.prompt, answer.output).cpu().numpy()
        return found

    def logits(self, states: NDArray[np.float32], kernel: str | None = None) -> NDArray[np.float32]:
        on_device = torch.from_numpy(states).to(self.published.device)
        made = logits_of(self._emulating(kernel), on_device)
        found: NDArray[np.float32] = made.cpu().numpy()
        return found

    def _emulating(self, kernel: str | None) -> Network:
        if kernel is None:
            return self.published
        return with_kernels(self.published, self._kernels[kernel])
