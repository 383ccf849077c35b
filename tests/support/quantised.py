"""Small checkpoints in the formats in which quantised models are published.

Each format is written by the library that owns it, or by its definition in numpy, and comes with
the numbers that it means, decoded without any code of ours.
"""

import json
import shutil
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import numpy as np
import torch
from compressed_tensors.compressors import BaseCompressor
from compressed_tensors.quantization import QuantizationArgs, QuantizationScheme
from compressed_tensors.quantization.lifecycle.forward import dequantize
from compressed_tensors.quantization.utils import calculate_qparams
from numpy.typing import NDArray
from safetensors.torch import load_file, save_file
from torch import Tensor
from torch.nn import functional
from transformers.integrations.finegrained_fp8 import Fp8Dequantize
from transformers.integrations.mxfp4 import convert_moe_packed_tensors

from support.families import model_of

Settings = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Stored:
    """The ``parts`` of a matrix, by the end of their names, and what they mean."""

    parts: Mapping[str, Tensor]
    decoded: Tensor


Store = Callable[[Tensor], Stored]


@dataclass(frozen=True, slots=True)
class Written:
    """A checkpoint, its ``matrices`` decoded by others, and a plain one that holds these."""

    folder: Path
    plain: Path
    matrices: Mapping[str, Tensor]


def write(
    family: str, root: Path, settings: Settings, store: Callable[[Tensor], Stored]
) -> Written:
    """A model of ``family`` (see ``families``), whose layers' matrices ``store`` keeps."""
    model_of(family, torch.bfloat16).save_pretrained(root / "source")
    return quantise(root / "source", root, settings, store)


def quantise(source: Path, root: Path, settings: Settings, store: Store) -> Written:
    """The checkpoint in ``source`` with its layers' matrices as ``store`` keeps them."""
    folder, plain = root / "quantised", root / "plain"
    stored, whole, matrices = {}, {}, {}
    for name, weight in load_file(source / "model.safetensors").items():
        stored[name] = whole[name] = weight
        if is_matrix(name, weight):
            kept = store(weight)
            del stored[name]
            base = name.removesuffix(".weight")
            stored |= {f"{base}{end}": part.contiguous() for end, part in kept.parts.items()}
            matrices[name] = whole[name] = kept.decoded.contiguous()
    _save(source, folder, stored, {"quantization_config": settings})
    _save(source, plain, whole, {"dtype": "float32"})
    return Written(folder, plain, matrices)


def is_matrix(name: str, weight: Tensor) -> bool:
    is_router = name.endswith((".gate.weight", ".router.weight"))
    in_gpt_oss = weight.ndim == 3
    return (
        ".layers." in name
        and not is_router
        and (weight.ndim == 2 or in_gpt_oss)
        and not (name.endswith("_bias"))
    )


def _save(source: Path, folder: Path, tensors: Mapping[str, Tensor], changes: Settings) -> None:
    shutil.copytree(source, folder)
    save_file(
        {name: each.contiguous() for name, each in tensors.items()},
        folder / "model.safetensors",
        {"format": "pt"},
    )
    rewrite(folder, **changes)


def rewrite(folder: Path, **changes: Any) -> None:
    """Change fields of a checkpoint's configuration."""
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, **changes}))


def rewrite_tensors(folder: Path, change: Callable[[dict[str, Tensor]], object]) -> None:
    """Have ``change`` alter the tensors of a checkpoint."""
    tensors = load_file(folder / "model.safetensors")
    change(tensors)
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})


# -- compressed-tensors, by the library ------------------------------------------------------------


def compressed_settings(layout: str, weights: Settings, inputs: Settings | None = None) -> Settings:
    group = {"targets": ["Linear"], "weights": weights, "input_activations": inputs}
    return {
        "quant_method": "compressed-tensors",
        "format": layout,
        "config_groups": {"group_0": group},
        "ignore": ["lm_head"],
        "quantization_status": "compressed",
    }


