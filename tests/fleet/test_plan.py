"""What is done with a member: a table of what it does, what is wished, and what follows."""

from dataclasses import dataclass, field
from typing import Any

import pytest

from fleet.records import (
    DISTANCE,
    GENERATING,
    NOW,
    STOPPED,
    body,
    condition_of,
    lane,
    member,
    proving,
    seen,
)
from proofserve.fleet.members import START_LOST_S, MemberCall, MemberChange, plan
from proofserve.fleet.records import DesiredState, Lane, Wish
from proofserve.rounds.state import State

END, ADOPT = "end", "adopt"
START, CONTINUE, STOP = MemberCall.START, MemberCall.CONTINUE, MemberCall.STOP
OLD = lane(3, "before")
UNKNOWN = lane(member_round_id=None, given_at=NOW - 1)
ENDED = lane(0, ended_at=NOW - 100, end_reason="gone")
CONTINUING = DesiredState(State.GENERATING, DISTANCE)
VALIDATING = DesiredState(State.VALIDATING, DISTANCE)


@dataclass(frozen=True)
class Case:
    """``does`` is the member's answer, None for none; ``then`` the kinds of actions, in order."""

    about: str
    does: dict[str, Any] | None
    then: tuple[str, ...]
    desired: DesiredState = GENERATING
    lanes: tuple[Lane, ...] = ()
    wish: Wish = Wish.ACTIVE
    why: str = ""
    more: dict[str, Any] = field(default_factory=dict)


CASES = (
    Case("an idle member gets a lane", body(), (START,)),
    Case("no lane without a round", body(), (), DesiredState()),
    Case("no lane once the round is stopped", body(), (), STOPPED),
    Case("a member that proves its lane is left alone", proving(), (), lanes=(lane(),)),
    Case("a silent member keeps its lane", None, (), lanes=(lane(),)),
    Case("a stopped round stops it", proving(), (STOP,), STOPPED, (lane(),), why="stopped"),
    Case("judging stops it", proving(), (STOP,), VALIDATING, (lane(),)),
    Case("a stopped member of a stopped round", proving(0, State.STOPPED), (), STOPPED, (lane(),)),
    Case("a member restarted without its round", body(), (END,), lanes=(lane(),), why="restarted"),
    Case("... then waits a moment", body(), (), lanes=(lane(ended_at=NOW - 1),)),
    Case("... and gets another lane", body(), (START,), lanes=(lane(ended_at=NOW - 3),)),
    Case(
        "each lost lane doubles the pause",
        body(),
        (),
        lanes=tuple(lane(n, ended_at=NOW - 15) for n in range(4)),
    ),
    Case(
        "a fault ended its round",
        proving(0, State.STOPPED, error="three faults"),
        (END,),
        lanes=(lane(),),
        why="three faults",
    ),
    Case(
        "a distance round goes on in its lane",
        proving(0, State.STOPPED),
        (CONTINUE,),
        CONTINUING,
        (lane(),),
    ),
    Case(
        "but not after a fault",
        proving(0, State.STOPPED, error="three faults"),
        (END,),
        CONTINUING,
        (lane(),),
    ),
    Case(
        "a lost answer of a start: the member proves the lane",
        proving(),
        (ADOPT,),
        lanes=(UNKNOWN,),
    ),
    Case("a stop before a look has seen the start", proving(), (ADOPT, STOP), STOPPED, (UNKNOWN,)),
    Case("a lost answer: it may still begin", body(), (), lanes=(UNKNOWN,)),
    Case(
        "a lost answer: what it ended before is another round of the same block",
        proving(0, State.STOPPED),
        (),
        lanes=(UNKNOWN,),
    ),
    Case(
        "a lost answer: it never began",
        body(),
        (END,),
        lanes=(lane(member_round_id=None, given_at=NOW - START_LOST_S - 1),),
        why="not seen",
    ),
    Case(
        "it begins a lane that was given up",
        proving(),
        (STOP,),
        lanes=(lane(member_round_id=None, ended_at=NOW - 1),),
        why="was ended",
    ),
    Case(
        "it comes back with the old round",
        body(State.GENERATING, round_id="theirs-3"),
        (STOP,),
        lanes=(OLD,),
        why="earlier round",
    ),
    Case(
        "it comes back with the old round, and has a new lane",
        body(State.GENERATING, round_id="theirs-3"),
        (STOP,),
        lanes=(OLD, lane()),
    ),
    Case(
        "it proves an older round whose start was never answered",
        body(State.GENERATING, round_id="unknown"),
        (STOP,),
        lanes=(lane(3, "before", member_round_id=None),),
        why="earlier round",
    ),
    Case("the old round has ended there", body(), (END, START), lanes=(OLD,)),
    Case("a foreign round is never stopped", body(State.GENERATING, round_id="x"), ()),
    Case("a cordoned member gets no lane", body(), (), wish=Wish.CORDONED),
    Case("a cordoned member keeps its lane", proving(), (), lanes=(lane(),), wish=Wish.CORDONED),
    Case(
        "a draining member is stopped",
        proving(),
        (STOP,),
        lanes=(lane(),),
        wish=Wish.DRAINING,
        why="a new driver",
    ),
    Case(
        "... and its lane ends",
        proving(0, State.STOPPED),
        (END,),
        lanes=(lane(),),
        wish=Wish.DRAINING,
        why="a new driver",
    ),
    Case(
        "a member with other weights is stopped",
        proving(),
        (STOP,),
        lanes=(lane(),),
        more={"clock_offset_s": 500.0},
        why="clock",
    ),
    Case("no lane is left", body(), (), lanes=tuple(lane(n, member_id=f"m{n}") for n in range(4))),
)


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.about)
def test_what_is_done_with_a_member(case: Case) -> None:
    last = seen(case.does, **case.more)
    if case.does is None:
        last = seen(proving(), answered=False, error="no answer")
    one = member(
        last, wish=case.wish, wish_reason="a new driver" if case.wish.value != "active" else None
    )
    condition = condition_of(one, case.desired, *case.lanes)
    changes = plan(case.desired, [condition], case.lanes, set(), NOW)
    assert tuple(done for change in changes for done in _done(change)) == case.then
    assert all(change.member_id == "m" for change in changes)
    reasons = [reason for change in changes for reason in (*change.ended.values(), change.why)]
    assert not case.why or any(case.why in reason for reason in reasons), reasons


def _done(change: MemberChange) -> list[str]:
    calls = [] if change.call is None else [change.call]
    return [END] * len(change.ended) + [ADOPT] * len(change.adopted) + calls


def test_nothing_is_done_with_a_member_that_a_call_is_about() -> None:
    condition = condition_of(member(seen()), GENERATING)
    assert plan(GENERATING, [condition], (), {"m"}, NOW) == []
    assert plan(GENERATING, [condition], (), {"another"}, NOW) == [starts("m")]


def test_no_more_starts_than_lanes_are_left() -> None:
    found = [condition_of(member(seen(), f"m{n}"), GENERATING) for n in range(5)]
    given = (lane(0, member_id="x", ended_at=1.0),)
    changes = plan(GENERATING, found, given, set(), NOW)
    assert changes == [starts("m0"), starts("m1"), starts("m2")]


def starts(member_id: str) -> MemberChange:
    return MemberChange(member_id, {}, {}, START)
