"""The parent of vLLM's server passes signals on and keeps the server's exit code."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from proofserve.settings.process import environment
from support.pace import PACE
from support.processes import has_ended

# Stands for vLLM's server: says that it runs, with its process id, and then does as it is told.
STARTING = "import os, time; print(os.getpid(), flush=True); "
LOADS_A_MODEL = STARTING + "time.sleep(60)"
ENDS = STARTING + "raise SystemExit(7)"
SERVES = (
    "import signal, sys; signal.signal(signal.SIGTERM, lambda *_: sys.exit(0)); " + LOADS_A_MODEL
)
# As vLLM while it waits for its engine core: the first signal changes nothing.
LOSES_A_SIGNAL = (
    "import signal, sys; seen = []; "
    "signal.signal(signal.SIGTERM, lambda *_: sys.exit(0) if seen else seen.append(1)); "
    + LOADS_A_MODEL
)


# As vLLM, whose process waits for its engine when Python ends.
ENDS_SLOWLY = "import atexit, time; atexit.register(time.sleep, 5); " + LOADS_A_MODEL


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path


def started(folder: Path, code: str) -> "tuple[subprocess.Popen[str], int]":
    """The parent of a server that runs ``code``, and the server's process id."""
    (folder / "toy_server.py").write_text(code.replace("; ", "\n"))
    process = subprocess.Popen(
        [sys.executable, "-m", "proofserve.wiring.server_process", "toy_server"],
        env=environment({"PYTHONPATH": str(folder)}),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        # As a shell does, so that a signal to the group is what a terminal sends.
        start_new_session=True,
    )
    assert process.stdout is not None
    return process, int(process.stdout.readline())


def ended(process: "subprocess.Popen[str]") -> tuple[int, list[str]]:
    _, said = process.communicate(timeout=60)
    return process.returncode, said.splitlines()


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_a_signal_during_the_start_ends_the_server_with_one_line(
    number: signal.Signals, code: int, folder: Path
) -> None:
    process, server = started(folder, LOADS_A_MODEL)
    os.killpg(process.pid, number)
    returncode, (line,) = ended(process)
    assert returncode == code
    assert line == f"proofserve serve: the server ended during its start, after {number.name}"
    with pytest.raises(ProcessLookupError):
        os.kill(server, 0)


def test_ctrl_c_at_a_server_that_serves_ends_it_in_order(folder: Path) -> None:
    process, _ = started(folder, SERVES)
    os.killpg(process.pid, signal.SIGINT)
    assert ended(process) == (0, [])


def test_a_signal_that_the_server_loses_is_sent_again(folder: Path) -> None:
    process, _ = started(folder, LOSES_A_SIGNAL)
    os.killpg(process.pid, signal.SIGINT)
    assert ended(process) == (0, [])


def test_a_server_that_ends_slowly_is_not_disturbed_again(folder: Path) -> None:
    process, _ = started(folder, ENDS_SLOWLY)
    os.killpg(process.pid, signal.SIGINT)
    returncode, lines = ended(process)
    assert (returncode, len(lines)) == (130, 1)


def test_the_servers_exit_code_is_kept(folder: Path) -> None:
    assert ended(started(folder, ENDS)[0]) == (7, [])


def test_a_server_that_is_killed_is_reported_as_by_a_shell(folder: Path) -> None:
    process, server = started(folder, LOADS_A_MODEL)
    os.kill(server, signal.SIGKILL)
    assert ended(process) == (137, [])


def test_the_server_ends_when_its_parent_is_killed(folder: Path) -> None:
    process, server = started(folder, SERVES)
    process.kill()
    process.communicate(timeout=60)
    deadline = time.monotonic() + 30 * PACE
    while not has_ended(server):
        assert time.monotonic() < deadline
        time.sleep(0.05)
