import asyncio
import multiprocessing

import pytest
from sqlalchemy import insert
from sqlalchemy.exc import IntegrityError

from proofserve.fleet.records import MemberSource, StoreUnavailable
from proofserve.fleet.sql.store import FleetStore
from proofserve.fleet.sql.tables import lanes
from proofserve.rounds.errors import Refusal
from proofserve.rounds.state import Move
from support.refusals import refused

from .giver import give_lanes
from .support import a_lane, a_spec, another_lane, give_lane, lanes_of

pytestmark = pytest.mark.anyio

GIVERS = 8


async def test_lanes_are_given_in_order_and_once(store: FleetStore) -> None:
    opened, first = await a_lane(store, lanes=3)
    with refused(Refusal.NO_LANE, match="still has lane 0 of round r1"):
        await give_lane(store, opened.id, first.member_id)
    await store.note_lanes({}, {first: "its start was lost"})
    second = await give_lane(store, opened.id, first.member_id)
    third = await another_lane(store, opened, "m2")
    assert [each.lane for each in (first, second, third)] == [0, 1, 2]
    await store.note_lanes({}, {second: "again"})
    with refused(Refusal.NO_LANE, match="all of its 3 lanes"):
        await give_lane(store, opened.id, second.member_id)
    given = await lanes_of(store, opened.id)
    assert [(each.lane, each.end_reason) for each in given] == [
        (0, "its start was lost"),
        (1, "again"),
        (2, None),
    ]
    assert [each.lane for each in await store.open_lanes()] == [2]


async def test_a_lane_keeps_what_became_of_it(store: FleetStore) -> None:
    opened, lane = await a_lane(store)
    await store.note_lanes({lane: "of the member"}, {})
    await store.note_lanes({}, {lane: "lost"})
    await store.note_lanes({}, {lane: "another reason"})
    found, now = await store.lane(opened.id, 0)
    assert found.id == opened.id
    assert (now.member_round_id, now.end_reason) == ("of the member", "lost")
    assert now.started_at is not None
    for round_id, number in (("r1", 1), ("r1", -1), ("r1", 2**70), ("none", 0), ("\0", 0)):
        with refused(Refusal.UNKNOWN_LANE):
            await store.lane(round_id, number)


async def test_only_a_member_of_a_round_that_runs_gets_a_lane(store: FleetStore) -> None:
    opened, lane = await a_lane(store)
    with refused(Refusal.NO_LANE, match="there is no member"):
        await give_lane(store, opened.id, "unknown")
    await store.remove_member(lane.member_id)
    with refused(Refusal.NO_LANE, match="there is no member"):
        await give_lane(store, opened.id, lane.member_id)
    other = await store.put_member("http://m2:8000", "m2", MemberSource.LIST)
    await store.move(Move.STOP)
    for round_id in (opened.id, "none"):
        with refused(Refusal.NO_LANE, match="has ended, so it gives no more lanes"):
            await give_lane(store, round_id, other.id)


async def test_the_database_refuses_what_the_code_should_not_do(store: FleetStore) -> None:
    """Disjointness does not depend on our code: the tables refuse these rows."""
    opened, lane = await a_lane(store, lanes=4)
    other = await store.put_member("http://m2:8000", "m2", MemberSource.LIST)
    row = {"round": opened.number, "lanes": 4, "given_at": 1.0}
    for twice in (
        {"lane": 0, "member": other.id},
        {"lane": 4, "member": other.id},
        {"lane": -1, "member": other.id},
        {"lane": 1, "member": lane.member_id},
        {"lane": 5, "lanes": 6, "member": other.id},
    ):
        with pytest.raises(StoreUnavailable) as caught:
            await store.database.write(lambda c, r=row | twice: c.execute(insert(lanes).values(r)))
        assert isinstance(caught.value.__cause__, IntegrityError), twice


async def test_givers_in_one_process_never_give_a_lane_twice(store: FleetStore, url: str) -> None:
    opened = await store.open_round(a_spec(), 64)
    members = [
        await store.put_member(f"http://m{n}:8000", f"m{n}", MemberSource.LIST) for n in range(16)
    ]
    others = [await FleetStore.open(url) for _ in range(2)]
    givers = [store, *others]
    calls = [give_lane(givers[n % 3], opened.id, member.id) for n, member in enumerate(members)]
    given = await asyncio.gather(*calls)
    for other in others:
        await other.close()
    assert sorted(lane.lane for lane in given) == list(range(16))


async def test_eight_processes_never_give_a_lane_twice(store: FleetStore, url: str) -> None:
    """All ask at the same time, each for members of its own, until no lane is left."""
    opened = await store.open_round(a_spec(), 12 * GIVERS)
    # One process imports what the others need.
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload([give_lanes.__module__])
    with context.Manager() as manager, context.Pool(GIVERS) as pool:
        together = manager.Barrier(GIVERS)
        calls = [(url, opened.id, name, together) for name in range(GIVERS)]
        taken = await asyncio.to_thread(pool.starmap, give_lanes, calls)
    assert [len(lanes_of_one) for lanes_of_one in taken] == [12] * GIVERS
    assert sorted(lane for lanes_of_one in taken for lane in lanes_of_one) == list(
        range(12 * GIVERS)
    )
    stored = [each.lane for each in await lanes_of(store, opened.id)]
    assert stored == list(range(12 * GIVERS))
