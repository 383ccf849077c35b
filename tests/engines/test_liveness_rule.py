"""The rule as a table: which cores count as stalled, and after how long."""

from collections.abc import Sequence

import pytest

from proofserve.engines.vllm.liveness.memory import CoreRecord, Doing, ServerRecord
from proofserve.engines.vllm.liveness.rule import (
    BUSY_TIMES,
    FRESH_S,
    LONGEST_LOOK_S,
    Evidence,
    Wait,
    after_look,
    has_work,
)

NOW = 1000.0
FRESH, STALE = NOW - 1.0, NOW - FRESH_S
LIMIT_S = 60.0
LOOK_S = 0.5


def core(beat: float, doing: Doing = Doing.NOTHING, work: int = 0, known: int = 0) -> CoreRecord:
    return CoreRecord(beat, 7, doing, work, known)


def servers(*unfinished: int, written: float = FRESH) -> list[ServerRecord]:
    return [ServerRecord(written, count) for count in unfinished]


@pytest.mark.parametrize(
    ("record", "asked", "waits", "expected"),
    [
        pytest.param(core(FRESH), [], False, False, id="idle"),
        pytest.param(core(FRESH), servers(0, 0), True, False, id="idle again after a wait"),
        pytest.param(core(FRESH, work=1), [], False, True, id="has requests"),
        pytest.param(core(FRESH, Doing.CHAT), [], False, True, id="in a step"),
        pytest.param(core(FRESH, Doing.PROOF), [], False, True, id="in a proof forward"),
        pytest.param(core(FRESH, known=2), servers(2), False, False, id="paused"),
        pytest.param(core(FRESH), servers(1), False, True, id="a request was lost on the way"),
        pytest.param(core(FRESH), servers(0, 1), False, True, id="of another API process"),
        pytest.param(core(FRESH), servers(1, written=STALE), False, False, id="that is gone"),
        pytest.param(core(STALE), servers(0), False, False, id="stopped while idle"),
        pytest.param(core(STALE), servers(1), False, True, id="stopped while idle, then asked"),
        pytest.param(core(STALE, known=1), servers(1), False, True, id="stopped, and asked"),
        pytest.param(core(STALE, work=1), servers(0), False, True, id="stopped, its clients gone"),
        pytest.param(core(STALE), servers(0), True, True, id="the client that asked has gone"),
    ],
)
def test_which_cores_have_work(
    record: CoreRecord, asked: Sequence[ServerRecord], waits: bool, expected: bool
) -> None:
    assert has_work(record, asked, NOW, waits) is expected


def stalls_after(
    evidence: Sequence[Evidence], steps_every_s: float | None = None, work: bool = True
) -> float | None:
    """Seconds until a core counts as stalled, None if it does not within 20 limits.

    ``evidence`` repeats, look by look.
    """
    wait = Wait()
    for look in range(int(20 * LIMIT_S / LOOK_S)):
        seconds = look * LOOK_S
        steps = 0 if steps_every_s is None else seconds // steps_every_s
        wait = after_look(wait, work, steps, evidence[look % len(evidence)], LOOK_S)
        if wait.is_stalled(LIMIT_S):
            return seconds
    return None


@pytest.mark.parametrize(
    ("evidence", "steps_every_s", "expected"),
    [
        pytest.param([Evidence.STOPPED], None, LIMIT_S, id="stopped"),
        pytest.param([Evidence.QUIET], None, LIMIT_S, id="waits for a lock"),
        pytest.param([Evidence.GONE], None, LIMIT_S, id="gone"),
        pytest.param([Evidence.WORKING], None, BUSY_TIMES * LIMIT_S, id="spins"),
        pytest.param([Evidence.WORKING], 599.0, None, id="steps of ten minutes"),
        pytest.param([Evidence.QUIET], 59.0, None, id="a slow step that waits for its device"),
        pytest.param([Evidence.QUIET], 61.0, LIMIT_S, id="a slower one"),
        pytest.param(
            [*[Evidence.QUIET] * 100, Evidence.WORKING],
            None,
            BUSY_TIMES * LIMIT_S,
            id="a long step that works now and then",
        ),
    ],
)
def test_when_a_core_with_work_counts_as_stalled(
    evidence: Sequence[Evidence], steps_every_s: float | None, expected: float | None
) -> None:
    assert stalls_after(evidence, steps_every_s) == expected


@pytest.mark.parametrize("evidence", Evidence)
def test_a_core_without_work_never_stalls(evidence: Evidence) -> None:
    assert stalls_after([evidence], work=False) is None


def test_a_step_ends_the_wait() -> None:
    waiting = Wait(7, True, 500.0, 500.0, Evidence.STOPPED)
    assert waiting.is_stalled(LIMIT_S)
    assert after_look(waiting, True, 8, Evidence.UNKNOWN, LOOK_S) == Wait(8, True)


def test_the_time_in_which_nobody_looked_does_not_count() -> None:
    """A container that was frozen for an hour, with this process and the core in it."""
    waiting = Wait(7, True, 1.0, 1.0)
    thawed = after_look(waiting, True, 7, Evidence.QUIET, 3600.0)
    assert thawed.waited_s == 1.0 + LONGEST_LOOK_S
    assert not thawed.is_stalled(LIMIT_S)


def test_a_wait_begins_with_its_work() -> None:
    assert after_look(Wait(7), True, 7, Evidence.UNKNOWN, LOOK_S) == Wait(7, True)
