"""Processes pinned to a core and measured through /proc; they end with their context."""

import os
import signal
import subprocess
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

TICKS = os.sysconf("SC_CLK_TCK")
PAGE_MB = os.sysconf("SC_PAGE_SIZE") / 1e6
# Seconds that a process may take to end when it is asked to.
END_S = 5.0
# The characters that command lines draw around error messages.
FRAME = " ╭╮╰╯│─"
# Fields of /proc/PID/stat, counted after the command's name.
SESSION, USER_TICKS, SYSTEM_TICKS, RESIDENT_PAGES = 3, 11, 12, 21


def pinned(argv: Sequence[str], core: int) -> list[str]:
    """The command that runs ``argv`` on ``core`` alone, with all its threads."""
    return ["taskset", "--cpu-list", str(core), *argv]


@dataclass(frozen=True, slots=True)
class Usage:
    """CPU seconds so far and resident megabytes now, of a process and all its descendants."""

    cpu_s: float
    rss_mb: float


class Service:
    """A running server. It leads its own session, so that every process that it starts is found."""

    def __init__(self, process: subprocess.Popen[bytes], log: Path) -> None:
        self._process = process
        self._log = log

    @property
    def runs(self) -> bool:
        """Whether the server still runs."""
        return self._process.poll() is None

    def usage(self) -> Usage:
        """The usage of the whole session."""
        ticks = pages = 0
        for fields in _sessions(self._process.pid):
            ticks += int(fields[USER_TICKS]) + int(fields[SYSTEM_TICKS])
            pages += int(fields[RESIDENT_PAGES])
        return Usage(ticks / TICKS, pages * PAGE_MB)

    def last_log_line(self) -> str:
        """The last line of its log that is not empty."""
        text = self._log.read_text(errors="replace")
        lines = [plain for line in text.splitlines() if (plain := line.strip(FRAME))]
        return lines[-1][:200] if lines else "its log is empty"

    def stop(self) -> None:
        """End the server and every process that it started."""
        self._signal(signal.SIGTERM)
        deadline = time.monotonic() + END_S
        while self._is_there() and time.monotonic() < deadline:
            time.sleep(0.02)
        self._signal(signal.SIGKILL)
        self._process.wait()

    def _is_there(self) -> bool:
        # Polling also reaps the leader, which would otherwise stay in its session as a zombie.
        return self.runs or any(True for _ in _sessions(self._process.pid))

    def _signal(self, number: signal.Signals) -> None:
        with suppress(ProcessLookupError):
            os.killpg(self._process.pid, number)


@contextmanager
def running(argv: Sequence[str], core: int, folder: Path) -> Iterator[Service]:
    """A server on ``core`` until the context ends; its working folder and log are ``folder``."""
    log = folder / "server.log"
    with log.open("wb") as sink:
        process = subprocess.Popen(
            pinned(argv, core),
            cwd=folder,
            stdin=subprocess.DEVNULL,
            stdout=sink,
            stderr=sink,
            start_new_session=True,
        )
    service = Service(process, log)
    try:
        yield service
    finally:
        service.stop()


def _sessions(leader: int) -> Iterator[list[str]]:
    for entry in Path("/proc").iterdir():
        if not entry.name.isdigit():
            continue
        # A process may end between the two steps.
        with suppress(OSError):
            fields = (entry / "stat").read_text().rpartition(")")[2].split()
            if int(fields[SESSION]) == leader and fields[0] != "Z":
                yield fields
