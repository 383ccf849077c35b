import asyncio
import time
from dataclasses import replace

import pytest

from fleet.records import DEPLOYED, body
from proofserve.fleet.records import Member, MemberLook, MemberSource, read_status
from proofserve.fleet.sql.store import FleetStore
from proofserve.rounds.state import Move, State

from .support import a_lane, a_spec, give_lane, lanes_of, looks_of, nonces_of, vectors_of

pytestmark = pytest.mark.anyio

MEMBERS = 1000


async def test_a_view_has_all_at_one_time(store: FleetStore) -> None:
    empty = await store.view()
    assert (empty.members, empty.desired.state, empty.lanes) == ((), State.IDLE, ())
    opened, lane = await a_lane(store)
    await store.note_lanes({lane: "its round"}, {})
    await store.ingest(opened, lane, "k", vectors_of(nonces_of(opened, lane, 0, 5)))
    view = await store.view()
    assert [member.name for member in view.members] == ["m1"]
    assert view.desired.round == opened
    (progress,) = view.lanes
    assert (progress.member_round_id, progress.stored, progress.batches) == ("its round", 5, 1)
    assert list(view.lanes) == await lanes_of(store, opened.id)


async def test_a_view_of_a_thousand_members_is_bounded(store: FleetStore, url: str) -> None:
    """Lanes of earlier rounds are not in it, and each look has a largest size."""
    for number in range(3):
        await a_lane(store, a_spec(f"old{number}"))
        await store.move(Move.STOP)
    members: list[Member] = []
    # A call that waits too long for its turn would be given up.
    for first in range(0, MEMBERS, 100):
        members += await asyncio.gather(
            *(
                store.put_member(f"http://m{n}:8000", f"m{n:04}", MemberSource.DNS)
                for n in range(first, first + 100)
            )
        )
    look = MemberLook(1.0, answered=True, status=read_status(body(error="x" * 2000)))
    await store.add_looks({member.id: look for member in members})
    large = body(deployment={**DEPLOYED, "models": ["x" * 2000] * 100})
    await store.add_looks({members[0].id: replace(look, status=read_status(large))})
    opened = await store.open_round(a_spec("now"), MEMBERS)
    await asyncio.gather(*(give_lane(store, opened.id, member.id) for member in members[:200]))
    start = time.perf_counter()
    view = await store.view()
    print(f"a view of {MEMBERS} members and 200 lanes took {time.perf_counter() - start:.3f} s")
    assert len(view.members) == MEMBERS
    assert len(view.lanes) == 200
    assert {each.round_id for each in view.lanes} == {"now"}
    assert await looks_of(store, url) == [MemberLook(1.0, answered=True), *[look] * (MEMBERS - 1)]
