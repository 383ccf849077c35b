"""Jobs of /generate outlive the controller that took them, and the one that computes them."""

import asyncio
import signal
import sqlite3
from contextlib import closing
from pathlib import Path
from typing import Any

import httpx
import pytest

from endurance.fleet.postgres import Postgres
from fleet.servers import (
    ROUND,
    FakeMember,
    Receiver,
    RunningFleet,
    Serving,
    fleet_of,
    members,
    receiving,
)
from fleet.test_controllers import get, leads
from proofserve.fleet.sql.store import FleetStore
from support.controllers import controller
from support.pace import until

pytestmark = pytest.mark.anyio

NONCES = list(range(80))
LOST_AFTER_S = 2
JOB: dict[str, Any] = {**ROUND, "nonces": NONCES}


async def test_a_job_outlives_the_controller_that_computes_it(
    tmp_path: Path, server: Postgres
) -> None:
    database, first = server.database(), Serving().url
    async with members(tmp_path, 2) as made, receiving(tmp_path) as receiver:
        second = RunningFleet(tmp_path, [each.url for each in made], database=database)
        options = [each for member in made for each in ("--member", member.url)]
        options += ["--database", database, "--public-url", second.url]
        with controller(tmp_path, first, *options) as process:
            await until(lambda: leads(first), 60)
            await second.start()
            try:
                await second.until_ready(2)
                slow_down(made, 3.0)
                job = {**JOB, "url": receiver.url}
                path = await submitted(second, job)
                await until(lambda: is_running(first, path))
                assert (await get(second.url, path))["status"] == "running"
                process.send_signal(signal.SIGKILL)
                slow_down(made, 0.0)
                await until(lambda: has_ended(second, path))
                answer = await second.call("GET", path)
                await until(lambda: delivered(receiver))
                # No second callback comes.
                await asyncio.sleep(0.3)
                received = receiver.store.summary()
            finally:
                await second.kill()
                await second.http.aclose()
    assert answer["status"] == "completed"
    assert [each["nonce"] for each in answer["artifacts"]] == NONCES
    assert [each.artifacts for each in received.sources] == [len(NONCES)]
    assert received.repeats == 0


async def test_jobs_wait_for_a_member_and_for_the_next_start(tmp_path: Path) -> None:
    settings = {"lost_after_sec": LOST_AFTER_S}
    async with members(tmp_path, 1) as made, fleet_of(tmp_path, made, **settings) as fleet:
        slow_down(made, 3.0)
        running, waiting = [await submitted(fleet, JOB) for _ in range(2)]
        await until(lambda: is_running(fleet.url, running))
        await fleet.kill()
        await made[0].kill()
        # Until then the fleet takes the member for ready.
        await asyncio.sleep(LOST_AFTER_S)
        await fleet.start()
        await until(lambda: is_lost(fleet))
        states = [(await fleet.call("GET", each))["status"] for each in (running, waiting)]
        queued = (await fleet.status())["queue"]["queued_nonces"]
        slow_down(made, 0.0)
        await made[0].start()
        for each in (running, waiting):
            await until(lambda path=each: has_ended(fleet, path))
            states.append((await fleet.call("GET", each))["status"])
    assert states == ["queued", "queued", "completed", "completed"]
    assert queued == 2 * len(NONCES)


async def test_a_stop_ends_a_job_that_is_computed(tmp_path: Path) -> None:
    async with members(tmp_path, 1) as made, fleet_of(tmp_path, made) as fleet:
        slow_down(made, 3.0)
        path = await submitted(fleet, JOB)
        await until(lambda: is_running(fleet.url, path))
        await fleet.pow("POST", "/stop")
        cancelled = await fleet.call("GET", path)
        slow_down(made, 0.0)
        # The next one has its turn, and the first one stays cancelled.
        after = await submitted(fleet, JOB)
        await until(lambda: has_ended(fleet, after))
        ended = await fleet.call("GET", path)
    assert cancelled["status"] == ended["status"] == "cancelled"
    assert "artifacts" not in ended


async def test_a_job_is_given_up_after_some_leaders_that_ended_in_it(tmp_path: Path) -> None:
    async with members(tmp_path, 1) as made, fleet_of(tmp_path, made) as fleet:
        slow_down(made, 3.0)
        path = await submitted(fleet, JOB)
        await until(lambda: is_running(fleet.url, path))
        await fleet.kill()
        async with await FleetStore.open(str(tmp_path / "fleet.sqlite")) as store:
            attempts = [await store.requests.begin() for _ in range(4)]
        await fleet.start()
        await until(lambda: has_ended(fleet, path))
        answer = await fleet.call("GET", path)
    assert [each[2] for each in attempts if each] == [2, 3, 4, 5]
    assert answer["status"] == "failed"
    assert answer["error"] == "5 attempts ended without a result"


async def test_a_row_that_cannot_be_read_does_not_hold_up_the_next_job(tmp_path: Path) -> None:
    async with members(tmp_path, 1) as made, fleet_of(tmp_path, made) as fleet:
        slow_down(made, 3.0)
        paths = [await submitted(fleet, JOB) for _ in range(2)]
        await until(lambda: is_running(fleet.url, paths[0]))
        await fleet.kill()
        slow_down(made, 0.0)
        with closing(sqlite3.connect(tmp_path / "fleet.sqlite")) as file, file:
            file.execute("UPDATE fleet_requests SET job = '{}' WHERE number = 1")
        await fleet.start()
        await until(lambda: has_ended(fleet, paths[1]))
        answers = [await fleet.call("GET", path) for path in paths]
    assert [each["status"] for each in answers] == ["failed", "completed"]
    assert answers[0]["error"] == "5 attempts ended without a result"


async def test_an_error_of_a_job_is_kept_and_an_unknown_job_is_404(tmp_path: Path) -> None:
    async with members(tmp_path, 1) as made, fleet_of(tmp_path, made) as fleet:
        made[0].engine.faults = 10**9
        path = await submitted(fleet, JOB)
        await until(lambda: has_ended(fleet, path))
        failed = await fleet.call("GET", path)
        unknown = await fleet.http.get(f"{path}0")
    assert failed["status"] == "failed"
    assert "the toy engine was told to fail" in failed["error"]
    assert unknown.status_code == 404


def slow_down(made: list[FakeMember], latency_s: float) -> None:
    for each in made:
        each.engine.latency_s = latency_s


async def submitted(fleet: RunningFleet, job: dict[str, Any]) -> str:
    answer = await fleet.pow("POST", "/generate", job)
    assert (answer["status"], answer["queued_count"]) == ("queued", len(NONCES))
    return f"/api/v1/pow/generate/{answer['request_id']}"


async def is_running(url: str, path: str) -> bool:
    return bool((await get(url, path))["status"] == "running")


async def has_ended(fleet: RunningFleet, path: str) -> bool:
    try:
        return (await fleet.call("GET", path))["status"] not in ("queued", "running")
    except httpx.TransportError:
        return False


async def is_lost(fleet: RunningFleet) -> bool:
    return bool((await fleet.snapshot())["fleet"]["members"]["lost"])


async def delivered(receiver: Receiver) -> bool:
    return bool(receiver.store.summary().sources)
