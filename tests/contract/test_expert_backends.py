"""What vLLM's own choosers of kernels for experts say on each card of ``wiring.experts``.

Their sources run here with a stand-in for the card: they ask the platform for its capability, and
whether optional libraries are there.
"""

import importlib
import inspect
import pkgutil
import sys
from collections.abc import Iterator
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
from vllm.config import VllmConfig, set_current_vllm_config
from vllm.model_executor.layers.fused_moe import config as moe
from vllm.model_executor.layers.fused_moe import experts
from vllm.model_executor.layers.fused_moe.activation import MoEActivation
from vllm.model_executor.layers.fused_moe.oracle import fp8, int_wna16, mxfp4, unquantized
from vllm.model_executor.layers.quantization.utils import flashinfer_mxint4_moe, quant_utils
from vllm.platforms import current_platform
from vllm.platforms.interface import DeviceCapability
from vllm.utils import flashinfer

from proofserve.wiring.experts import CAPABILITIES, FORMATS

# Absent from a build for processors, and imported for what they register.
LIBRARY = "vllm._C_stable_libtorch"
OPTIONAL = ("has_flashinfer", "has_triton_kernels", "is_flashinfer_mxint4_moe_available")


@pytest.fixture
def capability(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[int]]:
    """That of the stand-in, major and minor; every optional kernel is there."""
    said = [9, 0]
    monkeypatch.setitem(sys.modules, LIBRARY, ModuleType(LIBRARY))
    cuda = importlib.import_module("vllm.platforms.cuda")

    class Card(cuda.CudaPlatformBase):  # type: ignore[misc, name-defined]  # Any to mypy
        @classmethod
        def get_device_capability(cls, *_: int, **__: int) -> DeviceCapability:
            return DeviceCapability(*said)

        @classmethod
        def num_compute_units(cls, *_: int, **__: int) -> int:
            return 132

    names = [each.name for each in pkgutil.iter_modules(experts.__path__)]
    found = [importlib.import_module(f"{experts.__name__}.{name}") for name in names]
    # Each module of vLLM has this object under a name of its own.
    monkeypatch.setattr(current_platform, "__class__", Card)
    for module in (*found, flashinfer, flashinfer_mxint4_moe):
        for name in vars(module).copy():
            if name.startswith(OPTIONAL):
                monkeypatch.setattr(module, name, lambda *_: True)
    config = VllmConfig()
    served = SimpleNamespace(quantization_config=None, hf_text_config=None)
    monkeypatch.setattr(config, "model_config", served)
    with set_current_vllm_config(config):
        yield said


def chosen(kind: str, backend: str) -> Any:
    """The class of kernels that vLLM takes for ``kind`` if ``--moe-backend`` is ``backend``."""
    # Sizes of gpt-oss, or of Kimi K2.
    gpt_oss = kind == "mxfp4"
    config = moe.FusedMoEConfig(
        num_experts=32,
        experts_per_token=4,
        hidden_dim=2880 if gpt_oss else 7168,
        intermediate_size=2880 if gpt_oss else 2048,
        num_local_experts=32,
        num_logical_experts=32,
        activation=MoEActivation.SWIGLUOAI if gpt_oss else MoEActivation.SILU,
        device="cuda",
        routing_method=moe.RoutingMethodType.Renormalize,
        moe_parallel_config=moe.FusedMoEParallelConfig.make_no_parallel(),
        in_dtype=torch.bfloat16,
        has_bias=gpt_oss,
        moe_backend=backend,
    )
    if kind == "bfloat16":
        return unquantized.select_unquantized_moe_backend(config)[1]
    if kind == "fp8":
        block, tokens = quant_utils.kFp8Static128BlockSym, quant_utils.kFp8Dynamic128Sym
        return fp8.select_fp8_moe_backend(config, block, tokens)[1]
    if kind == "mxfp4":
        return mxfp4.select_mxfp4_moe_backend(config)[1]
    select, group = int_wna16.select_wna16_moe_backend, quant_utils.kInt4Static32
    if "quant_config" not in inspect.signature(select).parameters:
        return select(config, group)[1]
    packed = importlib.import_module("compressed_tensors.quantization").QuantizationArgs(
        num_bits=4, type="int", strategy="group", group_size=32
    )
    return select(config, group, packed, may_have_zp=False, may_have_bias=False)[1]


@pytest.mark.parametrize("major", CAPABILITIES)
@pytest.mark.parametrize("kind", FORMATS)
def test_a_kernel_chooses_experts_where_the_table_says_so(
    kind: str, major: int, capability: list[int]
) -> None:
    capability[:] = major, 0
    fused_from, unfused = FORMATS[kind]
    assert chosen(kind, "auto").is_monolithic() == (major >= fused_from)
    if major >= fused_from:
        assert not chosen(kind, unfused).is_monolithic()
