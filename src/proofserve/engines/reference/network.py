"""A checkpoint as the function that a proof needs: embeddings in, last hidden states out."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import nn

from proofserve.engines.checkpoints import model_facts
from proofserve.engines.reference.arithmetic import KernelProfile
from proofserve.engines.reference.checkpoint import LayeredCheckpoint
from proofserve.engines.reference.errors import CheckpointError
from proofserve.engines.reference.rounding import Rounding
from proofserve.protocol.scheme import ModelFacts

DTYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16, "float32": torch.float32}

# Of a layer's index and a copy of it, which shares the weights: the layer that takes its place.
LayerChange = Callable[[int, nn.Module], nn.Module]


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
    positions: slice | None = None
    """Those that the layers read, None for all; the others' states are the norm of embeddings."""
    cache: Rounding | None = None
    """How keys and values are rounded before attention reads them."""

    @property
    def config(self) -> Any:
        """In transformers' names."""
        return self.checkpoint.config

    @property
    def dtype(self) -> torch.dtype:
        return self.checkpoint.dtype

    @property
    def declared_dtype(self) -> torch.dtype:
        """The one that the checkpoint says, in which servers compute by default."""
        return self.checkpoint.declared_dtype

    @property
    def max_seq_len(self) -> int:
        return int(self.config.max_position_embeddings)

    @property
    def shapes(self) -> tuple[nn.Module, ...]:
        """The published layers without weights."""
        return tuple(self.checkpoint.shapes)

    @property
    def vocabulary(self) -> int:
        """The number of token ids that the network can read."""
        return int(self.config.vocab_size)

    @property
    def weights(self) -> int:
        """The number of weights in the matrices that every token is multiplied by."""
        modules = (module for layer in self.shapes for module in layer.modules())
        return sum(each.weight.numel() for each in modules if isinstance(each, nn.Linear))

    def changed(self, change: LayerChange) -> "Network":
        return replace(self, changes=(*self.changes, change))


def load(path: Path, dtype: str | None, device: str) -> Network:
    """The checkpoint on disk; nothing is downloaded, and layers are read when a forward comes.

    ``dtype`` is one of ``DTYPES``, or None for the checkpoint's own. Raises CheckpointError.
    """
    if not (path / "config.json").is_file():
        raise CheckpointError(f"{path} is no checkpoint: it has no config.json")
    if dtype is not None and dtype not in DTYPES:
        raise CheckpointError(f"unknown dtype {dtype!r}; choose from {', '.join(DTYPES)}")
    place = _device(device)
    checkpoint = LayeredCheckpoint(path, DTYPES[dtype] if dtype else None, place)
    return Network(checkpoint, model_facts(path, checkpoint.config.hidden_size), place)


def _device(name: str) -> torch.device:
    try:
        device = torch.device(name)
    except RuntimeError as error:
        raise CheckpointError(f"unknown device {name!r}; try cpu or cuda") from error
    if device.type == "cuda" and not torch.cuda.is_available():
        raise CheckpointError("this torch sees no GPU; choose the device cpu")
    return device
