"""Rounds of a fleet that publish roots: each lane is a committed round, opened by its member."""

from pathlib import Path
from typing import Any

import pytest

from fleet.servers import ROUND, RunningFleet, fleet_in_fleet, fleet_of, members, receiving
from proofserve.receiver.reader import reading
from support.pace import until

pytestmark = pytest.mark.anyio


async def test_roots_arrive_and_are_opened_by_the_member_of_the_lane(tmp_path: Path) -> None:
    async with (
        members(tmp_path, 2) as made,
        receiving(tmp_path) as receiver,
        fleet_of(tmp_path, made) as fleet,
    ):
        body = {**ROUND, "url": receiver.url, "commit": "roots"}
        await fleet.pow("POST", "/init/generate", body)
        await fleet.until_each_stored(8)
        await fleet.pow("POST", "/stop")
        status = await fleet.status()
        await until(lambda: all_arrived(tmp_path, status))
        await until(lambda: delivered(fleet))
        with reading(tmp_path / "received.sqlite") as received:
            rounds = received.rounds()
        about = {"block_hash": "block", "public_key": "key"}
        opened = []
        for each in rounds:
            order = {**about, "round_id": each.round_id, "seed": "s", "count": 5}
            opened.append(await fleet.pow("POST", "/open", order))
        several = await fleet.http.post("/api/v1/pow/open", json={**about, "nonces": [0]})
        strange = {**about, "round_id": rounds[0].round_id, "nonces": [7]}
        unknown = await fleet.http.post("/api/v1/pow/open", json=strange)
        absent = await fleet.http.post(
            "/api/v1/pow/open", json={**about, "block_hash": "x", "nonces": [0]}
        )
    assert {each.lane.group_id for each in rounds} == {0, 1}
    assert {each.lane.n_groups for each in rounds} == {8}
    assert sum(each["committed"] for each in opened) == status["stats"]["total_processed"]
    for each, answer in zip(rounds, opened, strict=True):
        assert answer["round_id"] == each.round_id
        assert len(answer["openings"]) == 5
        assert {opening["nonce"] % 8 for opening in answer["openings"]} == {each.lane.group_id}
    assert several.status_code == 409
    assert rounds[0].round_id in several.json()["detail"]
    assert unknown.status_code == 404
    assert absent.status_code == 404


async def test_a_fleet_of_fleets_opens_the_rounds_of_every_member(tmp_path: Path) -> None:
    async with receiving(tmp_path) as receiver, fleet_in_fleet(tmp_path) as (outer, fleet):
        body = {**ROUND, "url": receiver.url, "commit": "roots"}
        await outer.pow("POST", "/init/generate", body)
        await until(lambda: all_have_stored(outer, fleet))
        await outer.pow("POST", "/stop")
        stopped = await outer.status()
        await until(lambda: all_arrived(tmp_path, stopped))
        await until(lambda: delivered(outer))
        status, failures = await outer.status(), [e["reason"] for e in await listed(outer)]
        with reading(tmp_path / "received.sqlite") as received:
            rounds = received.rounds()
        opened = []
        for each in rounds:
            about = {"block_hash": "block", "public_key": "key", "round_id": each.round_id}
            opened.append(await outer.pow("POST", "/open", {**about, "seed": "s", "count": 5}))
    assert failures == [None, None]
    # One lane of a server, and two parts of the lane of the fleet.
    assert sorted(each.lane.n_groups for each in rounds) == [8, 64, 64]
    assert sum(each["committed"] for each in opened) == status["stats"]["total_processed"]
    for each, answer in zip(rounds, opened, strict=True):
        nonces = [opening["nonce"] for opening in answer["openings"]]
        assert len(nonces) == 5
        assert {nonce % each.lane.n_groups for nonce in nonces} == {each.lane.group_id}


async def listed(fleet: RunningFleet) -> Any:
    return (await fleet.snapshot())["members"]


async def all_have_stored(outer: RunningFleet, inner: RunningFleet) -> bool:
    found = await listed(outer) + await listed(inner)
    return all(each["stored"] >= 8 for each in found)


async def all_arrived(folder: Path, status: Any) -> bool:
    """Between two callbacks nothing is pending either."""
    with reading(folder / "received.sqlite") as received:
        batches = [b for each in received.rounds() for b in received.batches(each.number)]
    return sum(batch.count for batch in batches) >= status["stats"]["total_processed"]


async def delivered(fleet: RunningFleet) -> Any:
    return (await fleet.status())["outbox"]["pending"] == 0
