import asyncio

import pytest
from sqlalchemy import column, table, update

from fleet.records import DEPLOYED, body, proving
from proofserve.fleet.records import MemberLook, MemberSource, Wish, read_status
from proofserve.fleet.sql import rounds
from proofserve.fleet.sql.store import FleetStore
from proofserve.rounds.errors import Refusal
from support.refusals import refused

from .support import a_lane, lanes_of, looks_of, members_of

pytestmark = pytest.mark.anyio


async def test_a_member_is_known_by_its_url(store: FleetStore) -> None:
    first = await store.put_member("http://a:8000/", "a", MemberSource.LIST)
    again = await store.put_member("http://a:8000", "a2", MemberSource.JOINED)
    other = await store.put_member("http://b:8000", "b", MemberSource.DNS)
    assert (first.url, first.wish, first.seen) == ("http://a:8000", Wish.ACTIVE, None)
    assert (again.id, again.name, again.source) == (first.id, "a2", MemberSource.JOINED)
    assert await members_of(store) == [again, other]


async def test_a_removed_member_comes_back_as_new(store: FleetStore) -> None:
    opened, lane = await a_lane(store)
    await store.wish(lane.member_id, Wish.CORDONED, "looks odd")
    await store.remove_member(lane.member_id, "gone for good")
    assert await members_of(store) == []
    (ended,) = await lanes_of(store, opened.id)
    assert ended.end_reason == "gone for good"
    assert await store.open_lanes() == []
    with refused(Refusal.UNKNOWN_MEMBER):
        await store.remove_member(lane.member_id)
    back = await store.put_member("http://m1:8000", "m1", MemberSource.LIST)
    assert (back.id, back.wish, back.wish_reason) == (lane.member_id, Wish.ACTIVE, None)


async def test_wishes_are_kept_with_their_reason(store: FleetStore) -> None:
    member = await store.put_member("http://a:8000", "a", MemberSource.LIST)
    changed = await store.wish(member.id, Wish.DRAINING, "a new card comes\0")
    assert (changed.wish, changed.wish_reason) == (Wish.DRAINING, "a new card comes\ufffd")
    assert await members_of(store) == [changed]
    with refused(Refusal.UNKNOWN_MEMBER, match="no member 'x'"):
        await store.wish("x", Wish.ACTIVE, None)


async def test_looks_are_kept_whole(store: FleetStore, url: str) -> None:
    member = await store.put_member("http://a:8000", "a", MemberSource.LIST)
    status = read_status(proving(error="odd: \0 \N{GREEK SMALL LETTER ALPHA}"))
    look = MemberLook(12.5, answered=True, error="why", clock_offset_s=-0.25, status=status)
    await store.add_looks({member.id: look, "unknown": look})
    assert await looks_of(store, url) == [look]


async def test_a_status_that_is_too_large_is_left_out(store: FleetStore, url: str) -> None:
    member = await store.put_member("http://a:8000", "a", MemberSource.LIST)
    large = read_status(body(deployment={**DEPLOYED, "models": ["y" * 2000] * 9}))
    await store.add_looks({member.id: MemberLook(1.0, answered=True, status=large)})
    (kept,) = await looks_of(store, url)
    assert kept == MemberLook(1.0, answered=True)


async def test_a_status_of_another_version_is_left_out(store: FleetStore, url: str) -> None:
    member = await store.put_member("http://a:8000", "a", MemberSource.LIST)
    await store.add_looks({member.id: MemberLook(1.0, answered=True, status=read_status(body()))})
    odd = update(table("fleet_members", column("seen"))).values(
        seen='{"at": 2.0, "answered": true, "error": null, "clock_offset_s": 0.5, "status": {}}'
    )
    await store.database.write(lambda c: c.execute(odd))
    (kept,) = await looks_of(store, url)
    assert kept == MemberLook(2.0, answered=True, clock_offset_s=0.5)


async def test_a_look_of_any_size_is_bounded(store: FleetStore, url: str) -> None:
    member = await store.put_member("http://a:8000", "a", MemberSource.LIST)
    await store.add_looks({member.id: MemberLook(1.0, answered=False, error="x" * 10**6)})
    (kept,) = await looks_of(store, url)
    assert kept == MemberLook(1.0, answered=False, error="x" * 500)


async def test_a_fleet_has_a_largest_size(
    store: FleetStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(rounds, "MOST_MEMBERS", 2)
    for name in ("a", "b", "b"):
        await store.put_member(f"http://{name}:8000", name, MemberSource.JOINED)
    assert len(await members_of(store)) == 2
    with refused(Refusal.FLEET_FULL, match="2 members"):
        await store.put_member("http://c:8000", "c", MemberSource.JOINED)


async def test_a_member_that_two_controllers_hear_of_is_one(store: FleetStore, url: str) -> None:
    async with await FleetStore.open(url) as other:
        for number in range(10):
            name = f"m{number}"
            calls = (
                each.put_member(f"http://{name}", name, MemberSource.DNS) for each in (store, other)
            )
            first, second = await asyncio.gather(*calls)
            assert first == second
    assert len(await members_of(store)) == 10
