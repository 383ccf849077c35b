"""A step is a process of its own: whatever it does, a result comes of it."""

import json
import os
import signal
import sys
import threading
import time
from collections.abc import Sequence
from pathlib import Path

import psutil
import pytest

from gpu.report import FAILED, PASSED, SKIPPED, StepResult
from gpu.running import run_step
from gpu.steps import Step
from measuring import processes
from support.processes import has_ended


def run(
    folder: Path, code: str, limit_s: float = 60.0, env: dict[str, str] | None = None
) -> StepResult:
    argv: Sequence[str] = (sys.executable, "-c", code)
    step = Step("one", "a step", argv, limit_s, env=env or {})
    return run_step(step, folder, 60.0, lambda _seconds: None)


def record(folder: Path, content: object) -> str:
    return f"open({str(folder / 'one.json')!r}, 'w').write({json.dumps(content)!r})"


def test_what_a_step_writes_and_prints_is_kept(tmp_path: Path) -> None:
    code = (
        f"import os; print('\\x1b[32mgood', os.environ['SAID']); {record(tmp_path, {'speed': 2.5})}"
    )
    found = run(tmp_path, code, env={"SAID": "news"})
    assert found.outcome == PASSED
    assert found.reason is None
    assert found.record == {"speed": 2.5}
    assert found.log == "good news"
    assert found.seconds > 0


def test_a_record_of_an_earlier_run_is_not_taken_for_this_one(tmp_path: Path) -> None:
    (tmp_path / "one.json").write_text('{"speed": 1}')
    assert run(tmp_path, "pass").record is None


@pytest.mark.parametrize(
    ("code", "reason"),
    [
        ("raise SystemExit('no memory left')", "exit code 1: no memory left"),
        ("import os; os.abort()", f"exit code -{int(signal.SIGABRT)}: it printed nothing"),
    ],
)
def test_a_step_that_dies_has_failed_with_its_last_line(
    tmp_path: Path, code: str, reason: str
) -> None:
    found = run(tmp_path, code)
    assert (found.outcome, found.reason) == (FAILED, reason)


def test_figures_beyond_their_limits_are_named(tmp_path: Path) -> None:
    code = f"{record(tmp_path, {'ratio': 0.5, 'failed': ['ratio']})}; raise SystemExit(1)"
    found = run(tmp_path, code)
    assert (found.outcome, found.reason) == (FAILED, "beyond their limits: ratio")
    assert found.record is not None


def test_a_record_that_is_not_json_is_none(tmp_path: Path) -> None:
    assert run(tmp_path, f"open({str(tmp_path / 'one.json')!r}, 'w').write('{{')").record is None


def test_a_step_at_its_limit_is_stopped_with_the_servers_that_it_left(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(processes, "END_S", 1.0)
    # It ignores SIGTERM, as a step that hangs in a driver, and its server has a session of its own.
    code = (
        "import signal, subprocess, sys, time; signal.signal(signal.SIGTERM, signal.SIG_IGN);"
        "server = subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(600)'],"
        " start_new_session=True); print(server.pid, flush=True); time.sleep(600)"
    )
    found = run(tmp_path, code, limit_s=8.0)
    assert found.outcome == FAILED
    assert found.reason is not None
    assert found.reason.startswith("stopped at its limit")
    server = int(found.log)
    deadline = time.monotonic() + 10
    while not has_ended(server):
        assert time.monotonic() < deadline
        time.sleep(0.05)


def test_what_a_server_refuses_is_skipped(tmp_path: Path) -> None:
    log = tmp_path / "server.log"
    log.write_text("begin\nproofserve.x.UnsupportedEngine: the second runner is not tested\nend\n")
    code = f"raise SystemExit('it ended\\nThe whole log was kept as {log}')"
    found = run(tmp_path, code)
    assert (found.outcome, found.reason) == (SKIPPED, "the second runner is not tested")


def test_the_log_of_a_server_that_failed_is_kept(tmp_path: Path) -> None:
    log = tmp_path / "server.log"
    log.write_text("CUDA error: out of memory\n")
    found = run(tmp_path, f"raise SystemExit('it ended\\nThe whole log was kept as {log}')")
    assert found.outcome == FAILED
    assert "CUDA error: out of memory" in found.log


def test_a_signal_to_the_run_ends_the_step(tmp_path: Path) -> None:
    def interrupt(_number: int, _frame: object) -> None:
        raise KeyboardInterrupt

    def signal_once_it_runs() -> None:
        deadline = time.monotonic() + 60
        while time.monotonic() < deadline:
            if log.exists() and log.read_text().endswith("\n"):
                os.kill(os.getpid(), signal.SIGUSR1)
                return
            time.sleep(0.05)

    log = tmp_path / "one.log"
    before = signal.signal(signal.SIGUSR1, interrupt)
    threading.Thread(target=signal_once_it_runs).start()
    try:
        with pytest.raises(KeyboardInterrupt):
            run(tmp_path, "import os, time; print(os.getpid(), flush=True); time.sleep(600)")
    finally:
        signal.signal(signal.SIGUSR1, before)
    assert not psutil.pid_exists(int(log.read_text()))


def test_a_finding_is_no_failure_once_it_was_written(tmp_path: Path) -> None:
    def code_of(code: str) -> str:
        argv = (sys.executable, "-c", f"{code}; raise SystemExit(1)")
        step = Step("one", "a step", argv, 60.0, finds=(1,))
        return run_step(step, tmp_path, 60.0, lambda _seconds: None).outcome

    assert code_of(record(tmp_path, {"caught": 3})) == PASSED
    assert code_of("pass") == FAILED
