"""A model with massive activations, as large trained ones have: channels far above all others.

They round alike in every nonce, because they are nearly constant: the first layer writes them as a
mean of many squares (M. Sun et al., Massive Activations in Large Language Models, 2024).
"""

import re
import shutil
from pathlib import Path
from typing import Final

from safetensors.torch import load_file, save_file
from torch import Tensor

from proofserve.cli.model import SmallModel, checkpoint
from proofserve.engines.checkpoints import CACHE

MASSIVE: Final = "massive"
CHANNELS: Final = [3, 100]
# Times the spread of the other channels.
SIZE: Final = 300.0
# The mean of silu(a) a for what the first layer's neurons get.
_MEAN: Final = 0.5
_LAYERS: Final = 6
_WEIGHTS: Final = "model.safetensors"


def massive_checkpoint(parent: Path) -> Path:
    """The tiny qwen3 with ``CHANNELS`` of ``SIZE``, written to a folder of ``parent`` at first."""
    folder, part = parent / MASSIVE, parent / f"{MASSIVE}.part"
    if folder.is_dir():
        return folder
    shutil.rmtree(part, ignore_errors=True)
    source = checkpoint(SmallModel("qwen3"))
    shutil.copytree(source, part, ignore=shutil.ignore_patterns(CACHE))
    tensors = load_file(source / _WEIGHTS)
    _write_channels(tensors, "model.layers.0.mlp")
    for name, weight in tensors.items():
        if name.endswith("norm.weight") and (layer := _reading_layer(name)):
            _rescale(weight, layer)
    save_file(tensors, part / _WEIGHTS, metadata={"format": "pt"})
    part.rename(folder)
    return folder


def _write_channels(tensors: dict[str, Tensor], mlp: str) -> None:
    down = tensors[f"{mlp}.down_proj.weight"]
    half = down.shape[1] // 2
    # A neuron of which both factors are the same gives about a square.
    tensors[f"{mlp}.up_proj.weight"][:half] = tensors[f"{mlp}.gate_proj.weight"][:half]
    down[CHANNELS] = 0.0
    for channel in CHANNELS:
        down[channel, :half] = SIZE / (_MEAN * half)


def _reading_layer(name: str) -> int:
    """The number of the layer whose norm reads the residual stream; 0 if it has no channels yet."""
    if "q_norm" in name or "k_norm" in name:
        return 0
    found = re.search(r"layers\.(\d+)\.", name)
    return int(found[1]) if found else _LAYERS


def _rescale(norm: Tensor, layer: int) -> None:
    """All channels are read at the scale that they have without massive ones beside them.

    No norm bounds the other channels beside massive ones, so each layer's part of the residual
    stream, about one spread, is taken off.
    """
    norm *= SIZE * (len(CHANNELS) / len(norm)) ** 0.5 / (1.0 + layer)
    norm[CHANNELS] /= SIZE
