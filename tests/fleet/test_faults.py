"""Members and controllers that end, hang, come back, or are not what they should be."""

import asyncio
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from fleet.misbehaving import Misbehaving
from fleet.servers import ROUND, FakeMember, RunningFleet, fleet_in_fleet, fleet_of, members
from support.fake_engine import TOY_ENGINE_INFO
from support.pace import PACE, until
from support.small_disk import fill, mounted

pytestmark = pytest.mark.anyio

JOIN = "/api/v1/fleet/members"


async def state_is(fleet: RunningFleet, name: str, state: str) -> bool:
    return (await fleet.member(name))["state"] == state


async def lane_is(fleet: RunningFleet, name: str, lane: int | None) -> bool:
    return (await fleet.member(name))["lane"] == lane


async def start(fleet: RunningFleet, **changes: Any) -> None:
    await fleet.pow("POST", "/init/generate", {**ROUND, **changes})


async def stop_and_check(fleet: RunningFleet, made: list[FakeMember]) -> dict[int, int]:
    """Stop the round. Returns the number of stored nonces by lane.

    Every lane has its first nonces without a gap, none is stored twice, and no member has proved a
    nonce of another's lane.
    """
    await fleet.pow("POST", "/stop")
    nonces = await fleet.nonces()
    assert len(set(nonces)) == len(nonces)
    lanes: dict[int, list[int]] = {}
    for nonce in nonces:
        lanes.setdefault(nonce % 8, []).append(nonce // 8)
    assert all(sorted(found) == list(range(len(found))) for found in lanes.values())
    for one in made:
        for other in made:
            assert one is other or not set(one.proved()) & set(other.proved())
    return {lane: len(found) for lane, found in lanes.items()}


async def test_a_killed_member_is_replaced_by_one_that_joins(tmp_path: Path) -> None:
    async with members(tmp_path, 2) as made, fleet_of(tmp_path, made) as fleet:
        await start(fleet)
        await fleet.until_each_stored(8)
        await made[0].kill()
        late = FakeMember(tmp_path, "late")
        await late.start()
        try:
            joined = await fleet.call("POST", JOIN, {"url": late.url, "name": "late"})
            again = await fleet.call("POST", JOIN, {"url": late.url, "name": "late"})
            await until(lambda: lane_is(fleet, "late", 2))
            await until(lambda: state_is(fleet, made[0].url, "lost"))
            lost = await fleet.member(made[0].url)
            before = (await fleet.status())["stats"]["total_processed"]
            await fleet.until_processed(before + 20)
            stored = await stop_and_check(fleet, [*made, late])
        finally:
            await late.kill()
    assert joined["id"] == again["id"]
    assert "no answer for" in lost["reason"]
    assert stored.keys() == {0, 1, 2}


@pytest.mark.parametrize("outbox", ["kept", "emptied"])
async def test_a_member_that_restarts_without_its_round_gets_a_new_lane(
    tmp_path: Path, outbox: str
) -> None:
    async with members(tmp_path, 1) as made, fleet_of(tmp_path, made) as fleet:
        await start(fleet)
        await fleet.until_processed(20)
        await made[0].kill()
        if outbox == "emptied":
            made[0].empty_outbox()
        await made[0].start()
        await until(lambda: lane_is(fleet, made[0].url, 1))
        before = (await fleet.status())["stats"]["total_processed"]
        await fleet.until_processed(before + 12)
        stored = await stop_and_check(fleet, made)
    assert stored.keys() == {0, 1}
    proved = made[0].proved()
    assert len(set(proved)) == len(proved)


async def test_a_member_that_resumes_keeps_its_lane(tmp_path: Path) -> None:
    async with members(tmp_path, 1) as made, fleet_of(tmp_path, made) as fleet:
        await start(fleet)
        await fleet.until_processed(20)
        await made[0].kill()
        await made[0].start(resume=True)
        await fleet.until_processed(60)
        lane = (await fleet.member(made[0].url))["lane"]
        stored = await stop_and_check(fleet, made)
    assert lane == 0
    assert stored.keys() == {0}


async def test_a_member_that_comes_back_with_an_old_round_is_stopped_and_gets_a_lane(
    tmp_path: Path,
) -> None:
    async with members(tmp_path, 2) as made, fleet_of(tmp_path, made) as fleet:
        await start(fleet)
        await fleet.until_processed(20)
        await made[0].kill()
        await until(lambda: state_is(fleet, made[0].url, "lost"))
        await fleet.pow("POST", "/stop")
        await start(fleet, block_hash="next")
        round_id = (await fleet.status())["round_id"]
        # It goes on with the round that the fleet has stopped meanwhile.
        await made[0].start(resume=True)
        await until(lambda: lane_is(fleet, made[0].url, 1))
        await fleet.until_processed(20)
        await fleet.pow("POST", "/stop")
        rows = [row for row in await fleet.results() if row["round_id"] == round_id]
    nonces = [row["nonce"] for row in rows]
    assert len(set(nonces)) == len(nonces)
    assert {nonce % 8 for nonce in nonces} <= {0, 1}


async def test_a_lost_answer_of_a_start_costs_no_lane(tmp_path: Path) -> None:
    member = FakeMember(tmp_path, "m0")
    faults: list[Misbehaving] = []

    def around(app: Any) -> Misbehaving:
        faults.append(Misbehaving(app))
        return faults[0]

    member.before = around
    await member.start()
    try:
        async with fleet_of(tmp_path, [member], start_wait_sec=0.1) as fleet:
            faults[0].loses_answers_of = "/init/generate"
            await start(fleet)
            await until(lambda: lane_is(fleet, member.url, 0), 40)
            await fleet.until_processed(20, 40)
            used = (await fleet.snapshot())["fleet"]["lanes_used"]
            stored = await stop_and_check(fleet, [member])
    finally:
        await member.kill()
    assert faults[0].lost == 1
    assert used == 1
    assert stored.keys() == {0}


async def test_unequal_members_are_kept_out_with_the_reason(tmp_path: Path) -> None:
    async with members(tmp_path, 2) as made:
        odd = FakeMember(tmp_path, "odd")
        facts = replace(TOY_ENGINE_INFO.facts, weights_digest="00" * 32)
        odd.engine.engine_info = replace(TOY_ENGINE_INFO, facts=facts)
        fixed = FakeMember(tmp_path, "fixed", scheme="sketch-v1")
        off = FakeMember(tmp_path, "off", enabled=False)
        late = FakeMember(tmp_path, "late")
        late.before = lambda app: clock_off(app, 500.0)
        late.serving.dates = False
        others = {"odd": "weights", "fixed": "scheme", "off": "proofs are off", "late": "clock"}
        strange = [odd, fixed, off, late]
        try:
            for each in strange:
                await each.start()
            async with fleet_of(tmp_path, made) as fleet:
                for each in strange:
                    await fleet.call("POST", JOIN, {"url": each.url, "name": each.name})
                for name in others:
                    await until(lambda name=name: state_is(fleet, name, "refused"))
                await start(fleet)
                await fleet.until_processed(8)
                found = {name: await fleet.member(name) for name in others}
                stored = await stop_and_check(fleet, made)
        finally:
            for each in strange:
                await each.kill()
    assert stored.keys() == {0, 1}
    for name, text in others.items():
        assert text in found[name]["reason"], found[name]["reason"]
        assert found[name]["lane"] is None
    assert not odd.engine.calls


def clock_off(app: Any, seconds: float) -> Misbehaving:
    made = Misbehaving(app)
    made.clock_offset_s = seconds
    return made


async def test_members_that_hang_or_answer_nonsense_do_not_hold_the_others_up(
    tmp_path: Path,
) -> None:
    faults: list[Misbehaving] = []

    def around(app: Any) -> Misbehaving:
        faults.append(Misbehaving(app))
        return faults[-1]

    async with members(tmp_path, 1) as made:
        strange = [FakeMember(tmp_path, "hanging"), FakeMember(tmp_path, "babbling")]
        try:
            for each in strange:
                each.before = around
                await each.start()
            async with fleet_of(tmp_path, [*made, *strange]) as fleet:
                faults[0].hangs = True
                faults[1].nonsense = b"<html>"
                began = asyncio.get_running_loop().time()
                await start(fleet)
                took = asyncio.get_running_loop().time() - began
                await until(lambda: state_is(fleet, strange[0].url, "lost"))
                await until(lambda: state_is(fleet, strange[1].url, "refused"))
                await fleet.until_processed(20)
                hanging = await fleet.member(strange[0].url)
                babbling = await fleet.member(strange[1].url)
                faults[0].hangs = False
                faults[1].nonsense = None
                await fleet.until_ready(3)
                await until(lambda: all_have_lanes(fleet))
                stored = await stop_and_check(fleet, [*made, *strange])
        finally:
            for each in strange:
                await each.kill()
    assert took < 8 * PACE
    assert "no answer" in hanging["reason"]
    assert "nonsense" in babbling["reason"]
    assert 0 in stored


async def all_have_lanes(fleet: RunningFleet) -> bool:
    return all(each["lane"] is not None for each in (await fleet.snapshot())["members"])


# A node with a full disk is tested in tests/wiring/test_full_disk.py.
@pytest.mark.slow
async def test_a_member_with_a_full_disk_says_so_and_loses_nothing(tmp_path: Path) -> None:
    with mounted(tmp_path / "disk") as disk:
        slowly = FakeMember(disk, "full", callback_interval_sec=1.0)
        # SQLite's log alone would fill so small a disk after some dozens of commits.
        slowly.engine.latency_s = 0.3
        made = [FakeMember(tmp_path, "roomy"), slowly]
        try:
            for each in made:
                await each.start()
            async with fleet_of(tmp_path, made) as fleet:
                await start(fleet)
                await until(lambda: all_have_lanes(fleet))
                await fleet.until_processed(20)
                fill(disk / "ballast")
                await until(lambda: reason_has(fleet, made[1].url, "disk"))
                full = await fleet.member(made[1].url)
                # The other one goes on.
                count = len(made[0].proved())
                await until(lambda: more_proved(made[:1], [count]))
                (disk / "ballast").unlink()
                await until(lambda: reason_has(fleet, made[1].url, None))
                count = len(made[1].proved())
                await until(lambda: more_proved(made[1:], [count]))
                used = (await fleet.snapshot())["fleet"]["lanes_used"]
                stored = await stop_and_check(fleet, made)
        finally:
            for each in made:
                await each.kill()
    assert full["state"] == "ready"
    assert used == 2
    assert stored.keys() == {0, 1}


async def reason_has(fleet: RunningFleet, name: str, text: str | None) -> bool:
    reason = (await fleet.member(name))["reason"]
    return reason is None if text is None else text in (reason or "")


async def test_a_controller_that_is_killed_in_a_round_goes_on_with_it(tmp_path: Path) -> None:
    async with members(tmp_path, 2) as made, fleet_of(tmp_path, made) as fleet:
        await start(fleet)
        await fleet.until_processed(20)
        round_id = (await fleet.status())["round_id"]
        await fleet.kill()
        # The members go on, and keep what they cannot deliver.
        counts = [len(member.proved()) for member in made]
        await until(lambda: more_proved(made, counts))
        await fleet.start()
        await fleet.until_ready(2)
        status = await fleet.status()
        await fleet.until_processed(status["stats"]["total_processed"] + 20)
        used = (await fleet.snapshot())["fleet"]["lanes_used"]
        stored = await stop_and_check(fleet, made)
    assert status["round_id"] == round_id
    assert status["status"] == "GENERATING"
    assert used == 2
    assert stored.keys() == {0, 1}


async def more_proved(made: list[FakeMember], before: list[int]) -> bool:
    return all(len(m.proved()) > count + 20 for m, count in zip(made, before, strict=True))


async def test_a_fleet_is_a_member_of_a_fleet(tmp_path: Path) -> None:
    async with fleet_in_fleet(tmp_path) as (outer, fleet):
        await outer.pow("POST", "/init/generate", ROUND)
        await outer.until_each_stored(8)
        await fleet.until_each_stored(8)
        inside = await fleet.status()
        await outer.pow("POST", "/stop")
        nonces, theirs = await outer.nonces(), await fleet.nonces()
        status = await outer.status()
    assert inside["status"] == "GENERATING"
    assert inside["config"]["n_groups"] == 8
    assert len(set(nonces)) == len(nonces) == status["stats"]["total_processed"]
    assert theirs
    assert set(theirs) <= set(nonces)
    # Two of eight lanes, and of the inner fleet's lane two of eight.
    assert len({nonce % 64 for nonce in theirs}) == 2
