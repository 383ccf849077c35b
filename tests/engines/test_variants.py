from collections.abc import Callable
from weakref import ReferenceType, ref

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from proofserve.engines.reference.engine import ReferenceEngine
from proofserve.engines.reference.forward import NetworkForward, last_states, states
from proofserve.engines.reference.network import Network, load
from proofserve.engines.reference.variants import (
    first_tokens_only,
    last_tokens_only,
    of_rank,
    pruned,
    share_of_rank,
    with_int8_attention,
    with_matrices,
    with_redrawn_matrices,
    without_layers,
)
from proofserve.protocol.identity import Block
from proofserve.protocol.network_schemes import ArtifactScheme, DistanceScheme
from proofserve.protocol.scheme import Scheme
from proofserve.rounds.errors import EngineFault
from proofserve.rounds.records import ProofBatch, Workload
from support.mixtures import network_of
from support.models import SmallModels

SEQ_LEN = 32
PLAIN = ArtifactScheme()


@pytest.fixture(scope="module", params=["qwen3", "llama", "gemma3"])
def network(request: pytest.FixtureRequest, small_models: SmallModels) -> Network:
    return load(small_models.get(request.param), None, "cpu")


def batch(network: Network, scheme: Scheme = PLAIN) -> ProofBatch:
    work = Workload(scheme, Block("0xabc", 7), "node-key", SEQ_LEN)
    return ReferenceEngine(4).compute(work, network, range(4))


def vectors(network: Network) -> NDArray[np.float32]:
    return batch(network).values


def apart(network: Network, variant: Network) -> float:
    return float(np.linalg.norm(vectors(network) - vectors(variant), axis=1).min())


def test_a_skipped_layer_is_missed_and_only_in_the_variant(network: Network) -> None:
    before = vectors(network)
    for index in (0, 3, 5):
        assert apart(network, without_layers(network, [index])) > 0.05
    assert np.array_equal(vectors(without_layers(network, [])), before)
    assert np.array_equal(vectors(network), before)


@torch.inference_mode()
def test_without_any_layer_the_norm_remains(network: Network) -> None:
    block = PLAIN.for_block(Block("0xabc", 7), network.facts, network.device)
    inputs = block.inputs("node-key", range(4), SEQ_LEN, network.dtype)
    norm = network.checkpoint.decoder.norm
    assert isinstance(norm, nn.Module)
    expected = block.finish("node-key", range(4), norm(inputs)[:, -1])
    assert np.array_equal(vectors(without_layers(network, range(6))), expected.numpy())


@pytest.mark.parametrize("index", [-1, 6])
def test_a_layer_that_is_none_is_named(network: Network, index: int) -> None:
    with pytest.raises(ValueError, match=f"no layer {index} among 6"):
        without_layers(network, [index])


