"""Seeded weights, scaled so that every layer and the whole context change a proof.

The input of a proof is N(0, 1) per element. A prover could leave out a layer whose output is much
smaller than that, and no validator would notice. So each projection keeps the variance of its
input, and the two that write to the residual stream add to it at that scale: the MLP with a
deviation of 1, attention with 0.3 in the first layer (256 positions) to 1.7 in the last; Gemma's
norms after both make it 1 everywhere.

Attention must look at some positions more than at others: the mean of 256 random values is
small, and much the same for any 64 of them. It must not look at one position alone either, or
rounding decides which. Scores with a deviation of s leave about exp(-s^2) of the positions in
effect, a fifth of them for 1.25.
"""

import hashlib
import math
from collections.abc import Iterator
from typing import Final

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, PreTrainedConfig
from transformers.core_model_loading import revert_weight_conversion

from proofserve.models.architectures import Architecture

SCORE_STD: Final = 1.25
# Averaging over the attended positions shrinks the values; this makes up for part of it.
ATTENTION_GAIN: Final = 2.5
# silu(a) * b of two unit normals has a deviation of 0.6.
MLP_GAIN: Final = 1.7
# Norms that are not all alike, so that a loader which mixes two of them up changes the vectors.
NORM_SPREAD: Final = 0.05
# What is added to outputs, to the scores of experts and to those of attention's sinks.
BIAS_STD: Final = 0.1


def _normal(seed: int, name: str, shape: torch.Size) -> Tensor:
    digest = hashlib.sha256(f"{seed}:{name}".encode()).digest()
    generator = torch.Generator().manual_seed(int.from_bytes(digest[:8], "big"))
    return torch.randn(shape, generator=generator, dtype=torch.float32)


def _norm(family: Architecture, name: str, unit: Tensor) -> Tensor:
    sharpens = name.endswith(("q_norm.weight", "k_norm.weight"))
    gain = math.sqrt(SCORE_STD) if sharpens else 1.0
    return gain * (1.0 + NORM_SPREAD * unit) - family.norm_offset


def _matrix(family: Architecture, name: str, unit: Tensor) -> Tensor:
    # Experts are matrices one upon the other.
    fan_in = unit.shape[-2 if unit.ndim > 2 and family.inputs_first else -1]
    gain = 1.0
    if name.endswith("o_proj.weight"):
        gain = ATTENTION_GAIN
    elif name.endswith(("down_proj.weight", "experts.down_proj")):
        # A token's experts are averaged.
        gain = MLP_GAIN * (math.sqrt(family.chosen) if ".experts." in name else 1.0)
    elif name.endswith(("q_proj.weight", "k_proj.weight")) and not family.norms_queries:
        gain = math.sqrt(SCORE_STD)
    elif name.endswith("embed_tokens.weight") and not family.scales_tokens:
        # The inputs of chat then have the same scale as those of a proof.
        gain = math.sqrt(fan_in)
    return gain / math.sqrt(fan_in) * unit


def _drawn(family: Architecture, name: str, unit: Tensor) -> Tensor:
    if name.endswith(("bias", "sinks")):
        return BIAS_STD * unit
    return _norm(family, name, unit) if unit.ndim == 1 else _matrix(family, name, unit)


def seeded_weights(
    family: Architecture, config: PreTrainedConfig, seed: int, dtype: torch.dtype
) -> Iterator[tuple[str, Tensor]]:
    """Yield every tensor of the checkpoint by name, in ``dtype``.

    Names and shapes are those of the model's own class, built on the meta device, as it saves them:
    experts one by one, for example. The same arguments give the same bits.
    """
    with torch.device("meta"):
        skeleton = AutoModelForCausalLM.from_config(config)
    drawn = {
        name: _drawn(family, name, _normal(seed, name, blank.shape)).to(dtype)
        for name, blank in sorted(skeleton.state_dict().items())
    }
    for name, tensor in revert_weight_conversion(skeleton, drawn).items():
        yield name, tensor.contiguous()
