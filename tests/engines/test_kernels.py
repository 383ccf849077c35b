"""Emulated kernels: that each is one of its own, that ours is torch's, and what they cover."""

import copy
from dataclasses import replace
from itertools import combinations
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional
from transformers.models.deepseek_v3.modeling_deepseek_v3 import apply_rotary_pos_emb_interleave
from vllm import _custom_ops as ops
from vllm.ir.ops.layernorm import rms_norm
from vllm.model_executor.layers.minimax_rms_norm.rms_norm_tp import MiniMaxText01RMSNormTP
from vllm.model_executor.layers.rotary_embedding.common import ApplyRotaryEmb

from proofserve.cli.model import checkpoint_named
from proofserve.engines.reference import forward
from proofserve.engines.reference.emulation import emulated
from proofserve.engines.reference.forward import states_of
from proofserve.engines.reference.kernels import PROFILES, KernelProfile, Point, own_profile
from proofserve.engines.reference.network import Network, load, with_kernels
from proofserve.engines.reference.rounding import EightBits
from support.families import FAMILIES, model_of
from support.written import network_from

CUTTING = "vLLM on x86 without bfloat16"
CUTS_OFF = not torch.cpu._is_avx512_bf16_supported()

IDS = torch.arange(2, 98).view(2, 48)


def network_of(family: str) -> Network:
    return network_from(model_of(family, torch.float32).save_pretrained)


def states(network: Network, profile: KernelProfile | None = None, read: Tensor = IDS) -> Tensor:
    return forward.states(with_kernels(network, profile), read)


def hooks(network: Network) -> int:
    """How many are on the modules that forwards share."""
    checkpoint = network.checkpoint
    parts = [checkpoint.decoder, *(checkpoint.layer(i) for i in range(len(network.shapes)))]
    modules = [module for part in parts for module in part.modules()]
    return sum(len(each._forward_hooks) + len(each._forward_pre_hooks) for each in modules)


# -- every family ----------------------------------------------------------------------------------


@pytest.mark.parametrize("family", FAMILIES)
def test_every_profile_is_one_of_its_own_and_leaves_nothing_behind(family: str) -> None:
    network = network_of(family)
    exact = states(network)
    before = hooks(network)
    found = {name: states(network, profile) for name, profile in PROFILES.items()}
    for name in ("torch", "vLLM on x86 with bfloat16"):
        cached = replace(PROFILES[name], fp8_cache=True)
        found[f"{name}, cache in fp8"] = states(network, cached)
    found["exact"] = exact
    same = [(a, b) for a, b in combinations(found, 2) if torch.equal(found[a], found[b])]
    assert same == []
    for name, each in found.items():
        assert float((each - exact).norm() / exact.norm()) < 0.1, name
    assert torch.equal(states(network), exact)
    assert hooks(network) == before


@pytest.mark.parametrize("family", FAMILIES)
def test_our_own_profile_rounds_as_torch_does(family: str) -> None:
    network = network_of(family)
    exact = states(network)
    with torch.inference_mode():
        decoder = model_of(family, torch.bfloat16).get_decoder()
        real = decoder(input_ids=IDS, use_cache=False).last_hidden_state.float()
    emulated = states(network, own_profile(torch.bfloat16))
    own, wanted = (emulated - exact).flatten(), (real - exact).flatten()
    assert float(own.norm() / wanted.norm()) == pytest.approx(1, abs=0.1)
    # Other summation orders round some values the other way; rounding elsewhere changes nearly all.
    assert float(torch.cosine_similarity(own, wanted, dim=0)) > 0.4