def compressed(layout: str, weights: Settings, scales: torch.dtype) -> Store:
    """As llm-compressor stores matrices whose scales have the dtype ``scales``."""
    scheme = QuantizationScheme(targets=["Linear"], weights=QuantizationArgs(**weights))
    compressor: Any = BaseCompressor.get_value_from_registry(layout)
    order = weights.get("actorder")

    def store(weight: Tensor) -> Stored:
        scale, zero = _fitted(weight.float(), scheme.weights)
        state = {"weight": weight.float(), "weight_scale": scale.to(scales)}
        if not scheme.weights.symmetric:
            state["weight_zero_point"] = zero.to(torch.int8)
        if order == "group":
            generator = torch.Generator().manual_seed(0)
            groups = torch.arange(weight.shape[1]) // weights["group_size"]
            state["weight_g_idx"] = groups[torch.randperm(len(groups), generator=generator)].int()
        parts = compressor.compress(state, scheme)
        decoded = decode({**parts, "weight_scale": parts["weight_scale"].float()})
        # The library rounds what it decodes to the dtype of the scales.
        assert torch.equal(decoded.to(scales), decode(parts))
        return Stored({f".{name}": part for name, part in parts.items()}, decoded)

    def decode(parts: Mapping[str, Tensor]) -> Tensor:
        if scheme.weights.strategy == "block":
            # ``decompress`` takes some scales of blocks for those of groups.
            return dequantize(parts["weight"], parts["weight_scale"], args=scheme.weights)
        return compressor.decompress(parts, scheme)["weight"]

    return store


def _fitted(weight: Tensor, args: Any) -> tuple[Tensor, Tensor]:
    """Scales and zero points from the smallest and the largest number of each part."""
    if args.strategy == "group":
        parts = weight.unflatten(-1, (-1, args.group_size))
    elif args.strategy == "block":
        tall, wide = args.block_structure
        filled = functional.pad(weight, (0, -weight.shape[1] % wide, 0, -weight.shape[0] % tall))
        blocks = filled.unflatten(0, (-1, tall)).unflatten(-1, (-1, wide)).transpose(1, 2)
        parts = blocks.flatten(-2)
    elif args.strategy == "channel":
        parts = weight.unsqueeze(1)
    else:
        parts = weight.reshape(1, -1)
    return calculate_qparams(parts.amin(-1), parts.amax(-1), args)


# -- fp8 and mxfp4, by transformers ----------------------------------------------------------------


def fp8_in_blocks(size: int, scales: torch.dtype = torch.float32) -> Store:
    def store(weight: Tensor) -> Stored:
        rows, columns = weight.shape
        filled = functional.pad(weight.float(), (0, -columns % size, 0, -rows % size))
        blocks = filled.unflatten(0, (-1, size)).unflatten(-1, (-1, size))
        scale = (blocks.abs().amax((1, 3)) / 448).clamp_min(1e-6)
        if scales == torch.float8_e8m0fnu:
            scale = scale.log2().ceil().exp2()
        scale = scale.to(scales)
        spread = scale.float().repeat_interleave(size, 0).repeat_interleave(size, 1)
        values = (filled / spread).to(torch.float8_e4m3fn)
        whole = Fp8Dequantize(None)._dequantize_one(values, scale, torch.float32)
        cut = values[:rows, :columns]
        return Stored({".weight": cut, ".weight_scale_inv": scale}, whole[:rows, :columns])

    return store


def fp8_whole(per_channel: bool, inputs: float | None = None) -> Store:
    """One scale for the matrix or for each output; ``inputs`` is a stored scale of inputs."""

    def store(weight: Tensor) -> Stored:
        size = weight.float().abs().amax(-1, keepdim=True) if per_channel else weight.abs().max()
        scale = size.float() / 448
        values = (weight.float() / scale).to(torch.float8_e4m3fn)
        # Experts in one tensor have no module of their own.
        end = ".weight" if weight.ndim == 2 else ""
        parts = {end: values, f"{end}_scale": scale}
        if inputs is not None:
            parts[".input_scale"] = torch.tensor(inputs)
        return Stored(parts, values.float() * scale)

    return store


