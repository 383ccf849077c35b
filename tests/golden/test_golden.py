"""Every golden case of every file in GOLDEN_DIR, replayed through the public functions."""

from collections.abc import Callable

import pytest

from . import replay_artifact, replay_common, replay_distance, replay_forward, replay_native
from .cases import GOLDEN_DIR, Case, load

REPLAYS = (
    replay_common.REPLAYS
    | replay_distance.REPLAYS
    | replay_artifact.REPLAYS
    | replay_forward.REPLAYS
    | replay_native.REPLAYS
)
CASES = load(GOLDEN_DIR)


def test_there_are_cases() -> None:
    assert CASES, f"no golden cases in {GOLDEN_DIR}"


@pytest.mark.parametrize("case", CASES, ids=str)
def test_replay(case: Case, record_property: Callable[[str, object], None]) -> None:
    record_property("golden_file", case.file)
    if case.file not in REPLAYS:
        known = ", ".join(sorted(REPLAYS))
        pytest.fail(f"no replay is known for {case.file}; there are replays for: {known}")
    REPLAYS[case.file](case)
