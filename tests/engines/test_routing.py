"""Experts that are held: the same numbers as before, with other weights the published ids."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from proofserve.engines.reference.engine import ReferenceEngine
from proofserve.engines.reference.errors import CheckpointError
from proofserve.engines.reference.network import Network
from proofserve.engines.reference.rounding import in_groups, integers
from proofserve.engines.reference.routers import FAMILIES, routers_of
from proofserve.engines.reference.routing import ExpertMemory, choosing, seeded_experts
from proofserve.engines.reference.suspects import suspect
from proofserve.engines.reference.variants import in_dtype, with_matrices, without_layers
from proofserve.protocol.artifact import ArtifactScheme
from proofserve.protocol.identity import Block
from proofserve.protocol.sketch import SketchScheme
from proofserve.rounds.errors import EngineFault
from proofserve.rounds.records import Workload
from support.mixtures import CHOSEN, EXPERTS, MIXTURES, mixture, network_of

QWEN = "Qwen3MoeTopKRouter"
SEQUENCES, SEQ_LEN = 4, 48
WORK = Workload(ArtifactScheme(), Block("0xabc", 7), "node-key", SEQ_LEN)


@pytest.fixture(scope="module", params=sorted(MIXTURES))
def network(request: pytest.FixtureRequest) -> Network:
    return mixture(request.param)


@pytest.fixture(scope="module")
def qwen() -> Network:
    return mixture(QWEN)


def rounded(network: Network) -> Network:
    return with_matrices(network, in_dtype(in_groups(integers(3), 16)))


def tokens(count: int = SEQUENCES) -> Tensor:
    generator = torch.Generator().manual_seed(3)
    return torch.randint(3, 64, (count, SEQ_LEN), generator=generator)


@torch.inference_mode()
def states(network: Network, ids: Tensor) -> Tensor:
    found: Tensor = network.decoder(input_ids=ids, use_cache=False).last_hidden_state
    return found


def vectors(network: Network, nonces: range, batch: int = SEQUENCES) -> NDArray[np.float32]:
    return ReferenceEngine(batch).compute(WORK, network, nonces).values


@contextmanager
def watched(network: Network) -> Iterator[list[tuple[Tensor, Tensor]]]:
    """The weights and ids [tokens, k] that each router gives to its layer, in order of ids."""
    seen: list[tuple[Tensor, Tensor]] = []

    def see(module: nn.Module, _args: object, output: tuple[Tensor, ...]) -> None:
        family = FAMILIES[type(module).__name__]
        ids, order = output[family.ids].sort(dim=-1)
        seen.append((output[family.weights].gather(-1, order), ids))

    hooks = [each.module.register_forward_hook(see) for each in routers_of(network)]
    yield seen
    for hook in hooks:
        hook.remove()


def test_every_known_router_is_tried() -> None:
    assert MIXTURES.keys() == FAMILIES.keys()


def test_routers_are_found_in_their_layers(network: Network) -> None:
    found = routers_of(network)
    assert [(each.layer, each.experts) for each in found] == [(0, EXPERTS), (1, EXPERTS)]
    assert len({type(each.module) for each in found}) == 1


def test_published_weights_give_the_same_bits_with_their_experts_held(network: Network) -> None:
    memory, read = ExpertMemory(network), tokens()
    free = states(network, read)
    with memory.recording():
        assert torch.equal(states(network, read), free)
    with memory.holding(network):
        assert torch.equal(states(network, read), free)
    assert torch.equal(states(network, read), free)


def test_rounded_weights_compute_with_the_published_experts(network: Network) -> None:
    memory, read, changed = ExpertMemory(network), tokens(), rounded(network)
    with memory.recording(), watched(network) as published:
        states(network, read)
    with watched(changed) as free:
        natural = states(changed, read)
    with memory.holding(changed), watched(changed) as held:
        forced = states(changed, read)
    for of_published, of_held in zip(published, held, strict=True):
        assert torch.equal(of_held[1], of_published[1])
    assert any(not torch.equal(one[1], other[1]) for one, other in zip(free, held, strict=True))
    assert not torch.equal(forced, natural)
    # The first layer reads the same either way. Where its router would have chosen these experts
    # anyway, it must weigh them as it would have; so does the model itself check the rule.
    (weights, ids), (own_weights, own_ids) = held[0], free[0]
    agree = (ids == own_ids).all(dim=-1)
    assert 0.2 < agree.float().mean() < 1.0
    assert torch.equal(weights[agree], own_weights[agree])
    assert weights.dtype == own_weights.dtype
    assert not torch.equal(weights[agree], published[0][0][agree])
    # What comes after is as it was.
    assert torch.equal(states(changed, read), natural)


@pytest.mark.parametrize("router", [QWEN, "DeepseekV3TopkRouter", "GptOssTopKRouter"])
def test_the_mix_is_weighed_by_the_rule_where_the_experts_are_foreign(router: str) -> None:
    """The rules once more, as the models' papers state them."""
    network = mixture(router)
    foreign = torch.tensor([6, 1])
    module = routers_of(network)[0].module
    read, logits = tokens(), []
    module.register_forward_hook(lambda _module, _args, output: logits.append(output[0]))
    with (
        choosing(
            network, routers_of(network), lambda _: lambda _router, ids: foreign.expand_as(ids)
        ),
        watched(network) as seen,
    ):
        states(network, read)
    (weights, ids), scores = seen[0], logits[0].double()
    assert torch.equal(ids, foreign.sort().values.expand_as(ids))
    chosen = scores[:, [1, 6]]
    share = {"DeepseekV3TopkRouter": torch.sigmoid(chosen) * 2.5}.get(router, chosen.exp())
    total = torch.sigmoid(chosen) if router == "DeepseekV3TopkRouter" else chosen.exp()
    assert torch.allclose(weights.double(), share / total.sum(dim=-1, keepdim=True), atol=1e-6)


