"""Runs one step in a process group of its own, with a time limit, and reads what came of it."""

import json
import os
import re
import signal
import subprocess
import time
import uuid
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from gpu.report import FAILED, PASSED, SKIPPED, StepResult
from gpu.steps import Step
from proofserve.settings.process import environment

# Lines of the log that the report keeps.
TAIL, SERVER_TAIL = 40, 80
# After SIGTERM a step stops its servers; then its whole group is killed.
GRACE_S = 30.0
# Servers have process groups of their own. By this variable they are found if their step died.
MARK = "PROOFSERVE_GPU_STEP"
POLL_S = 0.2
SERVER_LOG = re.compile(r"The whole log was kept as (\S+)")
# A server that says this does not support what the step asks for: no fault of the host.
REFUSED = re.compile(r"^.*UnsupportedEngine: (.+)$", re.MULTILINE)
# A step's output goes to a file: at once, in lines as wide as a table.
PRINTING = {"PYTHONUNBUFFERED": "1", "COLUMNS": "160"}
# What the terminal shows about colours and progress is no part of a log.
ESCAPES = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]")


@dataclass(frozen=True, slots=True)
class Ended:
    """How a process ended: its exit code, or None if it was stopped at its limit."""

    code: int | None
    seconds: float


def run_step(
    step: Step, folder: Path, limit_s: float, waiting: Callable[[float], None]
) -> StepResult:
    """Run ``step``; it writes its files in ``folder``. ``waiting`` gets the seconds so far.

    KeyboardInterrupt, raised by a signal meanwhile, stops the step and goes on.
    """
    log, record = folder / f"{step.name}.log", folder / f"{step.name}.json"
    record.unlink(missing_ok=True)
    ended = _run(step, log, min(limit_s, step.limit_s), waiting)
    text = ESCAPES.sub("", log.read_text(errors="replace"))
    server = _server_log(text)
    found = _read(record)
    outcome, reason = _outcome(ended, text, server, found)
    if outcome == FAILED and found is not None and ended.code in step.finds:
        outcome, reason = PASSED, None
    shown = _tail(text, TAIL)
    if outcome == FAILED and server:
        shown += f"\n--- the server's log ---\n{_tail(server, SERVER_TAIL)}"
    return StepResult(
        step.name, step.title, outcome, reason, round(ended.seconds, 2), step.argv, found, shown
    )


def _run(step: Step, log: Path, limit_s: float, waiting: Callable[[float], None]) -> Ended:
    began, mark = time.monotonic(), uuid.uuid4().hex
    with log.open("wb") as out:
        process = subprocess.Popen(
            step.argv,
            env=environment({**PRINTING, **step.env, MARK: mark}),
            stdin=subprocess.DEVNULL,
            stdout=out,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        try:
            while process.poll() is None and time.monotonic() - began < limit_s:
                waiting(time.monotonic() - began)
                with suppress(subprocess.TimeoutExpired):
                    process.wait(POLL_S)
            code = process.poll()
        finally:
            _end(process, mark)
    return Ended(code, time.monotonic() - began)


def _end(process: "subprocess.Popen[bytes]", mark: str) -> None:
    """End what is left of a step: by SIGTERM first, so that it stops its servers itself."""
    if process.poll() is None:
        process.terminate()
        with suppress(subprocess.TimeoutExpired):
            process.wait(GRACE_S)
    for left in _marked(mark):
        with suppress(ProcessLookupError):
            os.kill(left, signal.SIGKILL)
    process.wait()


def _marked(mark: str) -> list[int]:
    """The processes that inherited ``mark`` from their step."""
    found = []
    for folder in Path("/proc").iterdir():
        if folder.name.isdecimal():
            with suppress(OSError):
                if mark.encode() in (folder / "environ").read_bytes():
                    found.append(int(folder.name))
    return found


def _outcome(
    ended: Ended, text: str, server: str, record: Mapping[str, Any] | None
) -> tuple[str, str | None]:
    if ended.code == 0:
        return PASSED, None
    if ended.code is None:
        return FAILED, f"stopped at its limit, after {ended.seconds:.0f} s"
    if refused := REFUSED.search(server) or REFUSED.search(text):
        return SKIPPED, refused[1]
    if record and record.get("failed"):
        return FAILED, f"beyond their limits: {', '.join(map(str, record['failed']))}"
    return FAILED, f"exit code {ended.code}: {_last_line(text)}"


def _server_log(text: str) -> str:
    """The log of a server that did not start, if the step names one."""
    named = SERVER_LOG.search(text.replace("\n", " ")) if "whole log" in text else None
    if named is None:
        return ""
    try:
        return ESCAPES.sub("", Path(named[1]).read_text(errors="replace"))
    except OSError:
        return ""


def _read(record: Path) -> Mapping[str, Any] | None:
    try:
        found = json.loads(record.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
    return found if isinstance(found, dict) else None


def _tail(text: str, lines: int) -> str:
    return "\n".join(text.splitlines()[-lines:])


def _last_line(text: str) -> str:
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    return lines[-1][:300] if lines else "it printed nothing"