@pytest.mark.parametrize("family", [each for each in FAMILIES if each != "gemma3"])
def test_norms_of_served_kernels_are_vllms(family: str) -> None:
    """GPT-OSS's own code rounds once, vLLM's norm of all families before the gain, too."""
    layer = network_of(family).checkpoint.layer(0)
    norm: Any = layer.input_layernorm
    gain = 1 + torch.rand(len(norm.weight), generator=torch.Generator().manual_seed(1))
    norm.weight = nn.Parameter(gain.to(torch.bfloat16).float(), requires_grad=False)
    read = torch.randn(32, len(gain), generator=torch.Generator().manual_seed(0))
    read = read.to(torch.bfloat16).float()
    for name in ("vLLM on x86 with bfloat16", "vLLM on a GPU"):
        with emulated(layer, PROFILES[name], is_layer=True):
            found = norm(read)
        wanted = rms_norm(read.bfloat16(), norm.weight.bfloat16(), norm.variance_epsilon)
        assert torch.equal(found, wanted.float())


def test_neighbours_are_rotated_as_pytorch_does_on_processors() -> None:
    layer = network_of("deepseek_v3").checkpoint.layer(0)
    attention: Any = layer.self_attn
    attention.forward = apply_rotary_pos_emb_interleave
    drawn = (torch.randn(1, 2, 16, 32), torch.randn(1, 1, 16, 32), *torch.randn(2, 1, 16, 32))
    queries, keys, cosines, sines = (each.bfloat16().float() for each in drawn)
    with emulated(layer, PROFILES["vLLM on x86 with bfloat16"], is_layer=True):
        found = attention(queries, keys, cosines, sines)
    half = (each[0, :, :16].bfloat16() for each in (cosines, sines))
    read = torch.cat([queries, keys], dim=1)[0].transpose(0, 1).bfloat16()
    wanted = ApplyRotaryEmb.forward_static(read, *half, is_neox_style=False).float()
    # vLLM leaves neighbours where they are; transformers puts the first of each pair before.
    halves = torch.cat([wanted[..., 0::2], wanted[..., 1::2]], dim=-1).transpose(0, 1)
    assert torch.equal(torch.cat(found, dim=1)[0], halves)


def test_the_norm_in_attention_and_the_router_of_minimax_are_vllms() -> None:
    """The norm rounds once, and the router, in float32, not at all."""
    small = checkpoint_named("minimax_m2", "tiny").folder
    layer: Any = load(small, "float32", "cpu").checkpoint.layer(0)
    attention, router = layer.self_attn, layer.mlp.gate
    queries = torch.randn(32, len(attention.q_norm.weight)).bfloat16()
    tokens = torch.randn(32, router.hidden_dim).bfloat16()
    for each in (attention.q_norm, router):
        drawn = torch.rand(each.weight.shape).bfloat16().float()
        each.weight = nn.Parameter(drawn, requires_grad=False)
    attention.forward = attention.q_norm.__call__
    with emulated(layer, PROFILES["vLLM on x86 with bfloat16"], is_layer=True):
        found = attention(queries.float())
        logits = router(tokens.float(), torch.zeros(router.num_experts))[0]
    like: Any = SimpleNamespace(
        weight=attention.q_norm.weight.bfloat16(),
        variance_epsilon=attention.q_norm.variance_epsilon,
    )
    wanted = MiniMaxText01RMSNormTP.forward_qk(like, like, queries, queries)[0]
    assert torch.equal(found.bfloat16(), wanted)
    assert torch.equal(logits, functional.linear(tokens.float(), router.weight))


def test_integers_are_made_and_multiplied_as_vllm_does_on_processors() -> None:
    """A sum that lies halfway between two numbers may become either; others are the same."""
    read = torch.randn(64, 256).bfloat16()
    # Larger ones overflow where a processor has no VNNI (``require_supported_options``).
    weight = torch.randint(-64, 65, (96, 256), dtype=torch.int8)
    scales = torch.rand(96, 1).bfloat16().float() / 100
    numbers, scale, _ = ops.onednn_scaled_int8_quant(read)
    handler = ops.create_onednn_scaled_mm(
        weight.T, scales, torch.bfloat16, dynamic_quant=True, use_azp=False, primitive_cache_size=8
    )
    wanted = torch.empty(64, 96, dtype=torch.bfloat16)
    ops.onednn_scaled_mm(handler, numbers, wanted, scale, None, None, None)
    profile = PROFILES[CUTTING if CUTS_OFF else "vLLM on x86 with bfloat16"]
    rounded = EightBits("int8").rounding(profile.scaling)(read.float())
    assert torch.equal((rounded / scale).round(), numbers.float())
    found = profile.product(rounded, weight.float() * scales, as_they_are=True)
    found = profile.at(Point.OUTPUTS_OF_EIGHT_BITS, found)
    assert (found != wanted.float()).sum() <= 6


