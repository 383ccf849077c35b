"""Whatever is asked in whatever order: never a 500, and what is shown is what is so."""

import asyncio
import random

import pytest

from api.support import GENERATE, JOB, ORDER, START, STATUS, STOP, Server, serving
from proofserve.protocol.nonces import NonceLane

pytestmark = pytest.mark.anyio

CALLS = 300
LANE = NonceLane(1, 3)


class Walker:
    """Makes random calls and random trouble on one server."""

    def __init__(self, server: Server, seed: int) -> None:
        self.server = server
        self.random = random.Random(seed)
        self.ids = ["no-such-id"]
        self.waiting: list[asyncio.Task[object]] = []

    async def call(self, path: str, **changes: object) -> int:
        if path in (STATUS, "/results", "/versions") or path.startswith("/generate/"):
            response = await self.server.get(path)
        else:
            body = {START: ORDER, GENERATE: JOB}.get(path, {})
            response = await self.server.post(path, {**body, **changes})
        if response.status_code == 200 and "queued_count" in response.json():
            self.ids.append(response.json()["request_id"])
        return response.status_code

    async def step(self) -> None:
        engine, outbox = self.server.engine, self.server.outbox
        engine.deferrals = self.random.choice([0, 0, 1])
        engine.faults = self.random.choice([0, 0, 0, 0, 1, 4])
        engine.not_finite = frozenset(self.random.choice([[], [], [4, 7]]))
        outbox.full = self.random.choice([None, None, None, None, "disk full"])
        nonces = self.random.sample(range(50), self.random.randint(1, 40))
        match self.random.randrange(9):
            case 0 | 1:
                assert await self.call(START) in (200, 409, 503)
            case 2:
                assert await self.call(STOP) == 200
            case 3 | 4:
                assert await self.call(GENERATE, nonces=nonces, url="http://x") in (200, 429)
            case 5:
                job = self.call(GENERATE, nonces=nonces, wait=True)
                self.waiting.append(asyncio.create_task(job))
            case 6:
                assert await self.call(f"/generate/{self.random.choice(self.ids)}") in (200, 404)
            case 7:
                assert await self.call("/results") in (200, 503)
            case 8:
                await asyncio.sleep(self.random.random() / 100)
        await self.check()

    async def check(self) -> None:
        """The state that is shown, the loop and the outbox agree."""
        body = await self.server.status()
        manager, outbox = self.server.node.manager, self.server.outbox
        task = manager._round_task
        assert (manager.status().state == "GENERATING") == (task is not None and not task.done())
        assert body["status"] in ("IDLE", "GENERATING", "STOPPED")
        assert body["queue"]["queued_nonces"] <= body["queue"]["limit"]
        for round_id in outbox.open:
            stored = sorted(row.nonce for row in outbox.rows if row.round_id == round_id)
            assert stored == list(LANE.batch(0, len(stored)))


@pytest.mark.parametrize("seed", [1, 2])
async def test_a_random_walk(seed: int) -> None:
    async with serving() as server:
        walker = Walker(server, seed)
        for _ in range(CALLS // 2):
            await walker.step()
        server.engine.deferrals = server.engine.faults = 0
        server.outbox.full = None
        assert await walker.call(STOP) == 200
        assert {await task for task in walker.waiting} <= {200, 429, 503}
        assert (await server.status())["status"] == "STOPPED"
        assert (await server.status())["queue"]["queued_nonces"] == 0
