"""A checkpoint as the function that a proof needs: embeddings in, last hidden states out."""

from collections import defaultdict
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Final

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.overrides import TorchFunctionMode

from proofserve.engines import CheckpointError
from proofserve.engines.checkpoints import model_facts
from proofserve.engines.reference.checkpoint import LayeredCheckpoint
from proofserve.engines.reference.kernels import KernelProfile
from proofserve.engines.reference.rounding import EightBits, Rounding, Scaling, in_dtype
from proofserve.protocol.scheme import AllowedTokens, ModelFacts

DTYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16, "float32": torch.float32}

# Of a layer's index and a copy of it, which shares the weights: the layer that takes its place.
LayerChange = Callable[[int, nn.Module], nn.Module]
# Of a layer's index: how its keys and its values are rounded.
CacheRounding = Callable[[int], tuple[Rounding, Rounding]]
# An attribute of modules whose operands have 8 bits: kernels multiply the numbers exactly, and then
# by their scales, so that neither operand is rounded to the served dtype.
IN_EIGHT_BITS: Final = "operands_in_eight_bits"


@dataclass(frozen=True, slots=True)
class Network:
    """A checkpoint and how its forward is changed: layers, kernels, what is read and cached.

    Variants share the ``checkpoint``, of which one layer is in memory at a time. ``facts`` are
    those of the published checkpoint, also where the weights are of another: they decide the
    inputs.
    """

    checkpoint: LayeredCheckpoint
    facts: ModelFacts
    device: torch.device
    changes: tuple[LayerChange, ...] = ()
    kernels: KernelProfile | None = None
    """The kernels to emulate; None for those of this machine."""
    kernels_in: Mapping[int, KernelProfile] = field(default_factory=dict)
    """Those of some layers that have others, by the layer's index."""
    positions: slice | None = None
    """Those that the layers read, None for all; the others' states are the norm of embeddings."""
    cache: CacheRounding | None = None
    """How keys and values are rounded before attention reads them."""

    @property
    def config(self) -> Any:
        """In transformers' names."""
        return self.checkpoint.config

    @property
    def dtype(self) -> torch.dtype:
        return self.checkpoint.dtype

    @property
    def max_seq_len(self) -> int:
        return int(self.config.max_position_embeddings)

    @property
    def shapes(self) -> tuple[nn.Module, ...]:
        """The published layers without weights."""
        return self.checkpoint.shapes

    @property
    def vocabulary(self) -> int:
        """The number of token ids that the network can read."""
        return int(self.config.vocab_size)

    @property
    def weight_bits(self) -> int:
        """Those of a weight in the published matrices, without scales; 16 for unquantised ones."""
        return self.checkpoint.published.weight_bits

    @property
    def weights(self) -> int:
        """The number of weights in the matrices that every token is multiplied by."""
        modules = (module for layer in self.shapes for module in layer.modules())
        return sum(each.weight.numel() for each in modules if isinstance(each, nn.Linear))

    def changed(self, change: LayerChange) -> "Network":
        return replace(self, changes=(*self.changes, change))


def load(
    path: Path, dtype: str | None, device: str, served: str | None = None, *, unread: bool = False
) -> Network:
    """The checkpoint on disk; nothing is downloaded, and layers are read when a forward comes.

    A quantised checkpoint is the network that it declares: what its matrices multiply, and what its
    cache keeps, is rounded as its configuration says. ``dtype`` is one of ``DTYPES``, or None for
    the checkpoint's own; ``served`` is the one of servers, which keep scales of weights in it.
    ``unread``, for plans, needs the folder or the file of a configuration alone, and has invented
    facts. Raises CheckpointError.
    """
    if not (path / "config.json").is_file() and not (unread and path.is_file()):
        raise CheckpointError(f"{path} is no checkpoint: it has no config.json")
    if unknown := {dtype, served} - {None, *DTYPES}:
        raise CheckpointError(f"unknown dtype {unknown.pop()!r}; choose from {', '.join(DTYPES)}")
    try:
        place = torch.device(device)
    except RuntimeError as error:
        raise CheckpointError(f"unknown device {device!r}; try cpu or cuda") from error
    if place.type == "cuda" and not torch.cuda.is_available():
        raise CheckpointError("this torch sees no GPU; choose the device cpu")
    dtypes = (DTYPES.get(each or "") for each in (dtype, served))
    checkpoint = LayeredCheckpoint(path, place, *dtypes, needs_weights=not unread)
    size = checkpoint.config.hidden_size
    network = Network(checkpoint, ModelFacts(size), place)
    if (scales := checkpoint.published.cache) is not None:
        network = replace(network, cache=_DeclaredCache(scales))
    if declared := sorted(checkpoint.inputs.items()):
        inputs = {i: _inputs_by_module(network.shapes[i], how) for i, how in declared}
        network = network.changed(DeclaredInputs(inputs))
    if not unread:
        return replace(network, facts=model_facts(path, size))
    tokens = AllowedTokens(((0, network.vocabulary),))
    return replace(network, facts=ModelFacts(size, "00" * 32, tokens))


