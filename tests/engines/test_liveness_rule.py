"""The rule as a table: which cores count as stalled, and after how long."""

from collections.abc import Sequence

import pytest

from proofserve.engines.liveness.memory import CoreRecord, Doing
from proofserve.engines.liveness.watch import (
    BUSY_TIMES,
    FRESH_S,
    LONGEST_LOOK_S,
    Activity,
    Wait,
    after_look,
    has_work,
    is_asked,
)

NOW = 1000.0
FRESH, STALE = NOW - 1.0, NOW - FRESH_S
LIMIT_S = 60.0
LOOK_S = 0.5


def core(beat: float, doing: Doing = Doing.NOTHING, work: int = 0, known: int = 0) -> CoreRecord:
    return CoreRecord(beat, 7, doing, work, known)


@pytest.mark.parametrize(
    ("record", "asked", "was_asked", "expected"),
    [
        pytest.param(core(FRESH), False, False, False, id="idle"),
        pytest.param(core(FRESH), False, True, False, id="idle again after a wait"),
        pytest.param(core(FRESH, work=1), False, False, True, id="has requests"),
        pytest.param(core(FRESH, Doing.CHAT), False, False, True, id="in a step"),
        pytest.param(core(FRESH, Doing.PROOF), False, False, True, id="in a proof forward"),
        pytest.param(core(FRESH, known=2), True, False, False, id="paused"),
        pytest.param(core(FRESH), True, False, True, id="a request was lost on the way"),
        pytest.param(core(STALE), False, False, False, id="stopped while idle"),
        pytest.param(core(STALE, work=1), False, False, False, id="stopped after its work ended"),
        pytest.param(core(STALE), True, False, True, id="stopped while idle, then asked"),
        pytest.param(core(STALE, known=1), True, False, True, id="stopped, and asked"),
        pytest.param(core(STALE, Doing.CHAT), False, False, True, id="stopped in a step"),
        pytest.param(core(STALE, work=1), False, True, True, id="stopped, its clients gone"),
    ],
)
def test_which_cores_have_work(
    record: CoreRecord, asked: bool, was_asked: bool, expected: bool
) -> None:
    assert has_work(record, asked, NOW, Wait(7, True, was_asked)) is expected


@pytest.mark.parametrize(
    ("servers", "expected"),
    [([], False), ([(FRESH, 0)], False), ([(FRESH, 0), (FRESH, 2)], True), ([(STALE, 2)], False)],
    ids=["none", "nothing", "another API process", "one that is gone"],
)
def test_who_waits_for_an_answer(servers: Sequence[tuple[float, float]], expected: bool) -> None:
    assert is_asked(servers, NOW) is expected


def stalls_after(
    activity: Sequence[Activity], steps_every_s: float | None = None, work: bool = True
) -> float | None:
    """Seconds until a core counts as stalled, None if it does not within 20 limits.

    ``activity`` repeats, look by look.
    """
    wait = Wait()
    for look in range(int(20 * LIMIT_S / LOOK_S)):
        seconds = look * LOOK_S
        steps = 0 if steps_every_s is None else seconds // steps_every_s
        found = Wait(steps, work, work, activity=activity[look % len(activity)])
        wait = after_look(wait, found, LOOK_S)
        if wait.is_stalled(LIMIT_S):
            return seconds
    return None


@pytest.mark.parametrize(
    ("activity", "steps_every_s", "expected"),
    [
        pytest.param([Activity.STOPPED], None, LIMIT_S, id="stopped"),
        pytest.param([Activity.QUIET], None, LIMIT_S, id="waits for a lock"),
        pytest.param([Activity.GONE], None, LIMIT_S, id="gone"),
        pytest.param([Activity.UNKNOWN], None, None, id="not looked at"),
        pytest.param([Activity.WORKING], None, BUSY_TIMES * LIMIT_S, id="spins"),
        pytest.param([Activity.WORKING], 599.0, None, id="steps of ten minutes"),
        pytest.param([Activity.QUIET], 59.0, None, id="a slow step that waits for its device"),
        pytest.param([Activity.QUIET], 61.0, LIMIT_S, id="a slower one"),
        pytest.param(
            [*[Activity.QUIET] * 100, Activity.WORKING],
            None,
            BUSY_TIMES * LIMIT_S,
            id="a long step that works now and then",
        ),
    ],
)
def test_when_a_core_with_work_counts_as_stalled(
    activity: Sequence[Activity], steps_every_s: float | None, expected: float | None
) -> None:
    assert stalls_after(activity, steps_every_s) == expected


@pytest.mark.parametrize("activity", Activity)
def test_a_core_without_work_never_stalls(activity: Activity) -> None:
    assert stalls_after([activity], work=False) is None


def found(steps: int = 7, asked: bool = True, activity: Activity = Activity.UNKNOWN) -> Wait:
    return Wait(steps, True, asked, activity=activity)


def test_a_step_ends_the_wait() -> None:
    waiting = Wait(7, True, True, 500.0, 500.0, Activity.STOPPED)
    assert waiting.is_stalled(LIMIT_S)
    assert after_look(waiting, found(8, asked=False), LOOK_S) == Wait(8, True, False)


def test_a_wait_remembers_that_it_was_asked() -> None:
    waiting = after_look(Wait(7, True, True), found(asked=False), LOOK_S)
    assert (waiting.asked, waiting.waited_s) == (True, LOOK_S)


def test_the_time_in_which_the_watch_itself_was_stopped_does_not_count() -> None:
    """A container that was frozen for an hour, with this process and the core in it."""
    waiting = Wait(7, True, True, 1.0, 1.0)
    thawed = after_look(waiting, found(activity=Activity.QUIET), 3600.0)
    assert thawed.waited_s == 1.0 + LONGEST_LOOK_S
    assert not thawed.is_stalled(LIMIT_S)


def test_a_wait_begins_with_its_work() -> None:
    assert after_look(Wait(7), found(), LOOK_S) == Wait(7, True, True)
