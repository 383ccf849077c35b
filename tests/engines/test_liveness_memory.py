"""The memory between real processes, and what processes do that the system tells us."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import replace

import pytest

from proofserve.engines.liveness import memory as memory_module
from proofserve.engines.liveness.memory import CoreMemory, CoreReporter, Doing, MemoryAddress
from proofserve.engines.liveness.watch import Activity, activity_between, process_use
from proofserve.engines.vllm.support import UnsupportedEngine

# A core in a process of its own: it prints its address, and ends with its input.
CORE = """
import sys
from dataclasses import astuple
from proofserve.engines.liveness.memory import CoreReporter
core = CoreReporter()
with core.proving():
    core.beat(2, 5)
core.stepped()
print(*astuple(core.join()), flush=True)
sys.stdin.read()
"""


@pytest.fixture
def other_core() -> Iterator[MemoryAddress]:
    command = [sys.executable, "-c", CORE]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        number, descriptor, token, place = process.stdout.readline().split()
        yield MemoryAddress(int(number), int(descriptor), float(token), int(place))


def test_another_process_reads_what_a_core_wrote(other_core: MemoryAddress) -> None:
    memory = CoreMemory.of_core(other_core)
    record = memory.read()
    assert (record.steps, record.doing, record.work, record.known) == (2, Doing.NOTHING, 2, 5)
    assert 0 <= time.monotonic() - record.beat < 60
    assert memory.servers() == []
    memory.write_server(other_core.place, (1.5, 3))
    assert CoreMemory.of_core(other_core).servers() == [(1.5, 3)]


def test_an_address_that_leads_elsewhere_is_refused(other_core: MemoryAddress) -> None:
    with pytest.raises(OSError, match="another engine core"):
        CoreMemory.of_core(replace(other_core, token=1.0))
    reading, writing = os.pipe()
    try:
        for descriptor in (reading, writing):
            with pytest.raises(OSError, match="not the memory"):
                CoreMemory.of_core(MemoryAddress(os.getpid(), descriptor, 1.0, 0))
    finally:
        os.close(reading)
        os.close(writing)
    with pytest.raises(OSError, match="cannot be opened"):
        CoreMemory.of_core(replace(other_core, process=2**22 + 1))


def test_a_core_says_what_it_does_and_returns_to_it() -> None:
    core = CoreReporter()
    memory = CoreMemory.of_core(core.join())
    with core.doing(Doing.CHAT):
        assert memory.read().doing == Doing.CHAT
        with suppress(ZeroDivisionError), core.proving():
            assert memory.read().doing == Doing.PROOF
            1 / 0  # noqa: B018
        assert (memory.read().doing, memory.read().steps) == (Doing.CHAT, 1)
    assert memory.read().doing == Doing.NOTHING


def test_each_api_process_has_a_place(monkeypatch: pytest.MonkeyPatch) -> None:
    core = CoreReporter()
    assert memory_module.PLACES == 256
    monkeypatch.setattr(memory_module, "PLACES", 2)
    assert [core.join().place for _ in range(2)] == [0, 1]
    with pytest.raises(UnsupportedEngine, match="more than 2 API processes"):
        core.join()


@pytest.fixture
def program(request: pytest.FixtureRequest) -> Iterator["subprocess.Popen[bytes]"]:
    with subprocess.Popen([sys.executable, "-c", request.param], stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        process.stdout.readline()
        yield process
        process.kill()


def comes_to(process: int, expected: Activity) -> bool:
    """One of ten looks shows it: a process that waits for a processor may show anything."""
    return any(seen(process) is expected for _ in range(10))


def seen(process: int, seconds: float = 0.4) -> Activity:
    before, began = process_use(process), time.monotonic()
    time.sleep(seconds)
    return activity_between(before, process_use(process), process, time.monotonic() - began)


SPINS = "print(flush=True)\nwhile True: pass"
SLEEPS = "import time\nprint(flush=True)\ntime.sleep(100)"
# A worker, as one that compiles or computes while the core waits for it.
CHILD_SPINS = f"""
import subprocess, sys
with subprocess.Popen([sys.executable, "-c", {SPINS!r}], stdout=subprocess.PIPE) as child:
    child.stdout.readline()
    print(flush=True)
    child.wait()
"""


@pytest.mark.parametrize(
    ("program", "expected"),
    [(SPINS, Activity.WORKING), (SLEEPS, Activity.QUIET), (CHILD_SPINS, Activity.WORKING)],
    indirect=["program"],
    ids=["computes", "waits", "waits for a worker that computes"],
)
def test_what_a_process_does(program: "subprocess.Popen[bytes]", expected: Activity) -> None:
    family = list(process_use(program.pid))
    try:
        assert comes_to(program.pid, expected)
        os.kill(family[-1], signal.SIGSTOP)
        assert comes_to(program.pid, Activity.STOPPED)
        os.kill(family[-1], signal.SIGCONT)
        assert comes_to(program.pid, expected)
    finally:
        for each in family:
            os.kill(each, signal.SIGKILL)
    program.wait()
    assert seen(program.pid, 0.0) is Activity.GONE
