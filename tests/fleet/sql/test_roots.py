"""Rounds with roots as rows: what each member has committed to, by the id that it gave."""

import pytest

from proofserve.fleet.records import MemberRound
from proofserve.fleet.sql.batches import committed_rounds
from proofserve.fleet.sql.store import FleetStore
from proofserve.protocol.nonces import NonceLane
from proofserve.rounds.errors import Refusal
from support.refusals import refused

from .support import a_lane, a_spec, another_lane, lanes_of, roots_body, send

pytestmark = pytest.mark.anyio

ABOUT = ("b10c", "k3y")


async def test_the_nonces_under_roots_are_counted_once(store: FleetStore) -> None:
    opened, lane = await a_lane(store, a_spec(roots=True))
    for key in ("k1", "k1", "again"):
        await send(store, opened, lane, key, roots_body(opened, lane, 0, [32, 32]))
    await send(store, opened, lane, "k2", roots_body(opened, lane, 32, [32, 20]))
    (found,) = await store.database.read(committed_rounds, [opened], None)
    numbers = opened.nonces_of(0)
    assert found == MemberRound("the member's", numbers, 84, lane.member_id, opened)
    assert await store.database.read(committed_rounds, [opened], "another") == []


async def test_the_rounds_of_a_member_that_is_a_fleet_are_parts_of_its_lane(
    store: FleetStore,
) -> None:
    opened, lane = await a_lane(store, a_spec(roots=True))
    own = opened.nonces_of(0)
    for part in (0, 3):
        changes = {"group_id": own.group_id + own.n_groups * part, "n_groups": own.n_groups * 4}
        body = roots_body(opened, lane, 0, [32]) | changes | {"round_id": f"part {part}"}
        assert await send(store, opened, lane, f"k{part}", body)
    found = await store.database.read(committed_rounds, [opened], None)
    lanes = [NonceLane(3, 4, 1, 64), NonceLane(3, 4, 49, 64)]
    assert [each.lane for each in found] == lanes
    assert [(each.round_id, each.next_index) for each in found] == [("part 0", 32), ("part 3", 32)]
    (progress,) = await lanes_of(store, opened.id)
    assert progress.stored == 64


async def test_a_member_cannot_hide_the_round_of_another_one(store: FleetStore) -> None:
    opened, first = await a_lane(store, a_spec(roots=True))
    second = await another_lane(store, opened, "m2")
    for lane in (second, first):
        await send(store, opened, lane, "k", roots_body(opened, lane, 0, [32]))
    found = await store.committed_round(*ABOUT, "the member's")
    assert (found.lane, found.next_index) == (opened.nonces_of(second.lane), 32)
    own = roots_body(opened, first, 32, [32]) | {"round_id": "its own"}
    await send(store, opened, first, "k2", own)
    with refused(Refusal.SEVERAL_ROUNDS, match="give one of these"):
        await store.committed_round(*ABOUT, None)
    with refused(Refusal.UNKNOWN_ROUND, match="no member has committed"):
        await store.committed_round(*ABOUT, "another")
