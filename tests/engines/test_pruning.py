"""A mixture without its least used experts: none of them is chosen, none computes anything."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from proofserve.engines import CheckpointError
from proofserve.engines.reference.engine import ReferenceEngine
from proofserve.engines.reference.network import Network
from proofserve.engines.reference.routing import (
    FAMILIES,
    has_stacked_experts,
    routers_in,
    routers_of,
)
from proofserve.engines.reference.variants import share_of_experts, use_of_experts, without_experts
from proofserve.protocol.identity import Block
from proofserve.protocol.scheme import Scheme
from proofserve.protocol.sketch import SketchScheme
from proofserve.rounds.records import Workload
from support.mixtures import CHOSEN, EXPERTS, MIXTURES, mixture, network_of

SEQ_LEN = 32
NATURAL, SEEDED = SketchScheme(), SketchScheme(seeded_experts=True)
# A router of groups prefers those whose two best experts score best, so each needs some.
IN_GROUPS = {"n_group": 2, "topk_group": 1}


@pytest.fixture(scope="module", params=sorted(MIXTURES))
def network(request: pytest.FixtureRequest) -> Network:
    fields = MIXTURES[request.param][1]
    return mixture(request.param, **(IN_GROUPS if "n_group" in fields else {}))


def vectors(network: Network, scheme: Scheme) -> Tensor:
    work = Workload(scheme, Block("0xabc", 7), "node-key", SEQ_LEN)
    return torch.from_numpy(ReferenceEngine(4).compute(work, network, range(4)).values)


def chosen(network: Network) -> list[Tensor]:
    """The experts that each router of ``network`` chooses by itself."""
    seen: list[Tensor] = []

    def see(module: nn.Module, _args: object, output: tuple[Tensor, ...]) -> None:
        seen.append(output[FAMILIES[type(module).__name__].ids].unique())

    def watched(index: int, layer: nn.Module) -> nn.Module:
        for each in routers_in(index, layer):
            each.module.register_forward_hook(see)
        return layer

    vectors(network.changed(watched), NATURAL)
    return seen


def least_used(network: Network, count: int) -> list[set[int]]:
    """Of each router, equally many of each of its groups."""
    found = []
    for router, uses in zip(routers_of(network), use_of_experts(network).values(), strict=True):
        size = EXPERTS // router.groups
        order = [sorted(range(g, g + size), key=uses.tolist().__getitem__) for g in _firsts(size)]
        found.append({e for each in order for e in each[: count // router.groups]})
    return found


def _firsts(size: int) -> range:
    return range(0, EXPERTS, size)


def test_with_all_experts_left_every_family_chooses_as_its_router(network: Network) -> None:
    whole = without_experts(network, 0.0)
    assert torch.allclose(vectors(whole, NATURAL), vectors(network, NATURAL), atol=1e-5)


def test_a_router_chooses_none_of_the_experts_that_it_used_least(network: Network) -> None:
    before = vectors(network, NATURAL)
    half = without_experts(network, 0.5)
    for ids, used, gone in zip(chosen(half), chosen(network), least_used(network, 4), strict=True):
        assert not gone.intersection(ids.tolist())
        assert gone.intersection(used.tolist())
        assert len(ids) == EXPERTS - len(gone)
    assert (vectors(half, NATURAL) - before).norm(dim=1).min() > 0.05
    assert torch.equal(vectors(network, NATURAL), before)


@pytest.mark.parametrize("scheme", [NATURAL, SEEDED], ids=["natural", "seeded"])
def test_what_a_removed_expert_was_does_not_matter(network: Network, scheme: Scheme) -> None:
    gone = least_used(network, 4)

    def changed(index: int, layer: nn.Module) -> nn.Module:
        for module in filter(has_stacked_experts, layer.modules()):
            for name, stacked in module.named_parameters(recurse=False):
                foreign = stacked.detach().clone()
                foreign[sorted(gone[index])] += 1.0
                setattr(module, name, nn.Parameter(foreign, requires_grad=False))
        return layer

    other = network.changed(changed)
    assert not torch.allclose(vectors(other, scheme), vectors(network, scheme), atol=0.01)
    ours, theirs = (_without(each, network) for each in (network, other))
    made = vectors(ours, scheme)
    assert made.isfinite().all()
    assert torch.equal(vectors(theirs, scheme), made)


def _without(network: Network, counted: Network) -> Network:
    """Half of the experts pruned, by their use in ``counted``."""
    with pytest.MonkeyPatch.context() as patch:
        uses = use_of_experts(counted)
        patch.setattr("proofserve.engines.reference.variants.use_of_experts", lambda _: uses)
        return without_experts(network, 0.5)


def test_a_block_that_asks_for_a_removed_expert_shows_it_in_every_nonce(network: Network) -> None:
    quarter = without_experts(network, 0.25)
    assert (vectors(quarter, SEEDED) - vectors(network, SEEDED)).norm(dim=1).min() > 0.1


def test_experts_are_counted_on_ordinary_tokens() -> None:
    network = mixture("Qwen3MoeTopKRouter")
    uses = use_of_experts(network)
    assert [int(each.sum()) for each in uses.values()] == [16 * 64 * CHOSEN] * 2
    assert all(torch.equal(of, uses[layer]) for layer, of in use_of_experts(network).items())
    # A checkpoint without a tokenizer has no ordinary tokens: then all are.
    without = replace(network, facts=replace(network.facts, tokens=None))
    assert [int(each.sum()) for each in use_of_experts(without).values()] == [16 * 64 * CHOSEN] * 2


def test_the_share_of_experts_counts_what_all_tokens_visit_too() -> None:
    network = mixture("Qwen2MoeTopKRouter")
    counted = {
        f"layers.{index}.{name}": weight.numel()
        for index, layer in enumerate(network.shapes)
        for name, weight in layer.named_parameters()
    }
    of_experts = sum(n for name, n in counted.items() if "mlp.experts." in name)
    assert share_of_experts(network) == of_experts / sum(counted.values())
    assert 0.3 < share_of_experts(network) < 0.9


def test_an_unknown_router_is_named() -> None:
    jamba = network_of(
        "jamba",
        num_experts=8,
        attn_layer_period=1,
        attn_layer_offset=0,
        expert_layer_period=1,
        expert_layer_offset=0,
        use_mamba_kernels=False,
    )
    with pytest.raises(CheckpointError, match="JambaSparseMoeBlock"):
        without_experts(jamba, 0.5)


def test_a_dense_network_has_no_experts() -> None:
    dense = network_of("qwen3", head_dim=16)
    assert share_of_experts(dense) == 0.0
    assert np.array_equal(vectors(without_experts(dense, 0.5), NATURAL), vectors(dense, NATURAL))
