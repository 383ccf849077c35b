"""The short form of ``python -m benchmarks.fleet scale``: it counts right; times are not judged."""

import asyncio
from pathlib import Path

import pytest

from benchmarks.fleet.deployment import FleetFailed, deployed
from benchmarks.fleet.scale import measure
from benchmarks.fleet.scale_report import Samples, summarised

MEMBERS = 20


def test_every_member_gets_a_lane_of_its_own(tmp_path: Path) -> None:
    with deployed(tmp_path, MEMBERS, 0.5, str(tmp_path / "fleet.sqlite")) as fleet:
        report = asyncio.run(measure(fleet, 0.07, 2))
    assert report.distinct_lanes == (MEMBERS, MEMBERS)
    assert report.fan_out_s.count == 2 * MEMBERS
    assert report.stored > 0
    assert set(report.reads_s) == {"status", "snapshot", "dashboard"}
    assert report.pass_s is not None
    assert report.pass_s.longest > 0.0
    assert f"{MEMBERS} members" in report.text()


@pytest.mark.slow
def test_a_controller_that_does_not_start_is_named(tmp_path: Path) -> None:
    with (
        pytest.raises(FleetFailed, match="the fleet is not ready"),
        deployed(tmp_path, 1, 0.5, "mysql://somewhere/else"),
    ):
        pass


def test_growth_compares_the_last_third_with_the_first() -> None:
    samples = Samples(fan_out_s=[1.0], start_call_s=[1.0])
    samples.usage = [(float(n), n / 2, mb) for n, mb in enumerate((100, 100, 300, 300, 150, 150))]
    report = summarised(samples, 1, 0)
    assert report.memory_growth == 1.5
    assert report.cpu_share == 0.5
