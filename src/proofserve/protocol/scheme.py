"""The interface of proof schemes: options, work on one block, and what both use of a model."""

import abc
import math
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from proofserve.protocol.errors import ProtocolError
from proofserve.protocol.identity import Block

# What a decoder layer returns: a tensor, or a tuple that begins with hidden state and residual.
LayerOutput: TypeAlias = Tensor | tuple[Any, ...]
# A twin differs from its prompt in one token, so there must be another one to choose.
_LEAST = 2
# Numbers that a position of a layer draws: where its experts begin and their step, and the same of
# its groups.
DRAWS = 4


@dataclass(frozen=True, slots=True)
class AllowedTokens:
    """Token ids in rising order, as ranges [first, end) that neither touch nor overlap.

    Nearly all of a vocabulary is one range, which is short enough to travel with every call.
    Raises ProtocolError for less than two ids.
    """

    ranges: tuple[tuple[int, int], ...]

    def __post_init__(self) -> None:
        if len(self) < _LEAST:
            raise ProtocolError("tokenizer", f"{len(self)} ordinary token ids where 2 are needed")

    def __len__(self) -> int:
        return sum(end - first for first, end in self.ranges)

    def ids(self, places: NDArray[np.int64]) -> NDArray[np.int64]:
        """The ids at these places (0 to len - 1) of the rising order: int64 of the same shape."""
        firsts = np.array([first for first, _ in self.ranges])
        # The place at which each range begins.
        begins = np.cumsum([0, *(end - first for first, end in self.ranges)])[:-1]
        which = np.searchsorted(begins, places, side="right") - 1
        ids: NDArray[np.int64] = firsts[which] + places - begins[which]
        return ids


def allowed_tokens(ids: Collection[int]) -> AllowedTokens:
    """The ids of a tokenizer's vocabulary less its special and added ones, as ranges."""
    ordered = np.array(sorted(set(ids)), dtype=np.int64)
    breaks = np.flatnonzero(np.diff(ordered) != 1) + 1
    runs = [run for run in np.split(ordered, breaks) if len(run)]
    return AllowedTokens(tuple((int(run[0]), int(run[-1]) + 1) for run in runs))


