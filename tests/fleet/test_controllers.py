"""Several controllers on one real PostgreSQL, and a database that is gone for a while."""

import asyncio
import signal
import time
from pathlib import Path
from typing import Any

import httpx
import pytest

from endurance.fleet.postgres import Postgres
from fleet.servers import ROUND, FakeMember, RunningFleet, Serving, fleet_of, members
from support.controllers import controller
from support.pace import PACE, until

pytestmark = pytest.mark.anyio


async def get(url: str, path: str) -> Any:
    async with httpx.AsyncClient(base_url=url, timeout=30.0, trust_env=False) as client:
        response = await client.get(path)
    assert response.is_success, response.text
    return response.json()


async def leads(url: str) -> bool:
    async with httpx.AsyncClient(base_url=url, timeout=30.0, trust_env=False) as client:
        try:
            text = (await client.get("/api/v1/fleet/metrics")).text
        except httpx.TransportError:
            return False
    return "proofserve_fleet_leads 1.0" in text


# tests/trials/test_fleet kills controllers, too.
@pytest.mark.slow
async def test_the_second_controller_goes_on_when_the_first_is_killed(
    tmp_path: Path, server: Postgres
) -> None:
    database, first = server.database(), Serving().url
    async with members(tmp_path, 3) as made:
        second = RunningFleet(tmp_path, [each.url for each in made], database=database)
        options = [each for member in made for each in ("--member", member.url)]
        # As with one name in front of both: members' callbacks go to the one that stays.
        options += ["--database", database, "--public-url", second.url, "--lanes", "8"]
        with controller(tmp_path, first, *options) as process:
            await until(lambda: leads(first), 60)
            await second.start()
            try:
                await second.until_ready(3)
                assert not await leads(second.url)
                await second.pow("POST", "/init/generate", ROUND)
                await second.until_processed(20)
                shown = [await get(url, "/api/v1/pow/status") for url in (first, second.url)]
                process.send_signal(signal.SIGKILL)
                killed = time.monotonic()
                await until(lambda: leads(second.url), 15)
                took = time.monotonic() - killed
                # It acts: a member that lost its round gets a new lane.
                await made[0].kill()
                await made[0].start()
                await until(lambda: lane_is(second, made[0], 3))
                await second.pow("POST", "/stop")
                status, nonces = await second.status(), await second.nonces()
            finally:
                await second.kill()
                await second.http.aclose()
    assert shown[0]["round_id"] == shown[1]["round_id"]
    assert took < 10 * PACE
    assert status["round_id"] == shown[0]["round_id"]
    assert len(set(nonces)) == len(nonces) == status["stats"]["total_processed"]
    assert {nonce % 8 for nonce in nonces} == {0, 1, 2, 3}


async def lane_is(fleet: RunningFleet, member: FakeMember, lane: int) -> bool:
    return (await fleet.member(member.url))["lane"] == lane


async def uses_lanes(fleet: RunningFleet, count: int) -> bool:
    return bool((await fleet.snapshot())["fleet"]["lanes_used"] == count)


async def test_of_two_starts_at_the_same_moment_one_wins(tmp_path: Path, server: Postgres) -> None:
    database = server.database()
    async with members(tmp_path, 2) as made:
        both = [RunningFleet(tmp_path, [e.url for e in made], database=database) for _ in range(2)]
        try:
            for each in both:
                await each.start()
                await each.until_ready(2)
            starts = [each.http.post("/api/v1/pow/init/generate", json=ROUND) for each in both]
            answers = await asyncio.gather(*starts)
            await until(lambda: leads_one_of(both))
            await both[0].until_processed(8)
            # The view of the one that does not lead is up to a second old.
            await until(lambda: uses_lanes(both[1], 2))
            used = (await both[0].snapshot())["fleet"]["lanes_used"]
            await both[1].pow("POST", "/stop")
        finally:
            for each in both:
                await each.kill()
                await each.http.aclose()
    assert sorted(answer.status_code for answer in answers) == [200, 409]
    assert used == 2


async def leads_one_of(both: list[RunningFleet]) -> bool:
    return sorted([await leads(each.url) for each in both]) == [False, True]


async def test_nothing_is_lost_while_the_database_is_gone(tmp_path: Path, server: Postgres) -> None:
    async with (
        members(tmp_path, 2) as made,
        fleet_of(tmp_path, made, database=server.database()) as fleet,
    ):
        await fleet.pow("POST", "/init/generate", ROUND)
        await fleet.until_processed(20)
        server.stop("immediate")
        counts = [len(member.proved()) for member in made]
        try:
            await until(lambda: is_unavailable(fleet), 30)
            refused = await fleet.http.get("/api/v1/pow/status")
            live = await fleet.http.get("/api/v1/pow/health/live")
            await until(lambda: more_proved(made, counts))
        finally:
            server.start()
        await until(lambda: is_available(fleet), 60)
        await until(lambda: each_stored(fleet, made, counts), 60)
        await fleet.pow("POST", "/stop")
        status, nonces = await fleet.status(), await fleet.nonces()
        proved = [set(member.proved()) for member in made]
    assert "database has not answered" in refused.json()["detail"]
    assert live.status_code == 200
    assert len(set(nonces)) == len(nonces) == status["stats"]["total_processed"]
    lanes = [sorted(n // 8 for n in nonces if n % 8 == lane) for lane in (0, 1)]
    assert [list(range(len(lane))) for lane in lanes] == lanes
    assert all(
        len(found & set(nonces)) >= count for found, count in zip(proved, counts, strict=True)
    )


async def each_stored(fleet: RunningFleet, made: list[FakeMember], counts: list[int]) -> bool:
    found = [await fleet.member(each.url) for each in made]
    return all(each["stored"] >= count for each, count in zip(found, counts, strict=True))


async def is_unavailable(fleet: RunningFleet) -> bool:
    return (await fleet.http.get("/api/v1/pow/status")).status_code == 503


async def is_available(fleet: RunningFleet) -> bool:
    return (await fleet.http.get("/api/v1/pow/status")).status_code == 200


async def more_proved(made: list[FakeMember], before: list[int]) -> bool:
    return all(len(m.proved()) > count + 20 for m, count in zip(made, before, strict=True))