def weights_alone(network: Network) -> Network:
    """The network without the roundings of activations that its checkpoint declares.

    It is what a server computes that decodes the weights, and what all servers are near: of two
    that round activations each flips other values, so they are further from each other.
    """
    cache = None if isinstance(network.cache, _DeclaredCache) else network.cache
    changes = (each for each in network.changes if not isinstance(each, DeclaredInputs))
    return replace(network, changes=tuple(changes), cache=cache)


def with_kernels(network: Network, profile: KernelProfile | None) -> Network:
    """``network`` as kernels of ``profile`` compute it; it shares all weights.

    None gives this machine's kernels back. Raises ValueError for a network that is not in float32.
    """
    if network.dtype != torch.float32:
        raise ValueError(f"kernels are emulated in float32, not in {network.dtype}")
    scaling: Scaling = "division" if profile is None else profile.scaling
    changes = tuple(
        replace(each, scaling=scaling) if isinstance(each, DeclaredInputs) else each
        for each in network.changes
    )
    return replace(network, kernels=profile, changes=changes)


@dataclass(frozen=True, slots=True)
class _DeclaredCache:
    """Rounds keys and values of a layer to fp8 by their stored ``scales``, or by 1."""

    scales: Mapping[int, Mapping[str, float]]

    def __call__(self, layer: int) -> tuple[Rounding, Rounding]:
        scales = self.scales.get(layer, {})
        keys, values = (EightBits("fp8", scale=scales.get(each, 1.0)) for each in "kv")
        return keys.rounding(), values.rounding()


@dataclass(frozen=True, slots=True)
class DeclaredInputs:
    """Rounds what modules of a layer multiply: ``inputs`` by the layer and the module's path."""

    inputs: Mapping[int, Mapping[str, EightBits]]
    scaling: Scaling = "division"

    def __call__(self, index: int, layer: nn.Module) -> nn.Module:
        for path, how in self.inputs.get(index, {}).items():
            module, rounding = layer.get_submodule(path), in_dtype(how.rounding(self.scaling))
            if isinstance(module, nn.Linear):
                round_input(module, rounding)
            else:
                module.forward = _RoundingExperts(rounding, module.forward)
                setattr(module, IN_EIGHT_BITS, True)
        return layer


def _inputs_by_module(layer: nn.Module, inputs: Mapping[str, EightBits]) -> dict[str, EightBits]:
    """How modules of ``layer`` round what they multiply; ``inputs`` has it by parameter.

    Experts lie in one module, so all of their matrices must round in one way. Raises
    CheckpointError for a module that is neither linear nor experts.
    """
    found: dict[str, set[EightBits]] = defaultdict(set)
    for name, how in inputs.items():
        path, _, parameter = name.rpartition(".")
        module = layer.get_submodule(path)
        if not isinstance(module, nn.Linear) and module.get_parameter(parameter).ndim != 3:
            raise CheckpointError(f"what {name} multiplies cannot be rounded: it is no linear map")
        found[path].add(how)
    for path, hows in found.items():
        matrices = layer.get_submodule(path).named_parameters(recurse=False)
        plain = [n for n, each in matrices if each.ndim >= 2 and "bias" not in n]
        if len(hows) > 1 or any(f"{path}.{each}" not in inputs for each in plain):
            raise CheckpointError(f"what {path} multiplies cannot be rounded: its matrices differ")
    return {path: next(iter(hows)) for path, hows in found.items()}


def round_input(module: nn.Linear, rounding: Rounding) -> None:
    """Have ``module`` round what it multiplies."""
    module.register_forward_pre_hook(lambda _, args: (rounding(args[0]), *args[1:]))
    setattr(module, IN_EIGHT_BITS, True)


class _RoundingExperts(TorchFunctionMode):
    """The ``forward`` of experts whose products round what is multiplied by a matrix."""

    def __init__(self, rounding: Rounding, forward: Callable[..., Tensor]) -> None:
        super().__init__()
        self._rounding, self._forward = rounding, forward
        self._products = 0

    def __call__(self, *args: Any, **options: Any) -> Tensor:
        self._products = 0
        with self:
            made = self._forward(*args, **options)
        if self._products < 2:
            raise CheckpointError("what experts multiply cannot be rounded: a kernel does it all")
        return made

    def __torch_function__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        # The products of torch that experts use; the second operand is a matrix.
        if func in {functional.linear, torch._grouped_mm, Tensor.matmul}:
            self._products += 1
            args = (self._rounding(args[0]), *args[1:])
        return func(*args, **(kwargs or {}))
