"""Experts that are held: the same numbers as before, with other weights the published ids."""

from dataclasses import dataclass, replace

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from proofserve.engines import CheckpointError
from proofserve.engines.reference.engine import ReferenceEngine, Run
from proofserve.engines.reference.forward import states
from proofserve.engines.reference.network import Network
from proofserve.engines.reference.rounding import in_dtype, in_groups, integers
from proofserve.engines.reference.routing import (
    FAMILIES,
    ChoiceOfExperts,
    ExpertMemory,
    routers_in,
    routers_of,
)
from proofserve.engines.reference.suspects import suspect
from proofserve.engines.reference.variants import with_matrices, without_layers
from proofserve.protocol.identity import Block
from proofserve.protocol.network_schemes import ArtifactScheme
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


def vectors(
    network: Network,
    nonces: range,
    experts: ChoiceOfExperts | None = None,
    work: Workload = WORK,
    batch: int = SEQUENCES,
) -> NDArray[np.float32]:
    (made,) = ReferenceEngine(batch).compute_all(work, [Run(network, nonces, experts)])
    return made.values


@dataclass(frozen=True)
class Routed:
    """What a router gives to its layer: weights and ids [tokens, k] in order of ids, and logits."""

    weights: Tensor
    ids: Tensor
    logits: Tensor


def watched(network: Network, seen: list[Routed]) -> Network:
    """``network``; ``seen`` gets what each router gives, after others chose its experts."""

    def see(module: nn.Module, _args: object, output: tuple[Tensor, ...]) -> None:
        family = FAMILIES[type(module).__name__]
        ids, order = output[family.ids].sort(dim=-1)
        weights = output[family.weights].gather(-1, order)
        seen.append(Routed(weights, ids, output[family.logits]))

    def changed(index: int, layer: nn.Module) -> nn.Module:
        hooks: list[RemovableHandle] = []

        def begin(*_: object) -> None:
            # Hooks are called in their order, so this is one of the last.
            routers = routers_in(index, layer)
            hooks.extend(each.module.register_forward_hook(see) for each in routers)

        def end(*_: object) -> None:
            while hooks:
                hooks.pop().remove()

        layer.register_forward_pre_hook(begin)
        layer.register_forward_hook(end)
        return layer

    return network.changed(changed)


def test_every_known_router_is_tried() -> None:
    assert MIXTURES.keys() == FAMILIES.keys()


def test_routers_are_found_in_their_layers(network: Network) -> None:
    found = routers_of(network)
    assert [(each.layer, each.experts) for each in found] == [(0, EXPERTS), (1, EXPERTS)]
    assert len({type(each.module) for each in found}) == 1


def test_published_weights_give_the_same_bits_with_their_experts_held(network: Network) -> None:
    memory, read = ExpertMemory(network), tokens()
    free = states(network, read)
    assert torch.equal(states(network, read, memory.recording()), free)
    assert torch.equal(states(network, read, memory.holding(network)), free)
    assert torch.equal(states(network, read), free)


def test_rounded_weights_compute_with_the_published_experts(network: Network) -> None:
    memory, read, changed = ExpertMemory(network), tokens(), rounded(network)
    published: list[Routed] = []
    free: list[Routed] = []
    held: list[Routed] = []
    states(watched(network, published), read, memory.recording())
    natural = states(watched(changed, free), read)
    forced = states(watched(changed, held), read, memory.holding(changed))
    for of_published, of_held in zip(published, held, strict=True):
        assert torch.equal(of_held.ids, of_published.ids)
    assert any(not torch.equal(one.ids, other.ids) for one, other in zip(free, held, strict=True))
    assert not torch.equal(forced, natural)
    # The first layer reads the same either way. Where its router would have chosen these experts
    # anyway, it must weigh them as it would have; so does the model itself check the rule.
    agree = (held[0].ids == free[0].ids).all(dim=-1)
    assert 0.2 < agree.float().mean() < 1.0
    assert torch.equal(held[0].weights[agree], free[0].weights[agree])
    assert held[0].weights.dtype == free[0].weights.dtype
    assert not torch.equal(held[0].weights[agree], published[0].weights[agree])
    # What comes after is as it was.
    assert torch.equal(states(changed, read), natural)


