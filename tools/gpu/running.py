"""Runs one step as a process with a time limit, and reads what came of it."""

import json
import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from gpu.report import FAILED, PASSED, SKIPPED, StepResult
from gpu.steps import Step
from measuring.processes import ESCAPES, Ended, running

# Lines of the log that the report keeps.
TAIL, SERVER_TAIL = 40, 80
SERVER_LOG = re.compile(r"The whole log was kept as (\S+)")
# A server that says this does not support what the step asks for: no fault of the host.
REFUSED = re.compile(r"^.*UnsupportedEngine: (.+)$", re.MULTILINE)
# A step's output goes to a file: at once, in lines as wide as a table.
PRINTING = {"PYTHONUNBUFFERED": "1", "COLUMNS": "160"}


def run_step(
    step: Step, folder: Path, limit_s: float, waiting: Callable[[float], None]
) -> StepResult:
    """Run ``step``; it writes its files in ``folder``. ``waiting`` gets the seconds so far.

    KeyboardInterrupt, raised by a signal meanwhile, stops the step and goes on.
    """
    log, record = folder / f"{step.name}.log", folder / f"{step.name}.json"
    record.unlink(missing_ok=True)
    with running(step.argv, log, env={**PRINTING, **step.env}) as process:
        ended = process.wait(min(limit_s, step.limit_s), waiting)
    server, found = _server_log(ended.printed), _read(record)
    outcome, reason = _outcome(ended, server, found)
    if outcome == FAILED and found is not None and ended.code in step.finds:
        outcome, reason = PASSED, None
    shown = _tail(ended.printed, TAIL)
    if outcome == FAILED and server:
        shown += f"\n--- the server's log ---\n{_tail(server, SERVER_TAIL)}"
    return StepResult(
        step.name, step.title, outcome, reason, round(ended.seconds, 2), step.argv, found, shown
    )


def _outcome(ended: Ended, server: str, record: Mapping[str, Any] | None) -> tuple[str, str | None]:
    if ended.code == 0:
        return PASSED, None
    if ended.code is None:
        return FAILED, f"stopped at its limit, after {ended.seconds:.0f} s"
    if refused := REFUSED.search(server) or REFUSED.search(ended.printed):
        return SKIPPED, refused[1]
    if record and record.get("failed"):
        return FAILED, f"beyond their limits: {', '.join(map(str, record['failed']))}"
    return FAILED, f"exit code {ended.code}: {ended.last_line or 'it printed nothing'}"


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
