"""Names of vLLM's mixtures on which ``compat_worker.routers`` and ``with_experts`` rely."""

import inspect
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from vllm.model_executor.layers.fused_moe.router.base_router import BaseRouter
from vllm.model_executor.layers.fused_moe.router.fused_topk_bias_router import FusedTopKBiasRouter
from vllm.model_executor.layers.fused_moe.router.fused_topk_router import FusedTopKRouter
from vllm.model_executor.layers.fused_moe.router.grouped_topk_router import GroupedTopKRouter
from vllm.model_executor.layers.fused_moe.runner.moe_runner import MoERunner

from proofserve.engines.vllm import compat_worker
from proofserve.engines.vllm.support import UnsupportedEngine
from proofserve.protocol.scheme import ExpertLayer
from support.contract import source

CPURouter: Any = pytest.importorskip(
    "vllm.model_executor.layers.fused_moe.router.cpu_router",
    reason="vLLM until 0.29 chooses experts inside a kernel on CPUs: sketch-v2 of them is refused",
).CPURouter

EXPERTS, CHOSEN = 16, 4
GROUPED = {"use_grouped_topk": True, "num_expert_group": 4, "topk_group": 2}


def router(**fields: Any) -> Any:
    return CPURouter(top_k=CHOSEN, global_num_experts=EXPERTS, **fields)


def logits() -> Tensor:
    return torch.randn(32, EXPERTS, generator=torch.Generator().manual_seed(1))


@pytest.mark.parametrize(
    "fields",
    [
        {"renormalize": True},
        {"renormalize": False},
        {**GROUPED, "scoring_func": "softmax", "routed_scaling_factor": 16.0},
        {
            **GROUPED,
            **{"scoring_func": "sigmoid", "routed_scaling_factor": 2.5},
            "e_score_correction_bias": torch.linspace(-1, 1, EXPERTS),
        },
    ],
    ids=["renormalised", "not renormalised", "groups", "sigmoid, groups and a bias"],
)
def test_the_experts_of_the_router_weigh_as_the_router_weighs_them(fields: dict[str, Any]) -> None:
    made, read = router(**fields), logits()
    weights, ids = made.select_experts(read, read)
    with compat_worker.with_experts(made, ids.long()):
        ours, same = made.select_experts(read, read)
    assert torch.equal(same, ids)
    assert (ours.dtype, same.dtype) == (weights.dtype, ids.dtype)
    torch.testing.assert_close(ours, weights, rtol=1e-6, atol=1e-7)
    # Afterwards it chooses by itself again.
    again, free = made.select_experts(read, read)
    assert torch.equal(free, ids)
    assert torch.equal(again, weights)


def test_other_experts_are_taken_from_the_block() -> None:
    made, read = router(), logits()
    foreign = torch.tensor([9, 2, 13, 4]).expand(len(read), -1)
    with compat_worker.with_experts(made, foreign):
        weights, ids = made.select_experts(read, read)
    assert torch.equal(ids, foreign.int())
    torch.testing.assert_close(weights, read.gather(1, foreign).softmax(dim=1))


def test_what_may_be_chosen() -> None:
    assert compat_worker.expert_layer(router()) == ExpertLayer(EXPERTS, CHOSEN)
    assert compat_worker.expert_layer(router(**GROUPED)) == ExpertLayer(EXPERTS, CHOSEN, 4, 2)


class Runner(nn.Module):
    def __init__(self, made: object, is_monolithic: bool = False) -> None:
        super().__init__()
        self.router, self.is_monolithic = made, is_monolithic
        self.experts = nn.Parameter(torch.zeros(EXPERTS, 2, 2))


def model(*modules: nn.Module) -> nn.Module:
    found = nn.Module()
    found.layers = nn.ModuleList([nn.Sequential(nn.Linear(2, 2)), *map(nn.Sequential, modules)])
    return found


def test_routers_are_found_in_their_layers() -> None:
    first, second = router(), router()
    found = list(compat_worker.routers(model(Runner(first), Runner(second))))
    assert found == [(1, first), (2, second)]
    assert list(compat_worker.routers(model())) == []


@pytest.mark.parametrize(
    ("module", "reason"),
    [
        (Runner(router(), is_monolithic=True), "CPURouter of layer 1 chooses inside a kernel"),
        (Runner(router(custom_routing_function=print)), "layer 1 weighs experts in its own way"),
        (Runner(router(scoring_func="sqrtsoftplus")), "layer 1 weighs experts in its own way"),
        (
            Runner(SimpleNamespace(select_experts=print)),
            "SimpleNamespace of layer 1 weighs experts",
        ),
        (nn.ParameterList([nn.Parameter(torch.zeros(8, 2, 2))]), "layer 1 has experts without"),
    ],
    ids=["kernel", "function", "score", "router", "no router"],
)
def test_experts_that_the_block_cannot_choose_are_refused(module: nn.Module, reason: str) -> None:
    with pytest.raises(UnsupportedEngine, match=f"{reason}.*Ask for sketch-v1"):
        list(compat_worker.routers(model(module)))


def test_a_start_can_tell_whether_the_block_can_choose() -> None:
    def obstacle(made: nn.Module) -> str | None:
        return compat_worker.obstacle_to_seeded_experts(SimpleNamespace(get_model=lambda: made))

    assert obstacle(model(Runner(router()))) is None
    assert obstacle(model()) is None
    fused = obstacle(model(Runner(router(), is_monolithic=True)))
    assert fused is not None
    assert "chooses inside a kernel" in fused
    more_than_there_are = CPURouter(top_k=EXPERTS + 1, global_num_experts=EXPERTS)
    assert "cannot choose experts of" in str(obstacle(model(Runner(more_than_there_are))))


def test_the_runner_asks_its_router_unless_it_is_monolithic() -> None:
    assert isinstance(inspect.getattr_static(MoERunner, "is_monolithic"), property)
    assert "self.router.select_experts(" in source(MoERunner._apply_quant_method)
    assert "self._compute_routing(" in source(BaseRouter._select_experts)
    for each in (CPURouter, FusedTopKRouter, FusedTopKBiasRouter, GroupedTopKRouter):
        assert each.__name__ in compat_worker.ROUTERS
        begun = source(each.__init__)
        assert "self.scoring_func = scoring_func" in begun
        assert "self.renormalize = renormalize" in begun
