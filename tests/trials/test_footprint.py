"""What counts as growth and as a leak."""

from dataclasses import replace

import pytest

from endurance.soak import Footprint

AT_FIRST = Footprint(
    resident={"api": 700.0, "engine": 600.0},
    descriptors={"api": 34, "engine": 50},
    threads={"api": 14, "engine": 17},
    held={"proofserve_tasks": 12.0, "KV blocks": -2729.0},
)


def test_the_same_again_is_no_leak() -> None:
    assert AT_FIRST.leaks(AT_FIRST) == {}
    assert AT_FIRST.growth(AT_FIRST) == 0.0


def test_less_is_no_leak_either() -> None:
    later = replace(
        AT_FIRST, descriptors={"api": 30, "engine": 50}, threads={"api": 1, "engine": 1}
    )
    assert later.leaks(AT_FIRST) == {}


@pytest.mark.parametrize(
    ("changes", "leak"),
    [
        ({"descriptors": {"api": 36, "engine": 50}}, {"api descriptors": 2}),
        ({"threads": {"api": 14, "engine": 18}}, {"engine threads": 1}),
        ({"held": {"proofserve_tasks": 13.0, "KV blocks": -2729.0}}, {"proofserve_tasks": 1.0}),
        ({"held": {"proofserve_tasks": 12.0, "KV blocks": -2721.0}}, {"KV blocks": 8.0}),
    ],
)
def test_more_of_anything_is_a_leak(changes: dict[str, object], leak: dict[str, float]) -> None:
    assert replace(AT_FIRST, **changes).leaks(AT_FIRST) == leak


def test_growth_is_that_of_the_worst_process() -> None:
    later = replace(AT_FIRST, resident={"api": 630.0, "engine": 660.0})
    assert later.growth(AT_FIRST) == pytest.approx(0.1)
