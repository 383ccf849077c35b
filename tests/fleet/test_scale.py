"""The short form of ``python -m benchmarks.fleet scale``: it counts right; times are not judged."""

import asyncio
from pathlib import Path

import pytest

from benchmarks.fleet.deployment import deployed
from benchmarks.fleet.scale import Samples, measure, summarised
from measuring.processes import ProcessFailed

MEMBERS = 20


def test_every_member_gets_a_lane_of_its_own(tmp_path: Path) -> None:
    with deployed(tmp_path, MEMBERS, 0.5, str(tmp_path / "fleet.sqlite")) as fleet:
        report = asyncio.run(measure(fleet, 0.07, 2))
    figures = {each.name: each.value for each in report.figures}
    assert report.windows["distinct_lanes"] == [MEMBERS, MEMBERS]
    assert figures["distinct_lanes"] == MEMBERS
    assert len(report.windows["fan_out"]) == 2 * MEMBERS
    assert (figures["stored"] or 0) > 0
    times = ("fan_out", "start_call", "stop_call", "status", "snapshot", "dashboard", "pass")
    for each in times:
        assert {f"{each}_ms", f"{each}_ms_p95", f"{each}_ms_longest"} <= set(figures)
    assert (figures["pass_ms_longest"] or 0.0) > 0.0


@pytest.mark.slow
def test_a_controller_that_does_not_start_is_named(tmp_path: Path) -> None:
    with (
        pytest.raises(ProcessFailed, match="the fleet is not ready"),
        deployed(tmp_path, 1, 0.5, "mysql://somewhere/else"),
    ):
        pass


def test_growth_compares_the_last_third_with_the_first() -> None:
    samples = Samples()
    samples.usage = [(float(n), n / 2, mb) for n, mb in enumerate((100, 100, 300, 300, 150, 150))]
    figures = {each.name: each.value for each in summarised(samples, 1, 0).figures}
    assert figures["memory_growth"] == 1.5
    assert figures["cpu_share"] == 0.5
