"""Random calls in random order: no answer is 500, and the status is always correct."""

import asyncio
import random
from typing import Any

import pytest

from api.distance_bodies import (
    CLAIMS,
    INIT,
    INIT_VALIDATE,
    PHASE_GENERATE,
    PHASE_VALIDATE,
    ROUND,
    VALIDATE,
)
from api.support import GENERATE, JOB, ORDER, START, STOP, Server, serving
from proofserve.protocol.nonces import NonceLane
from proofserve.rounds.state import State

pytestmark = pytest.mark.anyio

# Each step also looks at the status, so a walk is twice as many calls.
STEPS = 500
LANE = NonceLane(1, 3)
DISTANCE = {**ROUND, "callback_url": "http://x"}
# The calls, their bodies, and their allowed statuses besides 200.
CALLS: list[tuple[str, list[Any], set[int]]] = [
    (START, [ORDER, DISTANCE, {**DISTANCE, "use_layer_hooks": True}], {409, 503}),
    (INIT, [DISTANCE, {**DISTANCE, "block_hash": "other"}], {409, 503}),
    (INIT_VALIDATE, [DISTANCE, {**DISTANCE, "node_id": -1}], {409, 503}),
    (PHASE_GENERATE, [None], {400, 409, 503}),
    (PHASE_VALIDATE, [None], {400, 409, 503}),
    (VALIDATE, [CLAIMS, {**CLAIMS, "public_key": "other"}], {400, 409, 429, 503}),
    (STOP, [None], set()),
    (START, [{}, {**ORDER, "r_target": 1.4}, {**DISTANCE, "batch_size": 1}], {422}),
]


class Walker:
    """Makes random calls and random faults on one server."""

    def __init__(self, server: Server, seed: int) -> None:
        self.server = server
        self.random = random.Random(seed)
        self.ids = ["no-such-id"]
        self.background: list[tuple[asyncio.Task[int], set[int]]] = []

    async def call(self, path: str, body: Any = None) -> int:
        response = await self.server.post(path, body)
        if response.status_code == 200 and "queued_count" in response.json():
            self.ids.append(response.json()["request_id"])
        return response.status_code

    async def read(self, path: str) -> int:
        return (await self.server.get(path)).status_code

    def trouble(self) -> None:
        engine, outbox = self.server.engine, self.server.outbox
        engine.deferrals = self.random.choice([0, 0, 1])
        engine.faults = self.random.choice([0, 0, 0, 0, 1, 4])
        engine.not_finite = frozenset(self.random.choice([[], [], [4, 7]]))
        outbox.full = self.random.choice([None, None, None, None, "disk full"])

    async def step(self) -> None:
        self.trouble()
        nonces = self.random.sample(range(50), self.random.randint(1, 40))
        match self.random.randrange(12):
            case 0:
                job = {**JOB, "nonces": nonces, "url": "http://x"}
                assert await self.call(GENERATE, job) in (200, 429)
            case 1:
                job = {**JOB, "nonces": nonces, "wait": True}
                self.leave_behind(GENERATE, job, {429, 503})
            case 2:
                assert await self.read(f"/generate/{self.random.choice(self.ids)}") in (200, 404)
            case 3:
                assert await self.read("/results") in (200, 503)
            case 4:
                await asyncio.sleep(self.random.random() / 100)
            case _:
                path, bodies, refusals = self.random.choice(CALLS)
                body = self.random.choice(bodies)
                if self.random.random() < 0.3:
                    self.leave_behind(path, body, refusals)
                else:
                    assert await self.call(path, body) in {200, *refusals}, path
        await self.check()

    def leave_behind(self, path: str, body: Any, refusals: set[int]) -> None:
        """Start calls of other clients, which run during the next steps."""
        self.background.append((asyncio.create_task(self.call(path, body)), refusals))

    async def check(self) -> None:
        """Assert that the shown state, the loop and the outbox agree."""
        body = await self.server.status()
        manager, outbox = self.server.node.manager, self.server.outbox
        # No await between the two reads: another call could run in between.
        state, current = manager.status().state, manager._round
        task = current.task if current else None
        assert (state is State.GENERATING) == (task is not None and not task.done())
        assert body["status"] == body["state"] in set(State)
        assert body["queue"]["queued_nonces"] <= body["queue"]["limit"]
        for spec in outbox.specs.values():
            stored = [row.nonce for row in outbox.rows if row.round_id == spec.round_id]
            assert len(stored) == len(set(stored))
            if spec.target is None:
                assert sorted(stored) == list(LANE.batch(0, len(stored)))

    async def settle(self) -> None:
        self.server.engine.deferrals = self.server.engine.faults = 0
        self.server.engine.not_finite = frozenset()
        self.server.outbox.full = None
        for task, refusals in self.background[::-1]:
            if not task.done():
                await self.call(STOP)
            assert await task in {200, *refusals}


@pytest.mark.parametrize("seed", [1, 2, 3])
async def test_a_walk_of_a_thousand_calls(seed: int) -> None:
    async with serving() as server:
        walker = Walker(server, seed)
        for _ in range(STEPS):
            await walker.step()
        await walker.settle()
        assert await walker.call(STOP) == 200
        assert (await server.status())["state"] == "STOPPED"
        assert (await server.status())["queue"]["queued_nonces"] == 0
