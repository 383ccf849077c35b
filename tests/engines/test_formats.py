"""Checkpoints as they are published: in fp8, mxfp4, and the formats of three libraries."""

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

import pytest
import torch
from torch import Tensor

from proofserve.engines import CheckpointError
from proofserve.engines.reference.checkpoint import LayeredCheckpoint
from proofserve.engines.reference.forward import states
from proofserve.engines.reference.network import load
from support.quantised import (
    FORMATS,
    FP8,
    TOKEN,
    Gptq,
    Settings,
    Written,
    fp8_whole,
    rewrite,
    rewrite_tensors,
    write,
    write_as,
)

READ: Final = torch.arange(24).view(2, 12)


@pytest.fixture(scope="module", params=FORMATS)
def written(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Written:
    return write_as(request.param, tmp_path_factory.mktemp("format"))


def test_a_matrix_has_the_numbers_that_others_decode(
    written: Written, request: pytest.FixtureRequest
) -> None:
    checkpoint = LayeredCheckpoint(
        written.folder, torch.device("cpu"), torch.float32, served=torch.float16
    )
    for each, expected in written.matrices.items():
        found = checkpoint.published.read(each)
        assert torch.equal(found.float(), expected.float()), each
    assert {*checkpoint.published.matrices} <= {*written.matrices}
    assert len(checkpoint.published.matrices) >= 4
    eight = re.search(r"fp8|float8|int8|bits=8", request.node.callspec.id)
    assert checkpoint.published.weight_bits == (8 if eight else 4)


def test_a_forward_is_that_of_a_plain_checkpoint(written: Written) -> None:
    for dtype in ("float32", "bfloat16"):
        read, plain = (
            load(each, dtype, "cpu", served="float16") for each in (written.folder, written.plain)
        )
        assert torch.equal(states(read, READ), states(plain, READ))
    assert (plain.weight_bits, plain.checkpoint.published.matrices) == (16, {})


def test_servers_keep_scales_of_4_bits_in_the_dtype_that_they_serve(tmp_path: Path) -> None:
    """vLLM loads float16 scales as bfloat16: each number is off by up to half a step of these."""
    written = write_as("AWQ", tmp_path)
    published = LayeredCheckpoint(written.folder, torch.device("cpu"), torch.float32).published
    for each, stored in written.matrices.items():
        found = published.read(each)
        off = float(((found - stored) / stored.where(stored != 0, 1.0)).abs().max())
        assert 2**-10 < off <= 2**-8


@pytest.mark.parametrize(
    ("name", "excluded"),
    [
        ("fp8 in blocks", {"modules_to_not_convert": ["lm_head", "self_attn"]}),
        ("fp8 in blocks", {"modules_to_not_convert": ["model.layers.*.self_attn"]}),
        # As Kimi's configuration says it.
        ("int4 in groups, experts", {"ignore": ["lm_head", "re:.*self_attn.*"]}),
        ("AWQ, experts", {"modules_to_not_convert": ["gate", "self_attn"]}),
    ],
)
def test_what_is_excluded_stays_plain(name: str, excluded: Settings, tmp_path: Path) -> None:
    written = write_as(name, tmp_path, **excluded)
    attention = {name: each for name, each in written.matrices.items() if ".self_attn." in name}

    def stored_plainly(tensors: dict[str, Tensor]) -> None:
        for matrix, decoded in attention.items():
            module = matrix.removesuffix("weight")
            for part in [each for each in tensors if each.startswith(module)]:
                del tensors[part]
            tensors[matrix] = decoded

    rewrite_tensors(written.folder, stored_plainly)
    read, plain = (
        load(each, "float32", "cpu", served="float16") for each in (written.folder, written.plain)
    )
    assert torch.equal(states(read, READ), states(plain, READ))
    matrices = read.checkpoint.published.matrices
    assert {*matrices} == {*written.matrices} - {*attention}


# -- what is refused -------------------------------------------------------------------------------


def dropped(end: str) -> Callable[[dict[str, Tensor]], object]:
    return lambda tensors: tensors.pop(next(name for name in tensors if name.endswith(end)))


def group_of(name: str, **fields: Any) -> Settings:
    """The configuration of a format of compressed-tensors with other fields of its group."""
    settings = FORMATS[name][1]
    group = settings["config_groups"]["group_0"]
    return {"config_groups": {"group_0": {**group, **fields}}}


def weights_of(name: str, **fields: Any) -> Settings:
    weights = FORMATS[name][1]["config_groups"]["group_0"]["weights"]
    return group_of(name, weights={**weights, **fields})


INT4, BYTES, OLD = "int4 in groups", "float8 per tensor", f"GPTQ {Gptq(4, 64, old=True)}"
ZERO_SCALED: Final = {"dynamic": True, "strategy": "token", "symmetric": False, "num_bits": 8}
OF_CONFIGURATIONS: Final[tuple[tuple[str, Settings, str], ...]] = (
    (INT4, {"quant_method": "bitsandbytes"}, "quant_method 'bitsandbytes' cannot be read; known"),
    (INT4, {"quant_method": None}, "quant_method None cannot be read"),
    (INT4, {"format": "nvfp4-pack-quantized"}, "format 'nvfp4-pack-quantized' with int 4 cannot"),
    (INT4, {"format": "int-quantized"}, "format 'int-quantized' with int 4 cannot be read"),
    (INT4, weights_of(INT4, num_bits=3), "format 'pack-quantized' with int 3 cannot be read"),
    (INT4, weights_of(INT4, strategy="tensor_group"), "strategy 'tensor_group' of weights"),
    (INT4, weights_of(INT4, symmetric=False), "proj.weight_zero_point, and has 0"),
    (INT4, group_of(INT4, targets=["re:.*mlp.*"]), "proj belongs to 0 of the config_groups"),
    (INT4, {"config_groups": {}}, "belongs to 0 of the config_groups"),
    (INT4, {"config_groups": {"W4A16": ["Linear"]}}, "has a group without weights"),
    (INT4, {"ignore": ["re:.*self_attn.*"]}, "is quantised in the files, and config.json ignores"),
    (INT4, {"ignore": ["re:("]}, "'\\(' is no pattern"),
    (INT4, {"transform_config": {"config_groups": {}}}, "transform_config changes weights"),
    (INT4, {"sparsity_config": {"format": "sparse-24-bitmask"}}, "sparsity_config changes weights"),
    (INT4, {"kv_cache_scheme": {"num_bits": 4}}, "kv_cache_scheme cannot be computed"),
    (BYTES, group_of(BYTES, input_activations=ZERO_SCALED), "input_activations cannot be computed"),
    (
        BYTES,
        group_of(BYTES, input_activations={**TOKEN, "type": "float", "dynamic": False}),
        "strategy token, dynamic False",
    ),
    (BYTES, group_of(BYTES, output_activations=TOKEN), "output_activations are not known here"),
    ("fp8 in blocks", {"fmt": "e5m2"}, "fmt is 'e5m2', not 'e4m3'"),
    ("fp8 in blocks", {"activation_scheme": "guess"}, "activation_scheme is 'guess', not"),
    ("fp8 in blocks", {"activation_scheme": "static"}, "needs one tensor .*input_scale"),
    ("fp8 in blocks", {"weight_block_size": [128]}, "weight_block_size is .*, not two sizes"),
    ("fp8 in blocks", {"modules_to_not_convert": ["mlp.up_proj"]}, "config.json excludes it by"),
    ("fp8 in blocks", {"quant_method": "mxfp4"}, "mxfp4 is known of gpt_oss alone, not of qwen3"),
    ("AWQ", {"bits": 8}, "bits is 8, not 4"),
    ("AWQ", {"backend": "llm-awq"}, "backend llm-awq stores matrices in another layout"),
    ("AWQ", {"version": "gemv"}, "version is 'gemv', not 'gemm'"),
    ("AWQ", {"quant_method": "gptq", "group_size": None}, "group_size is None, not an integer"),
    (OLD, {"bits": 3}, "bits is 3, not 4 or 8"),
    (OLD, {"checkpoint_format": "marlin"}, "checkpoint_format is 'marlin', not 'gptq' or"),
    (OLD, {"dynamic": {"+:.*up.*": {"bits": 8}}}, "dynamic gives modules formats of their own"),
)
OF_TENSORS: Final[tuple[tuple[str, str, str], ...]] = (
    (INT4, ".weight_scale", "needs one tensor .*weight_scale, and has 0"),
    (INT4, ".weight_shape", "needs one tensor .*weight_shape, and has 0"),
    (INT4, ".weight_packed", "needs one tensor .*weight_packed, and has 0"),
    (BYTES, ".weight_scale", "is stored as F8_E4M3, and lacks what compressed-tensors needs"),
    ("fp8 in blocks", ".weight_scale_inv", "needs one tensor .*_scale_inv or .*_scale, and has 0"),
    ("mxfp4", "gate_up_proj_scales", "needs one tensor .*gate_up_proj_scales, and has 0"),
    ("AWQ", ".qzeros", "needs one tensor .*qzeros, and has 0"),
    (f"GPTQ {Gptq(4, 32, old=True, mixed=True)}", ".g_idx", "needs one tensor .*g_idx, and has 0"),
)


@pytest.mark.parametrize(("name", "settings", "message"), OF_CONFIGURATIONS)
def test_a_configuration_that_is_not_understood_is_refused(
    name: str, settings: Settings, message: str, tmp_path: Path
) -> None:
    written = write_as(name, tmp_path, **settings)
    with pytest.raises(CheckpointError, match=message):
        load(written.folder, "float32", "cpu")


@pytest.mark.parametrize(("name", "end", "message"), OF_TENSORS)
def test_a_missing_tensor_is_named(name: str, end: str, message: str, tmp_path: Path) -> None:
    written = write_as(name, tmp_path)
    rewrite_tensors(written.folder, dropped(end))
    with pytest.raises(CheckpointError, match=message):
        load(written.folder, "float32", "cpu")


def test_few_bits_without_a_configuration_are_refused(tmp_path: Path) -> None:
    written = write_as("fp8 per tensor", tmp_path)
    rewrite(written.folder, quantization_config=None)
    with pytest.raises(CheckpointError, match=r"has no quantization_config"):
        load(written.folder, "float32", "cpu")


@pytest.mark.parametrize(
    ("name", "part", "change", "message"),
    [
        (INT4, "weight_scale", lambda of: of[:, :-1], "scales are .*, not"),
        (INT4, "weight_packed", lambda of: of[:, :-1], "packed numbers .* do not fit"),
        (INT4, "weight_scale", lambda of: of.int(), "scales are torch.int32, not floats"),
        ("int4 in mixed groups", "weight_g_idx", lambda of: of - 1, "groups of .* do not fit"),
        ("fp8 in blocks", "weight_scale_inv", lambda of: of[:-1], "scales are .*, not"),
        ("AWQ", "scales", lambda of: of[:-1], "zero points .* do not fit numbers"),
        (OLD, "qzeros", lambda of: torch.full_like(of, -1), "16, which some kernels read as 0"),
        (OLD, "g_idx", lambda of: of * 0, "groups of .* do not fit"),
        (
            f"GPTQ {Gptq(4, 32, old=True, symmetric=True)}",
            "qzeros",
            torch.zeros_like,
            "sym is true, and zero points are not the middle",
        ),
        ("mxfp4", "gate_up_proj_scales", lambda of: of[..., :-1], "do not fit blocks"),
    ],
)
def test_parts_that_do_not_fit_are_named(
    name: str, part: str, change: Callable[[Tensor], Tensor], message: str, tmp_path: Path
) -> None:
    written = write_as(name, tmp_path)

    def changed(tensors: dict[str, Tensor]) -> None:
        for stored, values in tensors.items():
            if ".layers.1." in stored and stored.endswith(part):
                tensors[stored] = change(values).contiguous()

    rewrite_tensors(written.folder, changed)
    network = load(written.folder, "float32", "cpu")
    with pytest.raises(CheckpointError, match=rf"cannot be decoded: .*{message}"):
        states(network, READ)


def test_experts_that_round_in_two_ways_are_refused(tmp_path: Path) -> None:
    settings = {**FP8, "activation_scheme": "static"}
    store = fp8_whole(per_channel=False, inputs=0.01)
    written = write("qwen3_moe", tmp_path, settings, store)

    def other_scale(tensors: dict[str, Tensor]) -> None:
        tensors["model.layers.0.mlp.experts.1.up_proj.input_scale"] = torch.tensor(0.02)

    load(written.folder, "float32", "cpu")
    rewrite_tensors(written.folder, other_scale)
    with pytest.raises(CheckpointError, match=r"experts.gate_up_proj of layer 0 multiplies"):
        load(written.folder, "float32", "cpu")
