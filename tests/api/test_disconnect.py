"""When a client disconnects, its job is cancelled: with a real server and real sockets."""

import asyncio
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import httpx
import pytest
import uvicorn

from api.support import GENERATE, JOB, ORDER, START, Server, serving
from support.pace import until

pytestmark = pytest.mark.anyio

WAIT = {**JOB, "wait": True}


@asynccontextmanager
async def listening(server: Server) -> AsyncIterator[httpx.AsyncClient]:
    with socket.socket() as bound:
        bound.bind(("127.0.0.1", 0))
        bound.listen()
        config = uvicorn.Config(server.app, log_level="error", lifespan="off", ws="none")
        real = uvicorn.Server(config)
        running = asyncio.create_task(real.serve(sockets=[bound]))
        await until(lambda: real.started)
        address = f"http://127.0.0.1:{bound.getsockname()[1]}/api/v1/pow"
        try:
            async with httpx.AsyncClient(base_url=address) as client:
                yield client
        finally:
            real.should_exit = True
            await running


def queued(server: Server) -> int:
    return server.node.manager.status().queue.queued_nonces


async def left(asking: "asyncio.Task[httpx.Response]") -> None:
    asking.cancel()
    with pytest.raises(asyncio.CancelledError):
        await asking


async def test_a_running_job_is_cancelled_when_its_client_disconnects() -> None:
    async with serving() as server, listening(server) as client:
        server.engine.latency_s = 60
        asking = asyncio.create_task(client.post(GENERATE, json=WAIT))
        await until(lambda: len(server.engine.calls) == 1)
        await left(asking)
        await until(lambda: server.engine.leases == 0 and queued(server) == 0)
        server.engine.latency_s = 0
        assert (await client.post(GENERATE, json=WAIT)).status_code == 200


async def test_a_waiting_job_is_cancelled_when_its_client_disconnects() -> None:
    async with serving() as server, listening(server) as client:
        await client.post(START, json=ORDER)
        job = {**WAIT, "nonces": [10**6]}
        asking = asyncio.create_task(client.post(GENERATE, json=job))
        await until(lambda: queued(server) == 1)
        await left(asking)
        await until(lambda: queued(server) == 0)
        await client.post("/stop")
        await asyncio.sleep(0.02)
        assert (10**6,) not in server.engine.calls


async def test_a_client_that_stays_connected_gets_its_answer() -> None:
    async with serving() as server, listening(server) as client:
        server.engine.latency_s = 0.1
        response = await client.post(GENERATE, json=WAIT)
        assert response.status_code == 200
        assert len(response.json()["artifacts"]) == 4