@pytest.mark.parametrize("router", [QWEN, "DeepseekV3TopkRouter", "GptOssTopKRouter"])
def test_the_mix_is_weighed_by_the_rule_where_the_experts_are_foreign(router: str) -> None:
    """The rules once more, as the models' papers state them."""
    foreign = torch.tensor([6, 1])
    seen: list[Routed] = []
    states(
        watched(mixture(router), seen),
        tokens(),
        lambda _read: lambda _router, ids: foreign.expand_as(ids),
    )
    weights, ids, scores = seen[0].weights, seen[0].ids, seen[0].logits.double()
    assert torch.equal(ids, foreign.sort().values.expand_as(ids))
    chosen = scores[:, [1, 6]]
    share = {"DeepseekV3TopkRouter": torch.sigmoid(chosen) * 2.5}.get(router, chosen.exp())
    total = torch.sigmoid(chosen) if router == "DeepseekV3TopkRouter" else chosen.exp()
    assert torch.allclose(weights.double(), share / total.sum(dim=-1, keepdim=True), atol=1e-6)


def test_the_block_chooses_the_experts_of_every_family(network: Network) -> None:
    work = replace(WORK, scheme=SketchScheme(seeded_experts=True))
    block = work.scheme.for_block(work.block, network.facts, network.device)
    seen: list[Routed] = []
    seeded = vectors(network, range(2), work=work)
    natural = vectors(network, range(2), work=replace(work, scheme=SketchScheme()))
    assert np.array_equal(vectors(watched(network, seen), range(2), work=work), seeded)
    assert not np.allclose(seeded, natural, atol=1e-3)
    for router, routed in zip(routers_of(network), seen, strict=True):
        chosen = block.experts(router.layer, router.choosing(CHOSEN), SEQ_LEN).sort().values
        # Two nonces of two twins, all with the experts of their position.
        assert torch.equal(routed.ids.view(4, SEQ_LEN, CHOSEN), chosen.expand(4, -1, -1))
        assert routed.weights.min() > 0


def test_a_dense_network_has_nothing_to_choose() -> None:
    dense = network_of("qwen3", head_dim=16)
    first, second = (
        vectors(dense, range(2), work=replace(WORK, scheme=SketchScheme(seeded_experts=seeded)))
        for seeded in (False, True)
    )
    assert np.array_equal(first, second)


def test_a_mixture_without_its_layers_has_nothing_to_choose(qwen: Network) -> None:
    none = without_layers(qwen, range(2))
    first, second = (
        vectors(none, range(1), work=replace(WORK, scheme=SketchScheme(seeded_experts=seeded)))
        for seeded in (False, True)
    )
    assert np.array_equal(first, second)


def test_batches_and_order_do_not_matter(qwen: Network) -> None:
    memory, read, changed = ExpertMemory(qwen), tokens(), rounded(qwen)
    for one in (read[:3], read[3:]):
        states(qwen, one, memory.recording())
    held = memory.holding(changed)
    together = states(changed, read, held)
    turned = states(changed, read.flip(0), held).flip(0)
    alone = torch.cat([states(changed, row[None], held) for row in read])
    assert torch.allclose(turned, together, atol=1e-4)
    assert torch.allclose(alone, together, atol=1e-4)


def test_proofs_of_some_nonces(qwen: Network) -> None:
    changed, memory = rounded(qwen), ExpertMemory(qwen)
    vectors(qwen, range(8), memory.recording())
    every = vectors(changed, range(8), memory.holding(changed))
    some = vectors(changed, range(5, 7), memory.holding(changed))
    assert np.allclose(some, every[5:7], atol=1e-4)
    assert not np.allclose(every, vectors(changed, range(8)), atol=1e-3)


