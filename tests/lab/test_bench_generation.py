import math
from dataclasses import replace

import pytest

from proofserve.remote.node_client import NodeClient
from proofserve.remote.records import DistanceWork, Work
from proofserve.reports import Progress, Report, ReportedError
from proofserve_lab.bench import generation as result_rate
from proofserve_lab.bench.generation import (
    GenerationPlan,
    GenerationReadings,
    bench_generation,
    report,
)
from proofserve_lab.nodes import BareSpeed
from proofserve_lab.orders import work_of_scheme
from support.stub_node import Habits, stub_node

PLAN = GenerationPlan(Work("stub", seq_len=100), seconds=1.0, windows=2, busy=0.9)


def value(found: Report, name: str) -> float:
    (figure,) = [figure for figure in found.figures if figure.name == name]
    assert figure.value is not None
    return figure.value


def readings(in_forwards: float = 0.97, **windows: list[float]) -> GenerationReadings:
    made = GenerationReadings(
        round=windows["round"],
        in_forwards=[in_forwards],
        prefill=windows["prefill"],
        beside_prefill=windows["round"],
    )
    for rate in windows["bare"]:
        made.add_bare(BareSpeed(rate, 8 / rate, 8))
    return made


def test_the_figures_are_ratios_of_windows_side_by_side() -> None:
    found = report(
        PLAN, readings(bare=[110, 90, 70], round=[98, 76], prefill=[10_000, 6_000]), {"cores": 2}
    )
    assert value(found, "busy_ratio") == pytest.approx((98 / 100 + 76 / 80) / 2)
    assert value(found, "vs_prefill") == pytest.approx((9800 / 10_000 + 7600 / 6_000) / 2)
    assert value(found, "nonces_per_second") == pytest.approx(87)
    assert value(found, "seconds_per_forward") == pytest.approx(8 / 90)
    assert value(found, "busy_ratio_spread") == pytest.approx(0.03)
    assert found.passed


def test_both_prompts_of_a_nonce_count_against_prefill() -> None:
    plan = GenerationPlan(
        work_of_scheme("sketch-v1", "stub", 100), seconds=1.0, windows=2, busy=0.9
    )
    measured = readings(bare=[50, 50], round=[49], prefill=[10_000])
    assert value(report(plan, measured, {}), "vs_prefill") == pytest.approx(0.98)


def test_a_slow_round_fails_its_limit() -> None:
    found = report(PLAN, readings(bare=[100, 100], round=[94], prefill=[8_000]), {})
    assert not found.passed
    assert found.json()["failed"] == ["busy_ratio"]


def test_a_round_that_leaves_the_engine_idle_fails_its_limit() -> None:
    measured = readings(in_forwards=0.89, bare=[100, 100], round=[99], prefill=[8_000])
    assert report(PLAN, measured, {}).json()["failed"] == ["time_in_forwards"]


@pytest.fixture
def frequent_polls(monkeypatch: pytest.MonkeyPatch) -> None:
    """The stub stores a batch each 0.1 s; a real node's batches take longer than a poll."""
    monkeypatch.setattr(result_rate, "POLL_S", 0.01)


@pytest.mark.parametrize("share", [1.0, 0.5])
@pytest.mark.usefixtures("frequent_polls")
def test_a_round_at_a_share_of_the_bare_speed_is_measured_as_that(share: float) -> None:
    # A stub that waits between batches is never faster than it says, on a busy machine slower.
    plan = replace(PLAN, seconds=3.0)
    habits = Habits(bare=100.0, round=100.0 * share, chat_tokens=2_500.0)
    with stub_node(habits) as (stub, url), NodeClient(url) as node:
        found = bench_generation(node, plan, Progress())
        # One look at the speed, then a window before, between and after the rounds.
        assert len(stub.measured) == 1 + 3
        assert [order["forwards"] for order in stub.measured] == [2, 19, 19, 19]
    assert 0.5 * share < value(found, "busy_ratio") < 1.4 * share
    # Nineteen prefills at a time, each at the stub's speed: one alone would have 2,500.
    assert 3_000 < value(found, "prefill_tokens_per_second") < 19 * 2_600
    assert all(math.isfinite(figure.value or 0.0) for figure in found.figures)


@pytest.mark.usefixtures("frequent_polls")
def test_of_the_distance_protocol_every_nonce_is_stored_and_counted() -> None:
    plan = GenerationPlan(DistanceWork("stub", seq_len=100), seconds=3.0, windows=3, busy=0.9)
    habits = Habits(bare=100.0, round=100.0, chat_tokens=2_500.0)
    with stub_node(habits) as (stub, url), NodeClient(url) as node:
        found = bench_generation(node, plan, Progress())
    for number in range(1, stub.rounds + 1):
        nonces = [row["nonce"] for row in stub.rows if row["round_id"] == str(number)]
        assert nonces == list(range(len(nonces)))
    assert stub.rounds == 3
    assert all("dist" in row for row in stub.rows)
    assert {order["seq_len"] for order in stub.measured} == {100}
    assert 0.5 < value(found, "busy_ratio") < 1.4
    assert found.title == "generation, distance protocol"
    assert found.json()["setup"]["r_target"] == 2.0


def test_a_failing_nonce_is_no_work_done() -> None:
    with (
        stub_node(Habits(failing_nonce=3)) as (_, url),
        NodeClient(url) as node,
        pytest.raises(ReportedError, match=r"nonce 3 .*not finite"),
    ):
        bench_generation(node, PLAN, Progress())
