"""The watch over real processes: one that hangs is reported, one that works or idles is not."""

import asyncio
import os
import signal
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

import pytest

from proofserve.engines.liveness import watch as watch_module
from proofserve.engines.liveness.memory import CoreMemory, MemoryAddress
from proofserve.engines.liveness.watch import CoreView, LivenessWatch
from proofserve.rounds.status import CoreLiveness
from support.pace import until

pytestmark = pytest.mark.anyio

LIMIT_S = 1.0
LOOK_S = 0.1
# A core whose loop follows its input: a line "chat compute", "proof wait", or "idle".
# A step that waits does so until the next line.
CORE = """
import sys, threading, time
from contextlib import nullcontext
from dataclasses import astuple
from proofserve.engines.liveness.memory import Doing
from proofserve.engines.liveness.memory import CoreReporter

core = CoreReporter()
work = 0

def beat():
    while True:
        core.beat(work, work)
        time.sleep(0.1)

threading.Thread(target=beat, daemon=True).start()
print(*astuple(core.join()), flush=True)
for line in sys.stdin:
    what, _, how = line.strip().partition(" ")
    work = 0 if what == "idle" else 1
    step = {"chat": lambda: core.doing(Doing.CHAT), "proof": core.proving}.get(what, nullcontext)
    with step():
        if how == "wait":
            sys.stdin.readline()
        end = time.monotonic() + 4.0
        while how == "compute" and time.monotonic() < end:
            pass
    work = 0
    print("done", flush=True)
"""


class Watched:
    """A core's process, and a watch with the limit ``LIMIT_S``."""

    def __init__(self, process: asyncio.subprocess.Process, address: MemoryAddress) -> None:
        self.process = process
        self.asked = 0
        core = CoreView(0, address, CoreMemory.of_core(address))
        self.watch = LivenessWatch([core, None], lambda: [self.asked, 0], LIMIT_S)

    @property
    def seen(self) -> CoreLiveness:
        return self.watch.read()[0]

    def do(self, what: str) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write(f"{what}\n".encode())

    async def until(self, condition: Callable[[], bool]) -> float:
        """Seconds until ``condition`` holds."""
        began = time.monotonic()
        await until(condition, 20.0)
        return time.monotonic() - began


@pytest.fixture
async def core(monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Watched]:
    monkeypatch.setattr(watch_module, "LOOK_S", LOOK_S)
    monkeypatch.setattr(watch_module, "SHORT_S", 2 * LOOK_S)
    async with running() as watched:
        yield watched


@asynccontextmanager
async def running() -> AsyncIterator[Watched]:
    pipe = subprocess.PIPE
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-c", CORE, stdin=pipe, stdout=pipe
    )
    assert process.stdout is not None
    number, descriptor, token, place = (await process.stdout.readline()).split()
    address = MemoryAddress(int(number), int(descriptor), float(token), int(place))
    watched = Watched(process, address)
    tasks = [
        asyncio.create_task(watched.watch.run()),
        asyncio.create_task(watched.watch.run_counts()),
    ]
    try:
        yield watched
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        if process.returncode is None:
            process.kill()
            await process.wait()


@pytest.mark.parametrize("what", ["chat", "proof"])
async def test_a_core_that_waits_for_ever_in_a_step_is_reported(core: Watched, what: str) -> None:
    core.do(f"{what} wait")
    await core.until(lambda: core.seen.stalled)
    assert core.seen.waited_s >= LIMIT_S
    assert core.seen.reason is not None
    assert core.seen.reason.startswith(f"engine core 0 (process {core.process.pid}) has work")
    assert "uses no processor time, in a" in core.seen.reason
    core.do("goes on")
    await core.until(lambda: core.seen.waited_s == 0)
    assert (core.seen.stalled, core.seen.reason, core.seen.doing) == (False, None, "nothing")


async def test_a_step_that_computes_for_four_times_the_limit_is_not(core: Watched) -> None:
    core.do("chat compute")
    longest = 0.0
    async with asyncio.timeout(30):
        while longest == 0 or core.seen.waited_s > 0:
            assert not core.seen.stalled
            longest = max(longest, core.seen.waited_s)
            await asyncio.sleep(0.05)
    assert longest > LIMIT_S


async def test_a_stopped_core_is_reported_and_goes_on(
    core: Watched, caplog: pytest.LogCaptureFixture
) -> None:
    core.do("chat compute")
    await core.until(lambda: core.seen.doing == "chat")
    os.kill(core.process.pid, signal.SIGSTOP)
    assert await core.until(lambda: core.seen.stalled) < LIMIT_S + 15
    assert core.seen.reason is not None
    assert "SIGSTOP" in core.seen.reason
    os.kill(core.process.pid, signal.SIGCONT)
    await core.until(lambda: not core.seen.stalled)
    await core.until(lambda: core.seen.doing == "nothing")
    logged = [record.getMessage() for record in caplog.records if "engine core" in record.message]
    # On a busy machine it may hang, and go on, again.
    hangs, ends = logged[::2], logged[1::2]
    assert len(hangs) == len(ends) >= 1
    assert all("restart the server if it does not go on" in each for each in hangs)
    assert all("goes on" in each for each in ends)


async def test_an_idle_core_is_not_reported_even_if_it_is_stopped_until_it_is_asked(
    core: Watched,
) -> None:
    await asyncio.sleep(2 * LIMIT_S)
    assert (core.seen.waited_s, core.seen.stalled) == (0, False)
    os.kill(core.process.pid, signal.SIGSTOP)
    await asyncio.sleep(2 * LIMIT_S)
    assert not core.seen.stalled
    core.asked = 1
    assert await core.until(lambda: core.seen.stalled) < LIMIT_S + 15
    os.kill(core.process.pid, signal.SIGCONT)


async def test_a_core_that_dies_with_work_is_reported(core: Watched) -> None:
    core.do("chat compute")
    await core.until(lambda: core.seen.doing == "chat")
    core.process.kill()
    await core.until(lambda: core.seen.stalled)
    assert core.seen.reason is not None
    assert "has no process any more" in core.seen.reason


async def test_a_core_that_cannot_be_seen_is_said_to_be_unwatched(core: Watched) -> None:
    assert core.watch.read()[1] == CoreLiveness(1, watched=False)
