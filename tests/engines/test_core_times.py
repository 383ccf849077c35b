"""The times that the engine core measures of its forwards."""

import pytest

from proofserve.engines.vllm.core_times import CoreTimes
from proofserve.rounds.status import FORWARD_BOUNDS_S


def test_a_forward_falls_into_the_bin_of_its_length() -> None:
    now = 100.0
    times = CoreTimes(lambda: now, lambda *_: None)
    for seconds in (0.004, 0.3, 0.3, 11.0):
        with times.forward(list):
            now += seconds
    read = times.read()
    expected = [0] * (len(FORWARD_BOUNDS_S) + 1)
    expected[0], expected[FORWARD_BOUNDS_S.index(0.5)], expected[-1] = 1, 2, 1
    assert read["forward_counts"] == expected
    assert sum(expected) == read["forwards"]
    assert read["busy_s"] == pytest.approx(11.604)