def test_a_suspect_beside_the_published_network_uses_the_experts_that_it_chose(
    qwen: Network,
) -> None:
    """In other batches and another order than the published network, which is one layer ahead."""
    changed, memory = rounded(qwen), ExpertMemory(qwen)
    before = vectors(qwen, range(8), memory.recording())
    held = vectors(changed, range(8), memory.holding(changed))
    beside = ExpertMemory(qwen)
    published, suspected = ReferenceEngine(SEQUENCES).compute_all(
        WORK,
        [
            Run(qwen, range(8), beside.recording()),
            Run(changed, [7, 3, 1, 0, 5], beside.holding(changed)),
        ],
    )
    assert np.array_equal(published.values, before)
    assert np.allclose(suspected.values, held[[7, 3, 1, 0, 5]], atol=1e-4)


def test_a_sequence_that_was_not_read_gives_no_vector(qwen: Network) -> None:
    memory = ExpertMemory(qwen)
    vectors(qwen, range(3), memory.recording())
    with pytest.raises(EngineFault, match="has not read this sequence before"):
        vectors(qwen, range(4), memory.holding(qwen))


def test_a_suspect_that_rounds_no_weights(qwen: Network) -> None:
    memory = ExpertMemory(qwen)
    cached = suspect(qwen, "KV cache in fp8")
    before = vectors(qwen, range(4), memory.recording())
    held = vectors(cached, range(4), memory.holding(cached))
    assert not np.array_equal(held, before)
    assert np.array_equal(vectors(qwen, range(4)), before)


def test_ids_take_one_byte(qwen: Network) -> None:
    memory = ExpertMemory(qwen)
    states(qwen, tokens(), memory.recording())
    kept = memory._chosen.values()
    assert {each.dtype for each in kept} == {np.dtype(np.uint8)}
    assert sum(each.nbytes for each in kept) == 2 * SEQUENCES * SEQ_LEN * CHOSEN


def test_more_experts_than_a_byte_counts() -> None:
    network = mixture(QWEN, num_experts=300)
    memory, read = ExpertMemory(network), tokens()
    free = states(network, read, memory.recording())
    assert torch.equal(states(network, read, memory.holding(network)), free)


