"""What a probe needs of the checkpoint: its tokenizer, and the logits of its network."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from proofserve.lab.probe.records import TokensRead

# Names of the published weights, as exact as the validator computes and as it would serve them.
PUBLISHED, SERVED = "published", "served"


class Tokens(Protocol):
    """The checkpoint's tokenizer. ``size`` is the number of token ids that have a logit."""

    @property
    def size(self) -> int: ...

    @property
    def pieces(self) -> Mapping[str, int]:
        """The id of every text that exactly one id stands for."""

    def of_chat(self, text: str) -> tuple[int, ...]:
        """A conversation of one message, up to where the answer begins."""

    def of_completion(self, text: str) -> tuple[int, ...]: ...

    def of_answer(self, text: str) -> tuple[int, ...]:
        """Without tokens that mark a beginning or an end."""

    def text_of(self, ids: Sequence[int]) -> str:
        """Without special tokens."""


class LogitReader(Protocol):
    """Networks that read conversations: the published one, and suspects by their ``names``.

    Honest ``kernels`` compute the published one otherwise.
    """

    @property
    def names(self) -> Sequence[str]: ...

    @property
    def kernels(self) -> Sequence[str]: ...

    def logits(
        self, name: str, conversations: Sequence[TokensRead]
    ) -> Iterator[NDArray[np.float32]]:
        """For each conversation [tokens of the answer, vocabulary]: what chose each token.

        ``name`` is PUBLISHED, SERVED or one of ``names``; PUBLISHED reads a conversation before a
        suspect does. Raises EngineFault if a forward fails or a logit is not finite.
        """

    def kernel_logits(
        self, kernel: str, conversations: Sequence[TokensRead]
    ) -> Iterator[NDArray[np.float32]]:
        """As ``logits``, by one of ``kernels``."""