def test_the_block_chooses_the_experts_of_every_family(network: Network) -> None:
    work = replace(WORK, scheme=SketchScheme(seeded_experts=True))
    block = work.scheme.for_block(work.block, network.facts, network.device)
    seeded = ReferenceEngine(2).compute(work, network, range(2)).values
    natural = ReferenceEngine(network, 2).compute(replace(work, scheme=SketchScheme()), [0, 1])
    with seeded_experts(network, block, SEQ_LEN), watched(network) as seen:
        network.values(block, work.public_key, (0, 1), SEQ_LEN)
    assert not np.allclose(seeded, natural.values, atol=1e-3)
    routers = routers_of(network)
    for router, (weights, ids) in zip(routers, seen, strict=True):
        chosen = block.experts(router.layer, router.choosing(CHOSEN), SEQ_LEN).sort().values
        # Two nonces of two twins, all with the experts of their position.
        assert torch.equal(ids.view(4, SEQ_LEN, CHOSEN), chosen.expand(4, -1, -1))
        assert weights.min() > 0


def test_a_dense_network_has_nothing_to_choose() -> None:
    dense = network_of("qwen3", **{"head_dim": 16})
    schemes = (SketchScheme(seeded_experts=seeded) for seeded in (False, True))
    first, second = (
        ReferenceEngine(2).compute(replace(WORK, scheme=each), dense, [0, 5]) for each in schemes
    )
    assert np.array_equal(first.values, second.values)


def test_a_mixture_without_its_layers_has_nothing_to_choose(qwen: Network) -> None:
    work = replace(WORK, scheme=SketchScheme(seeded_experts=True))
    first, second = (
        ReferenceEngine(without_layers(qwen, range(2)), 2).compute(replace(work, scheme=each), [0])
        for each in (work.scheme, SketchScheme())
    )
    assert np.array_equal(first.values, second.values)


def test_an_unknown_router_cannot_follow_the_block(qwen: Network) -> None:
    strange = with_unknown_router(qwen)
    work = replace(WORK, scheme=SketchScheme(seeded_experts=True))
    with pytest.raises(EngineFault, match=r"NewRouter weighs experts.*sketch-v2"):
        ReferenceEngine(2).compute(work, strange, [0])


def test_batches_and_order_do_not_matter(qwen: Network) -> None:
    memory, read, changed = ExpertMemory(qwen), tokens(), rounded(qwen)
    with memory.recording():
        for one in (read[:3], read[3:]):
            states(qwen, one)
    with memory.holding(changed):
        together = states(changed, read)
        turned = states(changed, read.flip(0)).flip(0)
        alone = torch.cat([states(changed, row[None]) for row in read])
    assert torch.allclose(turned, together, atol=1e-4)
    assert torch.allclose(alone, together, atol=1e-4)


def test_proofs_of_some_nonces(qwen: Network) -> None:
    changed, memory = rounded(qwen), ExpertMemory(qwen)
    with memory.recording():
        vectors(qwen, range(8))
    with memory.holding(changed):
        every = vectors(changed, range(8))
        some = vectors(changed, range(5, 7))
    assert np.allclose(some, every[5:7], atol=1e-4)
    assert not np.allclose(every, vectors(changed, range(8)), atol=1e-3)


def test_a_sequence_that_was_not_read_gives_no_vector(qwen: Network) -> None:
    memory = ExpertMemory(qwen)
    with memory.recording():
        vectors(qwen, range(3))
    with (
        memory.holding(qwen),
        pytest.raises(EngineFault, match="has not read this sequence before"),
    ):
        vectors(qwen, range(4))


