"""Rounds of a fleet, over members that are real nodes with the fake engine."""

from pathlib import Path

import pytest

from fleet.servers import (
    DISTANCE_ROUND,
    ROUND,
    FakeMember,
    Receiver,
    RunningFleet,
    fleet_of,
    members,
    receiving,
)
from support.pace import until

pytestmark = pytest.mark.anyio


def lanes_of(nonces: list[int], total: int) -> dict[int, list[int]]:
    found: dict[int, list[int]] = {}
    for nonce in nonces:
        found.setdefault(nonce % total, []).append(nonce // total)
    return found


async def test_a_round_over_three_members_has_disjoint_and_complete_lanes(tmp_path: Path) -> None:
    async with members(tmp_path, 3) as made, fleet_of(tmp_path, made) as fleet:
        await fleet.pow("POST", "/init/generate", ROUND)
        await fleet.until_processed(60)
        running = await fleet.status()
        await fleet.pow("POST", "/stop")
        status, nonces = await fleet.status(), await fleet.nonces()
    assert running["status"] == "GENERATING"
    assert status["status"] == "STOPPED"
    assert len(set(nonces)) == len(nonces) == status["stats"]["total_processed"]
    lanes = lanes_of(nonces, 8)
    assert lanes.keys() == {0, 1, 2}
    assert all(sorted(numbers) == list(range(len(numbers))) for numbers in lanes.values())
    assert {int(lane): len(found) for lane, found in lanes.items()} == {
        int(lane): count for lane, count in status["lanes"]["processed"].items()
    }
    # Each nonce was proved by one member, and what it proved is what the fleet has.
    proved = [set(member.proved()) for member in made]
    assert all(set(nonces) & mine for mine in proved)
    assert not proved[0] & proved[1] | proved[0] & proved[2] | proved[1] & proved[2]


async def test_a_stop_ends_every_member_and_waits_for_what_they_found(tmp_path: Path) -> None:
    # Members send callbacks each hour, or when their round ends.
    members_made = members(tmp_path, 2, callback_interval_sec=3600)
    async with members_made as made, fleet_of(tmp_path, made) as fleet:
        await fleet.pow("POST", "/init/generate", ROUND)
        await until(lambda: all_proved(made, 20))
        assert await fleet.results() == []
        await fleet.pow("POST", "/stop")
        states = [member.node.manager.status() for member in made]
        status, rows = await fleet.status(), await fleet.results()
    assert [each.state.value for each in states] == ["STOPPED", "STOPPED"]
    assert len(rows) == status["stats"]["total_processed"]
    assert len(rows) == sum(each.stats.total_found for each in states if each.stats)
    assert status["stats"]["nonces_per_second"] > 0


async def all_proved(made: list[FakeMember], count: int) -> bool:
    return all(len(member.proved()) >= count for member in made)


async def test_a_second_round_while_one_runs_is_refused_and_after_it_starts(tmp_path: Path) -> None:
    async with members(tmp_path, 2) as made, fleet_of(tmp_path, made) as fleet:
        await fleet.pow("POST", "/init/generate", ROUND)
        again = await fleet.http.post("/api/v1/pow/init/generate", json=ROUND)
        await fleet.until_each_stored(4)
        await fleet.pow("POST", "/stop")
        first = await fleet.status()
        await fleet.pow("POST", "/init/generate", {**ROUND, "block_hash": "next"})
        await fleet.until_each_stored(4)
        second = await fleet.status()
        await fleet.pow("POST", "/stop")
        rows = await fleet.results()
    assert again.status_code == 409
    assert first["round_id"] != second["round_id"]
    assert second["config"]["block_hash"] == "next"
    for round_id in (first["round_id"], second["round_id"]):
        nonces = [row["nonce"] for row in rows if row["round_id"] == round_id]
        assert len(set(nonces)) == len(nonces) >= 8
        assert {nonce % 8 for nonce in nonces} == {0, 1}


async def test_callbacks_arrive_at_the_networks_url_once_each(tmp_path: Path) -> None:
    async with (
        members(tmp_path, 3) as made,
        receiving(tmp_path) as receiver,
        fleet_of(tmp_path, made) as fleet,
    ):
        await fleet.pow("POST", "/init/generate", {**ROUND, "url": receiver.url})
        await fleet.until_processed(60)
        await fleet.pow("POST", "/stop")
        nonces = await fleet.nonces()
        await until(lambda: all_arrived(fleet, receiver, len(nonces)))
        outbox = (await fleet.status())["outbox"]
        received = receiver.store.summary()
    assert received.callbacks == outbox["delivered"] > 1
    assert received.repeats == 0
    (source,) = received.sources
    assert (source.artifacts, source.duplicates) == (len(nonces), 0)


async def delivered(fleet: RunningFleet) -> bool:
    return (await fleet.status())["outbox"]["pending"] == 0


async def all_arrived(fleet: RunningFleet, receiver: Receiver, count: int) -> bool:
    """Between two callbacks nothing is pending either."""
    arrived = sum(each.artifacts + each.winners for each in receiver.store.summary().sources)
    return arrived >= count and await delivered(fleet)


async def test_a_distance_round_goes_on_in_its_lanes(tmp_path: Path) -> None:
    async with (
        members(tmp_path, 2) as made,
        receiving(tmp_path) as receiver,
        fleet_of(tmp_path, made) as fleet,
    ):
        await fleet.pow("POST", "/init", {**DISTANCE_ROUND, "callback_url": receiver.url})
        configured = await fleet.status()
        await fleet.pow("POST", "/phase/generate")
        await fleet.until_processed(40)
        await fleet.pow("POST", "/phase/validate")
        first, rows = await fleet.status(), await fleet.results()
        claims = {name: DISTANCE_ROUND[name] for name in ("block_hash", "block_height")}
        claims |= {
            "public_key": DISTANCE_ROUND["public_key"],
            "node_id": 0,
            "nonces": [row["nonce"] for row in rows],
            "dist": [row["dist"] for row in rows],
        }
        honest = await fleet.pow("POST", "/validate", claims)
        winners = set(claims["nonces"])
        losers = [n for member in made for n in member.proved()[:20] if n not in winners]
        false = {"nonces": losers, "dist": [1.4] * len(losers)}
        forged = await fleet.pow("POST", "/validate", claims | false)
        await fleet.pow("POST", "/phase/generate")
        await fleet.until_processed(first["stats"]["total_processed"] + 40)
        await fleet.pow("POST", "/stop")
        status, all_rows = await fleet.status(), await fleet.results()
        await until(lambda: all_arrived(fleet, receiver, len(all_rows)))
        (source,) = receiver.store.summary().sources
    assert (source.winners, source.duplicates) == (len(all_rows), 0)
    assert (source.validations, source.frauds) == (2, 1)
    assert configured["status"] == "IDLE"
    assert first["status"] == "VALIDATING"
    assert first["total_valid"] == len(rows) > 0
    assert honest["computed_distances"] == pytest.approx(claims["dist"], abs=1e-5)
    assert not honest["fraud_detected"]
    assert forged["fraud_detected"]
    assert forged["n_invalid"] == len(losers) > 5
    assert set(status["lanes"]["processed"]) == {"0", "1"}
    nonces = [row["nonce"] for row in all_rows]
    assert len(set(nonces)) == len(nonces) > len(rows)
    # Nothing was computed twice for the round, and no nonce of a lane was left out.
    for member in made:
        generated = {nonce for nonce in member.proved() if nonce % 8 == member.proved()[0] % 8}
        assert all(n in generated for n in range(min(generated), max(generated), 8))
