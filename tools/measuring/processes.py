"""The processes of a measurement: each has a log and a limit, and ends with all that it started."""

import math
import os
import re
import signal
import subprocess
import time
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from proofserve.settings.process import environment

# Servers that a process starts have sessions of their own. By this variable they are found.
MARK: Final = "PROOFSERVE_MEASURED"
# How long a process may take to end after SIGTERM, and what it started to end after it, seconds.
END_S, CHILDREN_S = 30.0, 5.0
POLL_S: Final = 0.05
TICKS: Final = os.sysconf("SC_CLK_TCK")
PAGE_MB: Final = os.sysconf("SC_PAGE_SIZE") / 1e6
# Fields of /proc/PID/stat, counted after the command's name.
STATE, SESSION, USER_TICKS, SYSTEM_TICKS, RESIDENT_PAGES = 0, 3, 11, 12, 21
# The characters that command lines draw around error messages.
FRAME: Final = " ╭╮╰╯│─"
ESCAPES: Final = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]")


class ProcessFailed(RuntimeError):
    """A process ended, or is not ready in time; the text has what it printed last."""


@dataclass(frozen=True, slots=True)
class Usage:
    """CPU seconds so far and resident megabytes now, of a process and all that it started."""

    cpu_s: float
    rss_mb: float


@dataclass(frozen=True, slots=True)
class Ended:
    """How a process ended: its exit code, or None if it was stopped at its limit."""

    code: int | None
    seconds: float
    printed: str

    @property
    def last_line(self) -> str:
        return last_line(self.printed)


class Process:
    """Runs ``argv``, on one ``core`` if it is given; what it prints goes to ``log``."""

    def __init__(
        self,
        argv: Sequence[str],
        log: Path,
        env: Mapping[str, str],
        cwd: Path | None,
        core: int | None,
    ) -> None:
        self.log = log
        self._mark = uuid.uuid4().hex
        self._began = time.monotonic()
        with log.open("wb") as out:
            self._process = subprocess.Popen(
                argv if core is None else pinned(argv, core),
                env=environment({**env, MARK: self._mark}),
                cwd=cwd,
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )

    @property
    def code(self) -> int | None:
        """The exit code; None while it runs."""
        return self._process.poll()

    @property
    def printed(self) -> str:
        """Its log so far, without what a terminal would show as colours and progress."""
        return ESCAPES.sub("", self.log.read_text(errors="replace"))

    @property
    def last_line(self) -> str:
        return last_line(self.printed)

    def usage(self) -> Usage:
        ticks = pages = 0
        for _, fields in self._family():
            ticks += int(fields[USER_TICKS]) + int(fields[SYSTEM_TICKS])
            pages += int(fields[RESIDENT_PAGES])
        return Usage(ticks / TICKS, pages * PAGE_MB)

    def wait(
        self, limit_s: float = math.inf, waiting: Callable[[float], None] = lambda _seconds: None
    ) -> Ended:
        """Wait until it ends, or runs for ``limit_s``; ``waiting`` gets the seconds so far."""
        while self.code is None and (seconds := time.monotonic() - self._began) < limit_s:
            waiting(seconds)
            with suppress(subprocess.TimeoutExpired):
                self._process.wait(0.2)
        return Ended(self.code, time.monotonic() - self._began, self.printed)

    def stop(self, end_s: float | None = None) -> None:
        """End it by SIGTERM, so that it ends what it started, and by SIGKILL what is left then."""
        if self.code is None:
            self._process.terminate()
            with suppress(subprocess.TimeoutExpired):
                self._process.wait(END_S if end_s is None else end_s)
        deadline = time.monotonic() + CHILDREN_S
        while self.code is not None and any(self._family()) and time.monotonic() < deadline:
            time.sleep(POLL_S)
        for number, _ in self._family():
            with suppress(ProcessLookupError):
                os.kill(number, signal.SIGKILL)
        self._process.wait()

    def _family(self) -> Iterator[tuple[int, list[str]]]:
        """The number of this process and of each that it started, and its fields in /proc."""
        mark = f"{MARK}={self._mark}".encode()
        for folder in Path("/proc").glob("[0-9]*"):
            # A process may end meanwhile.
            with suppress(OSError):
                fields = (folder / "stat").read_text().rpartition(")")[2].split()
                is_ours = int(fields[SESSION]) == self._process.pid
                if fields[STATE] != "Z" and (
                    is_ours or mark in (folder / "environ").read_bytes().split(b"\0")
                ):
                    yield int(folder.name), fields


def last_line(printed: str) -> str:
    """The last line that says something; empty if none does."""
    lines = reversed(printed.splitlines())
    return next((found for line in lines if (found := line.strip(FRAME))), "")[:300]


def pinned(argv: Sequence[str], core: int) -> list[str]:
    """The command that runs ``argv`` on ``core`` alone, with all its threads."""
    return ["taskset", "--cpu-list", str(core), *argv]


@contextmanager
def running(
    argv: Sequence[str],
    log: Path,
    *,
    env: Mapping[str, str] | None = None,
    cwd: Path | None = None,
    core: int | None = None,
    end_s: float | None = None,
) -> Iterator[Process]:
    """A process until the context ends. ``env`` is beside this process's own environment."""
    process = Process(argv, log, env or {}, cwd, core)
    try:
        yield process
    finally:
        process.stop(end_s)


def wait_until(
    condition: Callable[[], bool], what: str, processes: Sequence[Process], limit_s: float
) -> None:
    """Poll ``condition`` while ``processes`` run. Raises ProcessFailed, which names ``what``."""
    deadline = time.monotonic() + limit_s
    while not condition():
        ended = [each for each in processes if each.code is not None]
        if ended or time.monotonic() > deadline:
            why = "a process ended" if ended else f"{limit_s:g} s have passed"
            last = "; ".join(each.last_line or "its log is empty" for each in ended or processes)
            raise ProcessFailed(f"{what} is not ready, {why}: {last}")
        time.sleep(POLL_S)
