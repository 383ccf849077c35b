import asyncio

import pytest

from proofserve.fleet.errors import FleetFull, UnknownMember
from proofserve.fleet.records import MemberSource, Seen, Wish
from proofserve.fleet.sql import members
from proofserve.fleet.sql.store import FleetStore

from .support import a_lane

pytestmark = pytest.mark.anyio


async def test_a_member_is_known_by_its_url(store: FleetStore) -> None:
    first = await store.put_member("http://a:8000/", "a", MemberSource.LIST)
    again = await store.put_member("http://a:8000", "a2", MemberSource.JOINED)
    other = await store.put_member("http://b:8000", "b", MemberSource.DNS)
    assert (first.url, first.wish, first.seen) == ("http://a:8000", Wish.ACTIVE, None)
    assert (again.id, again.name, again.source) == (first.id, "a2", MemberSource.JOINED)
    assert await store.members() == [again, other]


async def test_a_removed_member_comes_back_as_new(store: FleetStore) -> None:
    opened, lane = await a_lane(store)
    await store.wish(lane.member_id, Wish.CORDONED, "looks odd")
    await store.remove_member(lane.member_id, "gone for good")
    assert await store.members() == []
    (ended,) = await store.lanes(opened.id)
    assert ended.lane.end_reason == "gone for good"
    assert await store.open_lanes() == []
    with pytest.raises(UnknownMember):
        await store.remove_member(lane.member_id)
    back = await store.put_member("http://m1:8000", "m1", MemberSource.LIST)
    assert (back.id, back.wish, back.wish_reason) == (lane.member_id, Wish.ACTIVE, None)


async def test_wishes_are_kept_with_their_reason(store: FleetStore) -> None:
    member = await store.put_member("http://a:8000", "a", MemberSource.LIST)
    changed = await store.wish(member.id, Wish.DRAINING, "a new card comes\0")
    assert (changed.wish, changed.wish_reason) == (Wish.DRAINING, "a new card comes\ufffd")
    assert await store.members() == [changed]
    with pytest.raises(UnknownMember, match="no member 'x'"):
        await store.wish("x", Wish.ACTIVE, None)


async def test_looks_are_kept_whole(store: FleetStore) -> None:
    member = await store.put_member("http://a:8000", "a", MemberSource.LIST)
    seen = Seen(
        at=12.5,
        answered=True,
        model_names=("tiny", "alias"),
        weights_digest="ab" * 32,
        hidden_size=64,
        max_seq_len=512,
        versions={"vllm": "0.32.0"},
        scheme="artifact-v1",
        clock_offset_s=-0.25,
        stalled_s=0.0,
        status={"status": "IDLE", "odd": "\ud800\0", "deep": [1, {"x": None}]},
    )
    await store.seen({member.id: seen, "unknown": seen})
    assert [each.seen for each in await store.members()] == [seen]


@pytest.mark.parametrize(
    "status", [{"x": "y" * members.STATUS_BYTES}, {"x": float("nan")}, {"x": {1, 2}}]
)
async def test_a_status_that_cannot_be_kept_is_left_out(
    store: FleetStore, status: dict[str, object]
) -> None:
    member = await store.put_member("http://a:8000", "a", MemberSource.LIST)
    await store.seen({member.id: Seen(1.0, answered=True, scheme="artifact-v1", status=status)})
    ((kept,),) = [[each.seen] for each in await store.members()]
    assert kept == Seen(1.0, answered=True, scheme="artifact-v1")


async def test_a_look_of_any_size_is_bounded(store: FleetStore) -> None:
    member = await store.put_member("http://a:8000", "a", MemberSource.LIST)
    await store.seen({member.id: Seen(1.0, answered=True, model_names=("x" * 10**6,))})
    (kept,) = [each.seen for each in await store.members()]
    assert kept == Seen(1.0, answered=True, error="its answers are too large")


async def test_a_fleet_has_a_largest_size(
    store: FleetStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(members, "MOST_MEMBERS", 2)
    for name in ("a", "b", "b"):
        await store.put_member(f"http://{name}:8000", name, MemberSource.JOINED)
    assert len(await store.members()) == 2
    with pytest.raises(FleetFull, match="2 members"):
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
    assert len(await store.members()) == 10
