"""The interface of proof schemes: a scheme and its options, and the scheme on one block."""

import abc
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from proofserve.protocol.draws import unit_vectors
from proofserve.protocol.errors import ProtocolError
from proofserve.protocol.identity import Challenge, layer_string, seed
from proofserve.protocol.inputs import input_embeddings
from proofserve.protocol.transforms import LayerOutput, map_layer_output


class BlockScheme(abc.ABC):
    """A scheme bound to a block, a hidden size and a device.

    It holds what depends on the block alone and builds costly tensors on first use. All its inputs
    and outputs are on its device.
    """

    def __init__(
        self,
        block_hash: str,
        hidden_size: int,
        device: torch.device,
        layer_step: Callable[[Tensor, Tensor], Tensor] | None = None,
        stronger_inputs: bool = False,
    ) -> None:
        if hidden_size < 1:
            raise ProtocolError("hidden_size", f"{hidden_size} is below 1")
        self.block_hash = block_hash
        self.hidden_size = hidden_size
        self.device = device
        self._layer_step = layer_step
        self._stronger_inputs = stronger_inputs
        self._layer_vectors: dict[tuple[int, torch.dtype], Tensor] = {}

    @property
    def uses_layer_transforms(self) -> bool:
        """Whether the forward must apply ``layer_transform`` after every decoder layer."""
        return self._layer_step is not None

    def inputs(
        self, public_key: str, nonces: Sequence[int], seq_len: int, dtype: torch.dtype
    ) -> Tensor:
        """Input embeddings [len(nonces), seq_len, hidden_size] in ``dtype`` (protocol 0.8, 0.9)."""
        challenge = Challenge(self.block_hash, public_key)
        strings = [challenge.input_string(nonce) for nonce in nonces]
        return input_embeddings(
            strings, seq_len, self.hidden_size, dtype, self.device, self._stronger_inputs
        )

    def layer_transform(self, layer: int, output: LayerOutput) -> LayerOutput:
        """The output of decoder layer ``layer`` (global index), transformed in its dtype.

        Keeps the structure of ``output``. Only for schemes whose ``uses_layer_transforms`` is
        true; any other raises RuntimeError.
        """
        step = self._layer_step
        if step is None:
            raise RuntimeError("this scheme has no layer transforms")
        return map_layer_output(output, lambda x: step(x, self._layer_vector(layer, x.dtype)))

    @abc.abstractmethod
    def finish(self, public_key: str, nonces: Sequence[int], last_hidden: Tensor) -> Tensor:
        """The proof values float32 [len(nonces), width] from the forward's output.

        ``last_hidden`` [len(nonces), hidden_size], of any float dtype, is the model's output at
        each sequence's last position, in the order of ``nonces``. A row that is not finite, or
        whose norm is not, gives a row of NaN. Raises ProtocolError for a wrong shape.
        """

    def _hidden_rows(self, nonces: Sequence[int], last_hidden: Tensor) -> Tensor:
        expected = (len(nonces), self.hidden_size)
        if last_hidden.shape != expected:
            raise ProtocolError(
                "last_hidden", f"shape {tuple(last_hidden.shape)} where {expected} is needed"
            )
        rows = last_hidden.to(torch.float32)
        # Dividing by an infinite norm would turn a broken row into zeros, which look valid.
        norms = torch.linalg.vector_norm(rows, dim=-1, keepdim=True)
        return rows.masked_fill(~norms.isfinite(), torch.nan)

    def _layer_vector(self, layer: int, dtype: torch.dtype) -> Tensor:
        key = layer, dtype
        if key not in self._layer_vectors:
            string = layer_string(self.block_hash, layer)
            vector = unit_vectors([seed(string)], self.hidden_size, self.device)[0]
            self._layer_vectors[key] = vector.to(dtype)
        return self._layer_vectors[key]


class Scheme(abc.ABC):
    """A named scheme that never changes (protocol P.1); subclasses hold its options."""

    @property
    @abc.abstractmethod
    def name(self) -> str:
        """The name by which nodes and validators agree on this scheme."""

    @property
    @abc.abstractmethod
    def uses_layer_transforms(self) -> bool:
        """Whether the outputs of decoder layers are transformed during the proof forward."""

    @property
    @abc.abstractmethod
    def width(self) -> int:
        """Number of float32 values per nonce."""

    @abc.abstractmethod
    def to_wire(self) -> dict[str, str | int | bool]:
        """The name and every option; ``schemes.from_wire`` gives an equal scheme back."""

    @abc.abstractmethod
    def for_block(self, block_hash: str, hidden_size: int, device: torch.device) -> BlockScheme:
        """Bind the scheme to a block; raises ProtocolError for a hidden size that it cannot use."""