class NewRouter(nn.Module):
    """Chooses as the router that it hides from a search of the modules."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self._hidden = (inner,)

    def forward(self, hidden: Tensor) -> tuple[Tensor, ...]:
        chosen: tuple[Tensor, ...] = self._hidden[0](hidden)
        return chosen


def with_unknown_router(network: Network) -> Network:
    def changed(_index: int, layer: nn.Module) -> nn.Module:
        block = layer.get_submodule("mlp")
        block.gate = NewRouter(block.get_submodule("gate"))
        return layer

    return network.changed(changed)


def test_an_unknown_router_is_named_when_experts_must_be_held(qwen: Network) -> None:
    strange, read, memory = with_unknown_router(qwen), tokens(), ExpertMemory(qwen)
    free = states(qwen, read, memory.recording())
    # What holds no experts goes on.
    assert torch.equal(states(strange, read), free)
    with pytest.raises(CheckpointError, match=r"how NewRouter weighs experts.*direction test"):
        states(strange, read, memory.holding(strange))


def test_an_unknown_router_cannot_follow_the_block(qwen: Network) -> None:
    work = replace(WORK, scheme=SketchScheme(seeded_experts=True))
    with pytest.raises(EngineFault, match=r"NewRouter weighs experts.*sketch-v2"):
        vectors(with_unknown_router(qwen), range(1), work=work)


@pytest.fixture(scope="module")
def jamba() -> Network:
    """A mixture whose router has no class of its own."""
    return network_of(
        "jamba",
        num_experts=8,
        attn_layer_period=1,
        attn_layer_offset=0,
        expert_layer_period=1,
        expert_layer_offset=0,
        use_mamba_kernels=False,
    )


def test_a_router_without_a_class_of_its_own_is_named_by_its_block(jamba: Network) -> None:
    with pytest.raises(CheckpointError, match="JambaSparseMoeBlock"):
        routers_of(jamba)


def test_a_published_checkpoint_with_an_unknown_router_has_vectors_and_holds_nothing(
    qwen: Network, jamba: Network
) -> None:
    memory = ExpertMemory(jamba)
    assert not memory.is_dense
    assert memory.recording() is None
    assert np.isfinite(vectors(jamba, range(2), memory.recording())).all()
    for published in (jamba, qwen):
        with pytest.raises(CheckpointError, match="how JambaSparseMoeBlock weighs experts"):
            ExpertMemory(published).holding(jamba)
    work = replace(WORK, scheme=SketchScheme(seeded_experts=True))
    with pytest.raises(EngineFault, match="JambaSparseMoeBlock"):
        vectors(jamba, range(1), work=work)


def test_other_layers_or_experts_cannot_be_held(qwen: Network) -> None:
    memory = ExpertMemory(qwen)
    for other, mixed in (
        (mixture(QWEN, num_experts=4), "4 experts in 2 layers"),
        (mixture(QWEN, num_hidden_layers=1), "8 experts in 1 layers"),
    ):
        with pytest.raises(CheckpointError, match=f"mixes {mixed}"):
            memory.holding(other)


def test_layers_that_are_left_in_hold_their_experts(qwen: Network) -> None:
    memory, read, first = ExpertMemory(qwen), tokens(), without_layers(qwen, [1])
    states(qwen, read, memory.recording())
    # The first layer reads the same, so it chooses these experts by itself.
    assert torch.equal(states(first, read, memory.holding(first)), states(first, read))


def test_a_kernel_that_passes_the_router_by_is_refused(qwen: Network) -> None:
    def changed(index: int, layer: nn.Module) -> nn.Module:
        if index == 1:
            layer.get_submodule("mlp").forward = lambda hidden: hidden
        return layer

    fused = qwen.changed(changed)
    assert states(fused, tokens()).isfinite().all()
    with pytest.raises(CheckpointError, match="did not ask their Qwen3MoeTopKRouter"):
        states(fused, tokens(), ExpertMemory(qwen).recording())
    # The layers that are read for other forwards are as they were.
    assert states(qwen, tokens(), ExpertMemory(qwen).recording()).isfinite().all()


def test_a_dense_network_has_nothing_to_hold() -> None:
    dense = network_of("qwen3", head_dim=16)
    assert routers_of(dense) == ()
    memory = ExpertMemory(dense)
    assert memory.is_dense
    assert memory.recording() is None
    assert memory.holding(rounded(dense)) is None


def cosines(ours: NDArray[np.float32], theirs: NDArray[np.float32]) -> NDArray[np.float32]:
    sizes = np.linalg.norm(ours, axis=1) * np.linalg.norm(theirs, axis=1)
    found: NDArray[np.float32] = (ours * theirs).sum(axis=1) / sizes
    return found


def test_honest_errors_point_along_predictions_only_with_free_experts() -> None:
    shape = {"hidden_size": 64, "num_hidden_layers": 4, "num_experts": 16, "num_experts_per_tok": 2}
    exact, honest = (mixture(QWEN, each, **shape) for each in (torch.float32, torch.bfloat16))
    work = Workload(SketchScheme(k_dim=64), Block("0xabc", 100), "me", 64)

    def sketches(network: Network, experts: ChoiceOfExperts | None = None) -> NDArray[np.float32]:
        return vectors(network, range(48), experts, work, 8)

    memory = ExpertMemory(exact)
    truth = sketches(exact, memory.recording())
    errors = sketches(honest) - truth
    for name in ("int8 per channel", "int8 g32"):
        changed = suspect(exact, name)
        free = cosines(errors, sketches(changed) - truth)
        held = cosines(errors, sketches(changed, memory.holding(changed)) - truth)
        assert abs(held.mean()) < 0.1
        assert free.mean() > 0.2
