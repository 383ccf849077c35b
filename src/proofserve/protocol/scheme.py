"""The interface of proof schemes: a scheme and its options, and the scheme on one block."""

import abc
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from proofserve.protocol.errors import ProtocolError
from proofserve.protocol.identity import Block
from proofserve.protocol.model import AllowedTokens, ExpertLayer
from proofserve.protocol.transforms import LayerOutput


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