@dataclass(frozen=True, slots=True)
class ExpertLayer:
    """A layer in which ``chosen`` of its ``experts`` compute each token.

    Where the router may only choose within ``chosen_groups`` of ``groups``, which are equally
    large and follow each other, so does the block. Raises ProtocolError if no choice is possible.
    """

    experts: int
    chosen: int
    groups: int = 1
    chosen_groups: int = 1

    def __post_init__(self) -> None:
        fits = 1 <= self.chosen_groups <= self.groups and self.experts % self.groups == 0
        if not (fits and 1 <= self.chosen <= self.allowed):
            raise ProtocolError("scheme", f"sketch-v2 cannot choose experts of {self}")

    @property
    def group_size(self) -> int:
        return self.experts // self.groups

    @property
    def allowed(self) -> int:
        """How many experts the chosen groups hold."""
        return self.chosen_groups * self.group_size

    def experts_of(self, drawn: NDArray[np.uint64]) -> NDArray[np.int64]:
        """Different ids [positions, chosen], each expert equally often; ``drawn`` is
        [positions, DRAWS]."""
        first, step, first_group, group_step = (drawn[:, each] for each in range(DRAWS))
        groups = _every(first_group, group_step, self.groups, self.chosen_groups)
        places = _every(first, step, self.allowed, self.chosen)
        group = np.take_along_axis(groups, places // self.group_size, axis=1)
        ids: NDArray[np.int64] = group * self.group_size + places % self.group_size
        return ids


def _every(
    first: NDArray[np.uint64], step: NDArray[np.uint64], modulus: int, count: int
) -> NDArray[np.int64]:
    """(a + j b) mod ``modulus`` for j below ``count``: [positions, count].

    b is one of the numbers prime to the modulus, so that no result repeats.
    """
    primes = np.array([b for b in range(1, max(2, modulus)) if math.gcd(b, modulus) == 1])
    a = (first % np.uint64(modulus)).astype(np.int64)
    b = primes[(step % np.uint64(len(primes))).astype(np.int64)]
    every: NDArray[np.int64] = (a[:, None] + np.arange(count) * b[:, None]) % modulus
    return every


@dataclass(frozen=True, slots=True)
class ModelFacts:
    """What schemes use of a model. Only sketches need the digest of its weights and its tokens.

    ``weights_digest`` is in hexadecimal. Raises ProtocolError for ``hidden_size`` below 1.
    """

    hidden_size: int
    weights_digest: str | None = None
    tokens: AllowedTokens | None = None

    def __post_init__(self) -> None:
        if self.hidden_size < 1:
            raise ProtocolError("hidden_size", f"{self.hidden_size} is below 1")


class BlockScheme(abc.ABC):
    """A scheme bound to a block, a model and a device.

    It holds what depends on the block alone and builds costly tensors on first use. All its inputs
    and outputs are on its device.
    """

    # Whether ``finish`` needs the states of all positions, or those of the last alone.
    reads_every_position = False
    # Whether the forward must apply ``layer_transform`` after every decoder layer.
    uses_layer_transforms = False
    # Whether ``experts`` stands in for the model's routers in a proof forward.
    chooses_experts = False

    def __init__(self, block: Block, model: ModelFacts, device: torch.device) -> None:
        self.block = block
        self.model = model
        self.device = device
        self.hidden_size = model.hidden_size

    @abc.abstractmethod
    def inputs(
        self, public_key: str, nonces: Sequence[int], seq_len: int, dtype: torch.dtype
    ) -> Tensor:
        """What the model reads: the scheme's ``sequences_per_nonce`` sequences of each nonce.

        Either embeddings [sequences, seq_len, hidden_size] in ``dtype``, or token ids int64
        [sequences, seq_len].
        """

    def layer_transform(self, layer: int, output: LayerOutput) -> LayerOutput:
        """The output of decoder layer ``layer`` (global index), transformed in its dtype.

        Keeps the structure of ``output``. Only for schemes whose ``uses_layer_transforms`` is
        true; any other raises NotImplementedError.
        """
        raise NotImplementedError("this scheme has no layer transforms")

    def experts(self, layer: int, of: ExpertLayer, seq_len: int) -> Tensor:
        """The experts of each position in decoder layer ``layer`` (global index).

        int64 [seq_len, of.chosen], the same for every nonce. Only for schemes whose
        ``chooses_experts`` is true; any other raises NotImplementedError.
        """
        raise NotImplementedError("this scheme leaves experts to the router")

    @abc.abstractmethod
    def finish(self, public_key: str, nonces: Sequence[int], states: Tensor) -> Tensor:
        """The proof values float32 [len(nonces), width] from the forward's output.

        ``states``, of any float dtype, are the outputs of the final norm in the order of
        ``inputs``: [sequences, seq_len, hidden_size], or [sequences, hidden_size] of the last
        positions, by ``reads_every_position``. States that are not finite, or whose norm is not,
        give a row of NaN. Raises ProtocolError for a wrong shape.
        """

    def _require_shape(self, states: Tensor, *expected: int) -> None:
        if states.shape != expected:
            shape = tuple(states.shape)
            raise ProtocolError("states", f"shape {shape} where {expected} is needed")


class Scheme(abc.ABC):
    """A named scheme that never changes (protocol P.1); subclasses hold its options."""

    # How many sequences the model reads for one nonce.
    sequences_per_nonce = 1

    @property
    @abc.abstractmethod
    def name(self) -> str:
        """The name by which nodes and validators agree on this scheme."""

    @property
    @abc.abstractmethod
    def width(self) -> int:
        """Number of float32 values per nonce."""

    @abc.abstractmethod
    def to_wire(self) -> dict[str, str | int | bool]:
        """The name and every option; ``schemes.from_wire`` gives an equal scheme back."""

    @abc.abstractmethod
    def for_block(self, block: Block, model: ModelFacts, device: torch.device) -> BlockScheme:
        """Bind the scheme to a block; raises ProtocolError for a model that it cannot use."""
