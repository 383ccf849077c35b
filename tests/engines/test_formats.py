"""Checkpoints as they are published: in fp8, mxfp4, and the formats of three libraries."""

import re
from pathlib import Path
from typing import Any, Final

import pytest
import torch

from proofserve.engines.reference.checkpoint import LayeredCheckpoint, _Files
from proofserve.engines.reference.forward import states
from proofserve.engines.reference.network import load
from support.quantised import (
    Gptq,
    Settings,
    Store,
    Written,
    awq,
    compressed,
    compressed_settings,
    fp8_in_blocks,
    fp8_whole,
    mxfp4_experts,
    write,
)

# Nothing is declared of activations, where it is not the point.
FP8: Final[Settings] = {"quant_method": "fp8", "fmt": "e4m3", "activation_scheme": None}
BLOCKS: Final[Settings] = {**FP8, "weight_block_size": [128, 128]}
AWQ: Final[Settings] = {"quant_method": "awq", "bits": 4, "group_size": 64, "version": "gemm"}
READ: Final = torch.arange(24).view(2, 12)


def packed(bits: int, **weights: Any) -> tuple[Settings, Store]:
    args = {"num_bits": bits, "type": "int", "symmetric": True, **weights}
    settings = compressed_settings("pack-quantized", args)
    return settings, compressed("pack-quantized", args, torch.bfloat16)


def bytes_each(layout: str, kind: str, strategy: str, **weights: Any) -> tuple[Settings, Store]:
    args = {"num_bits": 8, "type": kind, "strategy": strategy, **weights}
    scales = torch.float32 if kind == "float" else torch.bfloat16
    return compressed_settings(layout, args), compressed(layout, args, scales)


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


@pytest.fixture(scope="module", params=FORMATS)
def written(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Written:
    return write_as(request.param, tmp_path_factory.mktemp("format"))


def write_as(name: str, root: Path, **settings: Any) -> Written:
    family, default, store = FORMATS[name]
    return write(family, root, {**default, **settings}, store)


def test_a_matrix_has_the_numbers_that_others_decode(
    written: Written, request: pytest.FixtureRequest
) -> None:
    checkpoint = LayeredCheckpoint(written.folder, torch.float32, torch.device("cpu"))
    files = _Files(written.folder)
    for each, expected in written.matrices.items():
        found = checkpoint.published.read(each, files)
        assert torch.equal(found.float(), expected.float()), each
    assert {*checkpoint.published.matrices} <= {*written.matrices}
    assert len(checkpoint.published.matrices) >= 4
    eight = re.search(r"fp8|float8|int8|bits=8", request.node.callspec.id)
    assert checkpoint.published.weight_bits == (8 if eight else 4)


def test_a_forward_is_that_of_a_plain_checkpoint(written: Written) -> None:
    for dtype in ("float32", "bfloat16"):
        read, plain = (load(each, dtype, "cpu") for each in (written.folder, written.plain))
        assert torch.equal(states(read, READ), states(plain, READ))
    assert (plain.weight_bits, plain.declared) == (16, "")