def test_the_last_tokens_of_all_are_all(network: Network) -> None:
    assert np.array_equal(vectors(last_tokens_only(network, SEQ_LEN)), vectors(network))
    for count in (1, SEQ_LEN // 2):
        assert apart(network, last_tokens_only(network, count)) > 0.05
    with pytest.raises(ValueError, match="count: 0 is below 1"):
        last_tokens_only(network, 0)


def test_the_first_tokens_of_all_are_all(network: Network) -> None:
    assert np.array_equal(vectors(first_tokens_only(network, SEQ_LEN)), vectors(network))
    with pytest.raises(ValueError, match="count: 0 is below 1"):
        first_tokens_only(network, 0)


def test_states_of_tokens_that_are_read_are_right_and_others_are_their_embeddings(
    network: Network,
) -> None:
    ids = torch.arange(10, 10 + SEQ_LEN).expand(2, -1)
    every, first = states(network, ids), states(first_tokens_only(network, 8), ids)
    decoder = network.checkpoint.decoder
    # Later tokens do not change the states of earlier ones, but the kernel's rounding.
    assert torch.allclose(first[:, :8], every[:, :8], atol=0.1, rtol=0.05)
    assert torch.equal(first[:, 8:], decoder.norm(decoder.embed_tokens(ids))[:, 8:])


def test_attention_in_8_bits_is_still_causal(network: Network) -> None:
    before, rounded = vectors(network), with_int8_attention(network)
    assert 0 < apart(network, rounded) < 0.2
    assert np.array_equal(vectors(network), before)
    ids = torch.arange(10, 10 + SEQ_LEN).expand(2, -1)
    later = ids.clone()
    later[:, 8:] += 100
    one, other = (states(rounded, each)[:, :8] for each in (ids, later))
    assert torch.allclose(one, other, atol=0.1, rtol=0.05)


def weights_in_use(network: Network) -> dict[str, tuple[Tensor, int]]:
    """The weights of every layer while a forward is in it, each with its address."""
    seen: dict[str, tuple[Tensor, int]] = {}

    def see(index: int, layer: nn.Module) -> nn.Module:
        for name, weight in layer.named_parameters():
            seen[f"layers.{index}.{name}"] = weight.data.clone(), weight.data_ptr()
        return layer

    vectors(network.changed(see))
    return seen


def test_changes_can_be_of_some_layers(network: Network) -> None:
    variant = with_matrices(network, lambda w: w / 2, layers=[1, 3])
    before, after = weights_in_use(network), weights_in_use(variant)
    for index in range(len(network.shapes)):
        name = f"layers.{index}.self_attn.q_proj.weight"
        (one, _), (other, _) = before[name], after[name]
        assert torch.equal(other, one / 2 if index in {1, 3} else one)


def test_a_change_of_a_change_is_undone(network: Network) -> None:
    before, halved = vectors(network), with_matrices(network, lambda w: w / 2)
    whole = with_matrices(halved, lambda w: w * 2)
    assert np.array_equal(vectors(whole), before)
    assert not np.array_equal(vectors(halved), before)
    assert np.array_equal(vectors(network), before)


def test_a_forward_that_fails_leaves_the_published_weights(network: Network) -> None:
    before, stored, calls = vectors(network), weights_in_use(network), []

    def fail_at_first(weight: Tensor) -> Tensor:
        calls.append(weight)
        if len(calls) == 10:
            raise ValueError("no change of this matrix")
        return weight / 2

    variant = with_matrices(network, fail_at_first)
    with pytest.raises(EngineFault, match="no change of this matrix"):
        vectors(variant)
    assert np.array_equal(vectors(network), before)
    for name, (weight, address) in weights_in_use(network).items():
        assert torch.equal(weight, stored[name][0]), name
        assert address == stored[name][1], name


def test_random_weights_are_the_same_in_every_forward_and_differ_by_matrix() -> None:
    network = network_of("qwen3", head_dim=16)
    variant = with_redrawn_matrices(network)
    first, second = weights_in_use(variant), weights_in_use(variant)
    assert all(torch.equal(weight, second[name][0]) for name, (weight, _) in first.items())
    one, other = (first[f"layers.{index}.mlp.up_proj.weight"][0] for index in (0, 1))
    assert not torch.allclose(one / one.std(), other / other.std(), atol=0.1)


def test_two_of_four_weights_are_pruned() -> None:
    values = torch.tensor([[1.0, -4.0, 3.0, 2.0, 0.5, 0.0, -0.75, 0.25]])
    assert pruned(values).tolist() == [[0.0, -4.0, 3.0, 0.0, 0.5, 0.0, -0.75, 0.0]]


def test_a_matrix_of_lower_rank_is_the_nearest(network: Network) -> None:
    values = torch.randn(40, 24, generator=torch.Generator().manual_seed(1))
    half = of_rank(values, 0.5)
    assert torch.linalg.matrix_rank(half) == 12
    sizes = torch.linalg.svdvals(values)
    assert torch.linalg.norm(values - half) == pytest.approx(float(sizes[12:].norm()), rel=1e-4)
    assert share_of_rank(network, 0.25) < share_of_rank(network, 0.5) <= 1.0
    matrices = [w for each in network.shapes for w in each.parameters() if w.ndim == 2]
    # Two factors of a quarter of the smaller side.
    cost = sum(min(w.shape) // 4 * sum(w.shape) for w in matrices)
    assert share_of_rank(network, 0.25) == cost / sum(w.numel() for w in matrices)


def test_layer_transforms_reach_a_network_that_reads_less(network: Network) -> None:
    scheme = ArtifactScheme(layer_reflections=True)
    reflected = batch(last_tokens_only(network, SEQ_LEN), scheme).values
    assert np.array_equal(reflected, batch(network, scheme).values)


def test_matrices_change_and_norms_do_not(network: Network) -> None:
    variant = with_matrices(network, lambda weight: weight / 2)
    before, after = weights_in_use(network), weights_in_use(variant)
    assert before.keys() == after.keys()
    changed = 0
    for name, (weight, address) in before.items():
        halves = weight.ndim == 2
        changed += halves
        assert torch.equal(after[name][0], weight / 2 if halves else weight), name
        # What stays is not stored twice.
        assert halves != (after[name][1] == address), name
    # Four projections of attention and three of the MLP.
    assert changed == 7 * len(network.shapes)
    assert apart(network, variant) > 0.05


def test_one_changed_layer_is_in_memory_at_a_time(network: Network) -> None:
    made: list[ReferenceType[nn.Module]] = []
    before: list[int] = []

    def count(_index: int, layer: nn.Module) -> nn.Module:
        before.append(sum(each() is not None for each in made))
        made.append(ref(layer))
        return layer

    ids = torch.arange(10, 10 + SEQ_LEN).expand(2, -1)
    variants = [with_matrices(network, lambda weight: weight / 2).changed(count) for _ in range(2)]
    last_states([NetworkForward(each, [ids, ids]) for each in (network, *variants)])
    # Each variant has a copy of each layer, and none is there when the next one is made.
    assert before == [0] * 2 * len(network.shapes)
    assert all(each() is None for each in made)


def test_matrices_that_stay_give_the_same_vectors(network: Network) -> None:
    assert np.array_equal(vectors(with_matrices(network, lambda w: w)), vectors(network))


def spoils_unread(network: Network, modules: Callable[[nn.Module], list[nn.Module]]) -> Network:
    """A network whose last layer computes only NaN at the positions that are never read."""

    def spoil(_module: nn.Module, _args: object, output: Tensor) -> Tensor:
        spoiled = output.clone()
        spoiled[:, :-1] = float("nan")
        return spoiled

    def changed(index: int, layer: nn.Module) -> nn.Module:
        if index == len(network.shapes) - 1:
            for module in modules(layer):
                module.register_forward_hook(spoil)
        return layer

    return network.changed(changed)


@pytest.mark.parametrize(
    "scheme",
    [PLAIN, ArtifactScheme(layer_reflections=True), DistanceScheme(layer_hooks=True)],
    ids=lambda scheme: scheme.name,
)
def test_the_last_layer_needs_queries_and_mlp_at_the_last_position_only(
    network: Network, scheme: Scheme
) -> None:
    def unread(layer: nn.Module) -> list[nn.Module]:
        named = dict(layer.named_modules())
        return [named["self_attn.q_proj"], named["self_attn.o_proj"], named["mlp"]]

    # Whatever those numbers are: one that reached the vector would make it no number.
    spoiled = batch(spoils_unread(network, unread), scheme)
    assert spoiled.failed == ()
    assert np.array_equal(spoiled.values, batch(network, scheme).values)


@pytest.mark.parametrize("name", ["self_attn.k_proj", "self_attn.v_proj"])
def test_keys_and_values_of_every_position_are_read(network: Network, name: str) -> None:
    def read(layer: nn.Module) -> list[nn.Module]:
        return [dict(layer.named_modules())[name]]

    assert batch(spoils_unread(network, read)).failed == (0, 1, 2, 3)