@pytest.mark.skipif(
    not torch.cpu._is_avx512_supported(), reason="vLLM has a cache in fp8 with AVX-512 alone"
)
def test_a_cache_in_fp8_is_cut_off_as_vllm_does_on_processors() -> None:
    keys, values = torch.randn(2, 32, 1, 64).bfloat16() * 4
    stored = torch.zeros(2, 1, 1, 32, 64, dtype=torch.uint8)
    ops.cpu_attn_reshape_and_cache(
        *(keys, values, *stored, torch.arange(32), "vec"), kv_cache_dtype="fp8_e4m3"
    )
    cached = replace(PROFILES["vLLM on x86 with bfloat16"], fp8_cache=True)
    found = cached.cached(values.float())
    assert torch.equal(found.flatten(), stored[1].view(torch.float8_e4m3fn).float().flatten())


def refused(_index: int, _states: Tensor) -> Tensor:
    raise ValueError("no layer")


def test_a_profile_that_fails_in_a_forward_leaves_nothing_behind() -> None:
    network = network_of("llama")
    exact, before = states(network), hooks(network)
    for read in (torch.zeros(1, 4, 63), torch.tensor([[10**6]])):
        with pytest.raises((RuntimeError, IndexError)):
            states(network, PROFILES["norms"], read)
    failing = forward.NetworkForward(with_kernels(network, PROFILES["norms"]), [IDS], refused)
    with pytest.raises(ValueError, match="no layer"):
        forward.last_states([failing])
    assert hooks(network) == before
    assert torch.equal(states(network), exact)


def test_kernels_are_emulated_in_float32_with_the_same_weights(tiny: Path) -> None:
    network = network_of("llama")
    other = with_kernels(network, PROFILES["TF32"])
    assert other.checkpoint is network.checkpoint
    assert with_kernels(other, None) == network
    assert own_profile(torch.float32) is None
    with pytest.raises(ValueError, match=r"in float32, not in torch\.bfloat16"):
        with_kernels(load(tiny, "bfloat16", "cpu"), PROFILES["TF32"])


def test_a_chat_is_read_by_the_emulated_kernels() -> None:
    network = network_of("llama")
    (exact,) = states_of(network, [([3, 4, 5], [6, 7])])
    (emulated,) = states_of(with_kernels(network, PROFILES["torch"]), [([3, 4, 5], [6, 7])])
    assert 0 < float((emulated - exact).norm() / exact.norm()) < 0.1


def test_drawn_embeddings_arrive_in_the_served_format() -> None:
    network = network_of("qwen3")
    drawn = torch.randn(1, 8, 64, generator=torch.Generator().manual_seed(0))
    profile = PROFILES["norms"]
    found = [states(network, profile, each) for each in (drawn, drawn.to(torch.bfloat16).float())]
    assert torch.equal(*found)


# -- arithmetic ------------------------------------------------------------------------------------


def arithmetic(**options: Any) -> KernelProfile:
    points = frozenset({Point.NORM, Point.REDUCED})
    chosen = {"name": "", "format": "bfloat16", "points": points, **options}
    return KernelProfile(**chosen)


