"""Waits end when nothing moves, and say meanwhile how far they are."""

import io
import os
import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
from rich.console import Console

from proofserve.cli.session import CommandSession, Interrupts, ProgressLine
from proofserve.reports import TooSlowError
from proofserve_lab.nodes import wait_while_moving
from support.pace import PACE


@contextmanager
def session_of(console: Console, log_every_s: float = 2.0) -> Iterator[CommandSession]:
    with Interrupts() as interrupts, ProgressLine(console, log_every_s) as line:
        yield CommandSession(console, interrupts, line)


def test_a_wait_outlasts_its_bound_while_something_moves() -> None:
    began, bound = time.monotonic(), 0.5

    def seconds() -> float:
        return time.monotonic() - began

    with session_of(Console(quiet=True)) as session:
        wait_while_moving(
            session, "the end", lambda: seconds() > 4 * bound, lambda: f"{seconds():.1f} s", bound
        )
    assert seconds() > 4 * bound


def test_a_wait_for_what_stands_still_ends_and_says_where() -> None:
    with (
        pytest.raises(TooSlowError, match=r"proofs: nothing has moved for 0\.3 s \(7 of 64\)"),
        session_of(Console(quiet=True)) as session,
    ):
        wait_while_moving(session, "proofs", lambda: False, lambda: "7 of 64", 0.3)


def test_a_signal_ends_a_wait() -> None:
    def interrupted() -> str:
        os.kill(os.getpid(), signal.SIGINT)
        return ""

    with pytest.raises(SystemExit) as caught, session_of(Console(quiet=True)) as session:
        wait_while_moving(session, "proofs", lambda: False, interrupted)
    assert caught.value.code == 128 + signal.SIGINT


def written_of(*, is_terminal: bool) -> str:
    """What a reader gets of a step that counts, and of a rest."""
    written = io.StringIO()
    console = Console(file=written, width=200, force_terminal=is_terminal)
    with session_of(console, 0.05) as session:
        session.line.step("asking", 3)
        session.line.advance()
        session.line.layer(3, 28)
        deadline = time.monotonic() + 30.0 * PACE
        while "layer 3 of 28, 0 s" not in written.getvalue():
            assert time.monotonic() < deadline
            time.sleep(0.01)
        session.line.rest("running")
        time.sleep(0.2)
    return written.getvalue()


def test_a_log_has_lines_of_a_long_step_until_there_is_nothing_more_to_say() -> None:
    first, *longer, last = written_of(is_terminal=False).splitlines()
    assert (first, last) == ("asking ...", "running ...")
    assert set(longer) == {"asking (1 of 3, layer 3 of 28, 0 s) ..."}


def test_a_terminal_shows_how_old_a_step_is_in_one_line() -> None:
    shown = written_of(is_terminal=True)
    assert "asking (1 of 3, layer 3 of 28, 0 s) ..." in shown
    assert "running ..." in shown
    assert shown.count("\n") <= 1