def mxfp4_experts(weight: Tensor) -> Stored:
    """Blocks drawn at random, for experts [experts, in, out] of gpt-oss; other matrices stay."""
    if weight.ndim == 2:
        return Stored({".weight": weight}, weight)
    generator = torch.Generator().manual_seed(weight.shape[1])
    experts, inputs, outputs = weight.shape
    shape = (experts, outputs, inputs // 32)
    blocks = torch.randint(0, 256, (*shape, 16), dtype=torch.uint8, generator=generator)
    scales = torch.randint(118, 124, shape, dtype=torch.uint8, generator=generator)
    decoded = convert_moe_packed_tensors(blocks, scales, dtype=torch.float32)
    return Stored({"_blocks": blocks, "_scales": scales}, decoded)


# -- AWQ and GPTQ, by their definitions ------------------------------------------------------------

# AutoAWQ: the output that each place of an int32 holds, from the lowest bits on.
_AWQ_PLACES: Final = (0, 2, 4, 6, 1, 3, 5, 7)


def awq(size: int) -> Store:
    def store(weight: Tensor) -> Stored:
        values, zeros, scales = _integers(weight, 4, size, symmetric=False)
        groups = np.arange(len(values)) // size
        return Stored(
            {
                ".qweight": torch.from_numpy(_packed_rows(values, 4, _AWQ_PLACES)),
                ".qzeros": torch.from_numpy(_packed_rows(zeros, 4, _AWQ_PLACES)),
                ".scales": torch.from_numpy(scales),
            },
            _meant(values, zeros, scales, groups),
        )

    return store


@dataclass(frozen=True, slots=True)
class Gptq:
    """``zero`` less one is stored in the old format; ``mixed`` inputs are of groups at random."""

    bits: int
    size: int
    old: bool
    symmetric: bool = False
    mixed: bool = False
    has_groups: bool = True

    def settings(self, **others: Any) -> Settings:
        layout = {"checkpoint_format": "gptq" if self.old else "gptq_v2"}
        more = {"bits": self.bits, "group_size": self.size, "sym": self.symmetric}
        return {"quant_method": "gptq", "desc_act": self.mixed, **layout, **more, **others}

    def __call__(self, weight: Tensor) -> Stored:
        size = self.size if self.size > 0 else weight.shape[1]
        values, zeros, scales = _integers(weight, self.bits, size, self.symmetric)
        groups = np.arange(len(values)) // size
        if self.mixed:
            groups = np.random.default_rng(0).permutation(groups)
        places = range(32 // self.bits)
        kept = zeros - 1 if self.old else zeros
        parts = {
            ".qweight": torch.from_numpy(_packed_rows(values.T, self.bits, places)).T,
            ".qzeros": torch.from_numpy(_packed_rows(kept, self.bits, places)),
            ".scales": torch.from_numpy(scales),
        }
        if self.has_groups:
            parts[".g_idx"] = torch.from_numpy(groups.astype(np.int32))
        return Stored(parts, _meant(values, zeros, scales, groups))


def _integers(weight: Tensor, bits: int, size: int, symmetric: bool) -> tuple[NDArray[Any], ...]:
    """Integers [in, out], zero points [groups, out] of 1 at least, and scales float16."""
    turned = weight.float().T.numpy()
    groups = turned.reshape(-1, size, turned.shape[1])
    most = 2**bits - 1
    if symmetric:
        scales = (np.abs(groups).max(1) * 2 / most).astype(np.float16)
        zeros = np.full(scales.shape, 2 ** (bits - 1))
    else:
        low, high = groups.min(1), groups.max(1)
        scales = ((high - low) / most).astype(np.float16)
        zeros = np.clip(np.round(-low / scales.astype(np.float32)), 1, most).astype(np.int64)
    spread = scales.astype(np.float32).repeat(size, 0)
    values = np.clip(np.round(turned / spread) + zeros.repeat(size, 0), 0, most)
    return values.astype(np.int64), zeros, scales


def _packed_rows(values: NDArray[Any], bits: int, places: Any) -> NDArray[np.int32]:
    """Rows of integers as rows of int32; a place holds the output that ``places`` says."""
    count = 32 // bits
    packed = np.zeros((values.shape[0], values.shape[1] // count), np.uint32)
    for column in range(packed.shape[1]):
        for place, output in enumerate(places):
            number = values[:, column * count + output].astype(np.uint32)
            packed[:, column] |= number << np.uint32(place * bits)
    return packed.view(np.int32)


def _meant(
    values: NDArray[Any], zeros: NDArray[Any], scales: NDArray[Any], groups: NDArray[Any]
) -> Tensor:
    """float32 [out, in] of integers [in, out]."""
    made = np.empty(values.shape, np.float32)
    for row, group in enumerate(groups):
        made[row] = (values[row] - zeros[group]).astype(np.float32) * scales[group]
    return torch.from_numpy(made.T.copy())


# -- all of them -----------------------------------------------------------------------------------

# Nothing is declared of activations, where it is not the point.
FP8: Final[Settings] = {"quant_method": "fp8", "fmt": "e4m3", "activation_scheme": None}
BLOCKS: Final[Settings] = {**FP8, "weight_block_size": [128, 128]}
AWQ: Final[Settings] = {"quant_method": "awq", "bits": 4, "group_size": 64, "version": "gemm"}


def packed(bits: int, **weights: Any) -> tuple[Settings, Store]:
    args = {"num_bits": bits, "type": "int", "symmetric": True, **weights}
    settings = compressed_settings("pack-quantized", args)
    return settings, compressed("pack-quantized", args, torch.bfloat16)


def bytes_each(layout: str, kind: str, strategy: str, **weights: Any) -> tuple[Settings, Store]:
    args = {"num_bits": 8, "type": kind, "strategy": strategy, **weights}
    scales = torch.float32 if kind == "float" else torch.bfloat16
    return compressed_settings(layout, args), compressed(layout, args, scales)


TOKEN: Final = {"num_bits": 8, "dynamic": True, "strategy": "token", "symmetric": True}
GROUPS: Final = {"strategy": "group", "group_size": 32}
FORMATS: Final[dict[str, tuple[str, Settings, Store]]] = {
    "fp8 in blocks": ("qwen3", BLOCKS, fp8_in_blocks(128)),
    "fp8 in blocks, scales of powers": ("qwen3", BLOCKS, fp8_in_blocks(128, torch.float8_e8m0fnu)),
    "fp8 in blocks, experts": ("qwen3_moe", BLOCKS, fp8_in_blocks(128, torch.bfloat16)),
    "fp8 per tensor": ("qwen3", FP8, fp8_whole(per_channel=False)),
    "fp8 per channel": ("qwen3", FP8, fp8_whole(per_channel=True)),
    "mxfp4": ("gpt_oss", {"quant_method": "mxfp4"}, mxfp4_experts),
    "int4 in groups": ("qwen3", *packed(4, **GROUPS)),
    "int4 in groups, experts": ("qwen3_moe", *packed(4, **GROUPS)),
    "int4 in groups with zero points": ("qwen3", *packed(4, **GROUPS | {"symmetric": False})),
    "int4 in mixed groups": ("qwen3", *packed(4, **GROUPS, actorder="group")),
    "int4 per channel with zero points": ("qwen3", *packed(4, strategy="channel", symmetric=False)),
    "int8 in groups": ("qwen3", *packed(8, **GROUPS)),
    "int8 per channel": ("qwen3", *bytes_each("int-quantized", "int", "channel")),
    "int8 per tensor": ("qwen3", *bytes_each("int-quantized", "int", "tensor")),
    "int8 per channel with zero points": (
        "qwen3",
        *bytes_each("int-quantized", "int", "channel", symmetric=False),
    ),
    "float8 per channel": ("qwen3_moe", *bytes_each("float-quantized", "float", "channel")),
    "float8 per tensor": ("qwen3", *bytes_each("float-quantized", "float", "tensor")),
    "float8 in blocks": (
        "qwen3",
        *bytes_each("float-quantized", "float", "block", block_structure=[128, 128]),
    ),
    "float8 in naive bytes": ("qwen3", *bytes_each("naive-quantized", "float", "channel")),
    "AWQ": ("qwen3", AWQ, awq(64)),
    "AWQ, experts": ("qwen3_moe", AWQ, awq(64)),
    **{
        f"GPTQ {of}": ("qwen3", of.settings(), of)
        for of in (
            Gptq(4, 64, old=True),
            Gptq(4, 64, old=False),
            Gptq(4, 32, old=True, symmetric=True),
            Gptq(4, 32, old=True, mixed=True),
            Gptq(8, 64, old=True),
            Gptq(4, -1, old=False, has_groups=False),
        )
    },
}
BITS: Final = {"fp8": 8, "float8": 8, "int8": 8, "GPTQ Gptq(bits=8": 8}


def write_as(name: str, root: Path, **settings: Any) -> Written:
    family, default, store = FORMATS[name]
    return write(family, root, {**default, **settings}, store)


# -- those that servers compute here ---------------------------------------------------------------

_W8A8: Final = {"num_bits": 8, "type": "int", "strategy": "channel"}
_FLOAT8: Final = {**_W8A8, "type": "float"}
_GPTQ: Final = Gptq(4, 64, old=True, symmetric=True)
# vLLM 0.32 refuses on CPUs: packed int8, GPTQ in 8 bits; in fp8 it needs AMX, or does not start.
SERVED: Final[dict[str, tuple[Settings, Store]]] = {
    "W8A8": (
        compressed_settings("int-quantized", _W8A8, {**TOKEN, "type": "int"}),
        compressed("int-quantized", _W8A8, torch.bfloat16),
    ),
    "packed int4": packed(4, strategy="group", group_size=64),
    "AWQ": (
        {"quant_method": "awq", "bits": 4, "group_size": 64, "version": "gemm", "zero_point": True},
        awq(64),
    ),
    "GPTQ": (_GPTQ.settings(), _GPTQ),
}

# vLLM computes these on processors with AMX alone. Inputs are rounded as published models say.
NEEDS_AMX: Final[dict[str, tuple[Settings, Store]]] = {
    "fp8 in blocks": ({**BLOCKS, "activation_scheme": "dynamic"}, fp8_in_blocks(128)),
    "fp8 per channel": (
        compressed_settings("float-quantized", _FLOAT8, {**TOKEN, "type": "float"}),
        compressed("float-quantized", _FLOAT8, torch.float32),
    ),
    "MXFP4": ({"quant_method": "mxfp4"}, mxfp4_experts),
}
