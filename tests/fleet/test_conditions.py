"""Which members are fit: a table of what a look found, and of the state that follows."""

from dataclasses import asdict
from typing import Any

import pytest

from fleet.records import (
    DEPLOYED,
    DIGEST,
    GENERATING,
    NOW,
    OTHER_DIGEST,
    body,
    condition_of,
    conditions_of,
    lane,
    member,
    proving,
    seen,
)
from proofserve.api.node import Deployment
from proofserve.fleet.client import look_of
from proofserve.fleet.members import Rules
from proofserve.fleet.records import MemberLook, MemberState, Wish
from proofserve.fleet.watch import fleet_deployment
from proofserve.rounds.state import State
from proofserve.rounds.status import EngineGauges, over_cores
from support.fake_engine import TOY_ENGINE_INFO


def other(**changes: Any) -> dict[str, Any]:
    return body(deployment={**DEPLOYED, **changes})


STALLED = [{"core": 0, "steps": 4, "waited_s": 75.0, "stalled": True, "reason": None}]
SILENT = {"answered": False, "error": "no answer within 2 s"}


@pytest.mark.parametrize(
    ("last", "state", "reason"),
    [
        (None, "joining", "not looked at"),
        (MemberLook(NOW, answered=False, error="refused"), "joining", "refused"),
        (seen(), "ready", ""),
        (seen(**SILENT), "ready", ""),
        (seen(at=NOW - 60, **SILENT), "lost", "no answer for 60 s"),
        (seen(body(liveness=STALLED)), "lost", "not stepped for 75 s"),
        (seen(body(engine_error="the engine is gone")), "lost", "the engine is gone"),
        (seen(clock_offset_s=61.0), "refused", "clock is +61 s"),
        (seen(clock_offset_s=-61.0), "refused", "clock is -61 s"),
        (seen(clock_offset_s=None), "refused", "no Date header"),
        (seen(body(deployment=None)), "refused", "update it"),
        (MemberLook(NOW, answered=True, error="its proofs are off"), "refused", "proofs are off"),
        (seen(body(State.GENERATING, round_id="x")), "refused", "not of this fleet"),
    ],
)
def test_the_state_of_a_member(last: MemberLook | None, state: str, reason: str) -> None:
    found = condition_of(member(last))
    assert found.state == state
    assert reason in (found.reason or "")


@pytest.mark.parametrize(
    ("answer", "problem"),
    [
        ({}, "status"),
        (body() | {"status": "FLYING"}, "status"),
        (body(stats={}), "stats.total_processed"),
        (body(liveness=[{"core": 0, "waited_s": -1.0}]), "liveness.0.waited_s"),
        (body(liveness=[{"core": 0, "waited_s": float("nan")}]), "liveness.0.waited_s"),
        (body(deployment={**DEPLOYED, "token_ids": 2**63}), "deployment.token_ids"),
        (body(error="half a pair: \ud800"), "error"),
        (body(deployment={**DEPLOYED, "models": "toy"}), "deployment.models"),
        (body(error="x" * 3000), "error"),
    ],
)
def test_nonsense_names_its_field(answer: dict[str, Any], problem: str) -> None:
    found = condition_of(member(look_of(answer, 0.0, NOW)))
    assert found.state is MemberState.REFUSED
    assert f"nonsense to GET /status: {problem}" in (found.reason or "")


@pytest.mark.parametrize(
    ("odd", "reason"),
    [
        (other(weights_digest=OTHER_DIGEST), f"its weights: {OTHER_DIGEST}"),
        (other(weights_digest=None), "its weights: the model toy"),
        (other(scheme="sketch-v1"), "its fixed scheme: sketch-v1"),
        (other(seq_len=64), "its fixed seq_len: 64"),
        (other(k_dim=24), "its fixed k_dim: 24"),
    ],
)
def test_the_member_that_differs_from_most_is_refused(odd: dict[str, Any], reason: str) -> None:
    made = [member(seen(odd), "odd", added_at=0.0), member(seen(), "a"), member(seen(), "b")]
    found = conditions_of(made)
    assert [each.state for each in found] == ["refused", "ready", "ready"]
    assert reason in (found[0].reason or "")


def test_of_two_kinds_the_older_members_stays() -> None:
    made = [member(seen(other(k_dim=24)), "new", added_at=2.0), member(seen(), "old")]
    assert [e.state for e in conditions_of(made)] == ["refused", "ready"]


def test_a_running_round_is_not_changed_by_many_that_join() -> None:
    odd = [member(seen(other(weights_digest=OTHER_DIGEST)), f"n{n}") for n in range(3)]
    found = conditions_of([*odd, member(seen(proving()))], GENERATING, [lane()])
    assert [each.state for each in found] == ["refused"] * 3 + ["ready"]


def test_the_wanted_digest_is_stronger_than_the_majority() -> None:
    made = [member(seen(), f"n{n}") for n in range(3)]
    made.append(member(seen(other(weights_digest=OTHER_DIGEST)), "right"))
    found = conditions_of(made, rules=Rules(weights_digest=OTHER_DIGEST))
    assert [each.state for each in found] == ["refused"] * 3 + ["ready"]
    assert DIGEST in (found[0].reason or "")


@pytest.mark.parametrize(
    ("wish", "state"), [(Wish.CORDONED, "cordoned"), (Wish.DRAINING, "draining")]
)
def test_an_operators_wish_counts_for_a_member_that_is_fit(wish: Wish, state: str) -> None:
    fit = condition_of(member(seen(), wish=wish, wish_reason="why"))
    lost = condition_of(member(seen(at=NOW - 60, **SILENT), wish=wish, wish_reason="why"))
    assert (fit.state, fit.reason) == (state, "why")
    assert lost.state is MemberState.LOST


def test_the_fleet_serves_what_all_its_members_can(limits: Deployment) -> None:
    small = other(models=["other", "toy"], max_seq_len=128, token_ids=1)
    refused = seen(clock_offset_s=500.0)
    made = [member(seen(), "a"), member(seen(small), "b"), member(refused, "c")]
    found = conditions_of(made)
    served = fleet_deployment(found, limits, "1.2.3")
    assert served is not None
    info = served.engine_info
    assert (info.model_names, info.max_seq_len, info.facts.tokens) == (("toy",), 128, None)
    assert info.facts.weights_digest == DIGEST
    assert info.versions["proofserve"] == "1.2.3"
    assert fleet_deployment(found[2:], limits, "1") is None


@pytest.fixture
def limits() -> Deployment:
    return Deployment(TOY_ENGINE_INFO, enabled=True, max_nonces=7)


def test_the_figures_of_engines_with_other_bins_add_up() -> None:
    """Members may have other versions of proofserve, with other bins of a forward's length."""
    gauges = EngineGauges(3, 0.0, 0.0, 0.5, 0.0, 0.0, (1.0,), 0, 0, 0)
    several = [
        seen(body(engine={**asdict(gauges), "forward_counts": [1] * bins})) for bins in (2, 5)
    ]
    total = over_cores([each.status.engine for each in several if each.status])
    assert (total.forwards, total.last_forward_s, total.forward_counts) == (6, 0.5, ())
