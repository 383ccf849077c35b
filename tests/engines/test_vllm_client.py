"""The API process's side of several engine cores, without the cores."""

import asyncio
from typing import Any

import numpy as np
import pytest

from proofserve.engines.vllm import client, core_messages
from proofserve.engines.vllm.client import VllmEngine
from proofserve.rounds.errors import EngineFault
from proofserve.rounds.records import Deferred, ProofBatch
from rounds.doubles import WORK
from support.fake_engine import TOY_ENGINE_INFO
from support.pace import until

pytestmark = pytest.mark.anyio

GAUGES: dict[str, Any] = {
    "forwards": 3,
    "forward_counts": [1, 2],
    "busy_s": 1.5,
    "deferred_s": 0.5,
    "last_forward_s": 0.1,
    "longest_chat_wait_s": 0.2,
    "longest_chat_wait_batches": 0.5,
    "resume_ms": [7.0],
    "leased_blocks": 4,
    "free_blocks": 96,
    "unfinished_requests": 1,
}


class Cores:
    """The ``engine_core`` of an engine client: notes every call, and answers by ``replies``."""

    def __init__(self, cores: int) -> None:
        self.engine_core = self
        self.core_engines = [core.to_bytes(2, "little") for core in range(cores)]
        self.calls: list[tuple[int, str]] = []
        self.in_chat: set[int] = set()
        self.broken: set[int] = set()
        self.most_done = 100

    async def _call_utility_async(self, method: str, *args: Any, engine: bytes) -> Any:
        core = int.from_bytes(engine, "little")
        self.calls.append((core, method))
        await asyncio.sleep(0.005)
        if method == client.PROVE:
            return self._proved(core, args[0]["nonces"])
        if method == client.MEASURE:
            return {"seconds": 1.0 + core, "nonces": 8}
        return GAUGES if method == client.GAUGES else None

    def _proved(self, core: int, nonces: tuple[int, ...]) -> dict[str, Any]:
        if core in self.broken:
            return core_messages.fault(f"core {core} is broken")
        if core in self.in_chat:
            return core_messages.deferred("chat has the engine", 0.1)
        done = min(len(nonces), self.most_done)
        rows = np.array([[nonce + core / 2] for nonce in nonces[:done]], np.float32)
        return core_messages.proved(rows, [], done)

    def called(self, method: str) -> list[int]:
        return [core for core, name in self.calls if name == method]


def engine_on(cores: Cores) -> VllmEngine:
    return VllmEngine(cores, TOY_ENGINE_INFO, defer_s=1.0, timeout_s=5.0)


async def test_a_session_of_a_core_stays_there() -> None:
    cores = Cores(3)
    engine = engine_on(cores)
    assert engine.cores == 3
    cores.in_chat = {2}
    async with engine.session(WORK, 2) as prove:
        assert isinstance(await prove([1, 2]), Deferred)
        assert isinstance(await prove([1, 2]), Deferred)
    assert cores.called(client.PROVE) == [2, 2]
    assert cores.called(client.RELEASE) == [2]


async def test_other_sessions_begin_on_one_core_after_the_other_and_leave_one_in_chat() -> None:
    cores = Cores(3)
    engine = engine_on(cores)
    for _ in range(4):
        async with engine.session(WORK) as prove:
            await prove([1])
    assert cores.called(client.PROVE) == [0, 1, 2, 0]
    cores.in_chat = {1}
    async with engine.session(WORK) as prove:
        assert isinstance(await prove([1]), Deferred)
        assert isinstance(await prove([1]), ProofBatch)
        assert isinstance(await prove([2]), ProofBatch)
    assert cores.called(client.PROVE)[4:] == [1, 2, 2]
    assert sorted(cores.called(client.RELEASE)[4:]) == [1, 2]


async def test_parts_of_a_deferred_call_are_kept_and_the_rest_is_asked_for() -> None:
    cores = Cores(1)
    cores.most_done = 2
    async with engine_on(cores).session(WORK, 0) as prove:
        first = asyncio.create_task(prove([1, 2, 3, 4, 5]))
        await until(lambda: len(cores.called(client.PROVE)) >= 2)
        cores.in_chat = {0}
        assert isinstance(await first, Deferred)
        cores.in_chat = set()
        batch = await prove([1, 2, 3, 4, 5])
    assert isinstance(batch, ProofBatch)
    assert batch.values[:, 0].tolist() == [1, 2, 3, 4, 5]
    # Two nonces a call, and those of the first calls were not computed again.
    assert len(cores.called(client.PROVE)) <= 5


async def test_a_fault_names_its_core_and_the_lease_is_returned() -> None:
    cores = Cores(2)
    cores.broken = {1}
    with pytest.raises(EngineFault, match="core 1 is broken"):
        async with engine_on(cores).session(WORK, 1) as prove:
            await prove([1])
    assert cores.called(client.RELEASE) == [1]


async def test_gauges_measurements_and_a_takeover_ask_every_core() -> None:
    cores = Cores(2)
    engine = engine_on(cores)
    gauges = await engine.gauges()
    assert (gauges.forwards, gauges.forward_counts, gauges.free_blocks) == (6, (2, 4), 192)
    assert [core.resume_ms for core in gauges.cores] == [(7.0,), (7.0,)]
    assert await engine.measure(WORK, [1], 2) == (16, 2.0)
    await engine.take_over()
    assert sorted(cores.called(client.TAKE_OVER)) == [0, 1]