@pytest.mark.parametrize(
    ("options", "rounded"),
    [
        # The numbers of bfloat16 are 1/128 apart from 1 to 2, those of TF32 and float16 1/1024.
        ({}, [1 + 2 / 128, -1 - 2 / 128]),
        ({"truncated": frozenset({Point.NORM})}, [1 + 1 / 128, -1 - 1 / 128]),
        ({"format": "tf32"}, [1 + 14 / 1024, -1 - 14 / 1024]),
        ({"format": "float16"}, [1 + 14 / 1024, -1 - 14 / 1024]),
        ({"points": frozenset()}, [1 + 14.4 / 1024, -1 - 14.4 / 1024]),
    ],
)
def test_values_are_rounded_to_the_nearest_or_cut_off(
    options: dict[str, Any], rounded: list[float]
) -> None:
    values = torch.tensor([1 + 14.4 / 1024, -1 - 14.4 / 1024])
    assert torch.equal(arithmetic(**options).at(Point.NORM, values), torch.tensor(rounded))


def test_sums_of_chunks_and_of_ranks_are_rounded_on_the_way() -> None:
    inputs = torch.tensor([[1.0, 0.0, 2.0**-9, 2.0**-9, 2.0**-9, 2.0**-9, 2.0**-9, 2.0**-9]])
    weight = torch.ones(1, 8)
    exact = 1 + 6 * 2.0**-9
    assert float(arithmetic().product(inputs, weight, split=True)) == exact
    # Two small numbers at a time are half the step of bfloat16 above 1, and ties go to even.
    assert float(arithmetic(partial_sums=2).product(inputs, weight, split=False)) == 1
    # Ranks add up in float32 what they send: three such numbers, a step and a half.
    assert float(arithmetic(ranks=4).product(inputs, weight, split=True)) == 1 + 2 / 128
    assert float(arithmetic(ranks=4).product(inputs, weight, split=False)) == exact
    # Ranks that cannot have equal parts have some all the same.
    assert float(arithmetic(ranks=6).product(inputs, weight, split=True)) == 1 + 2 / 128
    cut = arithmetic(ranks=4, truncated=frozenset({Point.REDUCED}))
    assert float(cut.product(inputs, weight, split=True)) == 1 + 1 / 128
    # The first rank has the bias, and rounds its part with it.
    bias = torch.tensor([2.0**-9])
    assert float(arithmetic(ranks=2).product(inputs, weight, bias, split=True)) == 1 + 2 / 128
    assert float(arithmetic(ranks=1).product(inputs, weight, bias, split=True)) == exact + 2.0**-9


def with_part(layer: nn.Module, rank: int) -> nn.Module:
    """A copy of a layer whose mixture has only the part of one of two ranks."""
    made = copy.deepcopy(layer)
    for module in made.modules():
        down = getattr(module, "down_proj", None)
        if down is None:
            continue
        weight = down.weight if isinstance(down, nn.Linear) else down
        columns = weight.transpose(-1, -2) if getattr(module, "is_transposed", False) else weight
        columns.data.chunk(2, -1)[1 - rank].zero_()
        if rank and hasattr(module, "down_proj_bias"):
            module.down_proj_bias.data.zero_()
    return made


@pytest.mark.parametrize("family", ["qwen3_moe", "gpt_oss", "deepseek_v3"])
def test_a_rank_adds_up_its_parts_of_all_experts_before_ranks_do(family: str) -> None:
    layer = model_of(family, torch.float32).model.layers[1]
    read = torch.randn(1, 48, 64, generator=torch.Generator().manual_seed(0))
    on_one = PROFILES["vLLM on x86 with bfloat16"]

    def mixed(layer: nn.Module, profile: KernelProfile) -> Tensor:
        with torch.no_grad(), emulated(layer, profile, is_layer=True):
            found = layer.mlp(read)
        return found[0] if isinstance(found, tuple) else found

    parts = [mixed(with_part(layer, rank), on_one).bfloat16() for rank in range(2)]
    found = mixed(layer, replace(on_one, ranks=2))
    # Products with zeros may add up in another order, and seldom round to another number.
    assert (found.bfloat16() == parts[0] + parts[1]).float().mean() > 0.99
    assert torch.equal(found, found.bfloat16().float())