def test_a_suspect_that_shares_its_modules(qwen: Network) -> None:
    memory = ExpertMemory(qwen)
    cached = suspect(qwen, "KV cache in fp8")
    with memory.recording():
        before = vectors(qwen, range(4))
    with memory.holding(cached):
        held = vectors(cached, range(4))
    assert not np.array_equal(held, before)
    assert np.array_equal(vectors(qwen, range(4)), before)


def test_ids_take_one_byte(qwen: Network) -> None:
    memory = ExpertMemory(qwen)
    with memory.recording():
        states(qwen, tokens())
    kept = memory._chosen.values()
    assert {each.dtype for each in kept} == {np.dtype(np.uint8)}
    assert sum(each.nbytes for each in kept) == 2 * SEQUENCES * SEQ_LEN * CHOSEN


def test_more_experts_than_a_byte_counts() -> None:
    network = mixture(QWEN, num_experts=300)
    memory, read = ExpertMemory(network), tokens()
    with memory.recording():
        free = states(network, read)
    with memory.holding(network):
        assert torch.equal(states(network, read), free)


class NewRouter(nn.Module):
    """Chooses as the router that it hides from a search of the modules."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self._hidden = (inner,)

    def forward(self, hidden: Tensor) -> tuple[Tensor, ...]:
        chosen: tuple[Tensor, ...] = self._hidden[0](hidden)
        return chosen


def with_unknown_router(network: Network) -> Network:
    twin = without_layers(network, [])
    for layer in twin.layers:
        block = layer.get_submodule("mlp")
        block.gate = NewRouter(block.get_submodule("gate"))
    return twin


def test_an_unknown_router_is_named_when_experts_must_be_held(qwen: Network) -> None:
    strange = with_unknown_router(qwen)
    memory, read = ExpertMemory(strange), tokens()
    # What needs no suspects goes on.
    with memory.recording():
        assert torch.equal(states(strange, read), states(qwen, read))
    with (
        pytest.raises(CheckpointError, match=r"how NewRouter weighs experts.*direction test"),
        memory.holding(strange),
    ):
        pass
    known = ExpertMemory(qwen)
    with pytest.raises(CheckpointError, match="NewRouter"), known.holding(strange):
        pass


def test_a_router_without_a_class_of_its_own_is_named_by_its_block() -> None:
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
        routers_of(jamba)


def test_other_layers_or_experts_cannot_be_held(qwen: Network) -> None:
    memory = ExpertMemory(qwen)
    for other, mixed in (
        (mixture(QWEN, num_experts=4), "4 experts in 2 layers"),
        (without_layers(qwen, [1]), "8 experts in 1 layers"),
    ):
        with pytest.raises(CheckpointError, match=f"mixes {mixed}"), memory.holding(other):
            pass


def test_a_kernel_that_passes_the_router_by_is_refused(qwen: Network) -> None:
    fused = without_layers(qwen, [])
    block = fused.layers[1].get_submodule("mlp")
    block.forward = lambda hidden: hidden
    with (
        pytest.raises(CheckpointError, match="did not ask their Qwen3MoeTopKRouter"),
        ExpertMemory(fused).recording(),
    ):
        states(fused, tokens())


def test_a_dense_network_has_nothing_to_hold() -> None:
    dense = network_of("qwen3", head_dim=16)
    assert routers_of(dense) == ()
    memory, changed = ExpertMemory(dense), rounded(dense)
    with memory.recording():
        states(dense, tokens())
    hooks = [len(module._forward_hooks) for module in changed.decoder.modules()]
    with memory.holding(changed):
        assert [len(module._forward_hooks) for module in changed.decoder.modules()] == hooks
        states(changed, tokens())
    assert memory._chosen == {}


def cosines(ours: NDArray[np.float32], theirs: NDArray[np.float32]) -> NDArray[np.float32]:
    sizes = np.linalg.norm(ours, axis=1) * np.linalg.norm(theirs, axis=1)
    found: NDArray[np.float32] = (ours * theirs).sum(axis=1) / sizes
    return found


def test_honest_errors_point_along_predictions_only_with_free_experts() -> None:
    shape = {"hidden_size": 64, "num_hidden_layers": 4, "num_experts": 16, "num_experts_per_tok": 2}
    exact, honest = (mixture(QWEN, each, **shape) for each in (torch.float32, torch.bfloat16))
    work = Workload(SketchScheme(k_dim=64), Block("0xabc", 100), "me", 64)

    def sketches(network: Network) -> NDArray[np.float32]:
        return ReferenceEngine(8).compute(work, network, range(48)).values

    memory = ExpertMemory(exact)
    with memory.recording():
        truth = sketches(exact)
    errors = sketches(honest) - truth
    for name in ("int8 per channel", "int8 g32"):
        changed = suspect(exact, name)
        free = cosines(errors, sketches(changed) - truth)
        with memory.holding(changed):
            held = cosines(errors, sketches(changed) - truth)
        assert abs(held.mean()) < 0.1
        assert free.mean() > 0.2
