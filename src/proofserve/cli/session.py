"""Console, progress line, signals and errors of a command that measures or checks."""

import os
import signal
import sys
import threading
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from types import FrameType
from typing import Any, Final, Self

import typer
from rich.console import Console
from rich.markup import escape
from typer.core import TyperCommand

from proofserve.engines import CheckpointError
from proofserve.protocol.verdict.counting import SequentialResult
from proofserve.reports import Progress, ReportedError
from proofserve.rounds.errors import RoundsError
from proofserve.wiring.launch import ServerFailed

# Exit codes: a check or a limit failed; the command could not do its work.
EXIT_FAILED = 1
EXIT_ERROR = 2
# No verdict, for commands whose codes 0, 1 and 2 are verdicts.
EXIT_NO_VERDICT = 3
EXIT_CODES = {
    SequentialResult.HONEST: 0,
    SequentialResult.FRAUD: 1,
    SequentialResult.UNDECIDED: 2,
    SequentialResult.UNPROVED: 2,
    SequentialResult.UNEXPLAINED: EXIT_NO_VERDICT,
}
COLOURS = {
    **dict.fromkeys(SequentialResult, "yellow"),
    SequentialResult.HONEST: "green",
    SequentialResult.FRAUD: "red",
}

SIGNALS = (signal.SIGINT, signal.SIGTERM)
# How often a reader sees for how long a step has run.
LOG_EVERY_S: Final = 2.0


class Interrupts:
    """Delays Ctrl-C and SIGTERM until the context ends, except inside ``allowed``.

    An exception between the start of a server and the note of its process id would leave that
    server running for ever, and an exception during its cleanup would stop the cleanup. So a
    signal is only noted, also inside ``delayed``; ``check`` and ``allowed`` turn it into SystemExit
    with the code that a shell expects: 130 after Ctrl-C, 143 after SIGTERM. They do this once: no
    later signal disturbs the cleanup.
    """

    def __init__(self) -> None:
        self._received: int | None = None
        self._allowed = False
        self._before: dict[int, Any] = {}

    def __enter__(self) -> Self:
        for number in SIGNALS:
            self._before[number] = signal.signal(number, self._receive)
        return self

    def __exit__(self, _kind: object, error: object, _traceback: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)
        if error is None:
            self.check()

    def check(self) -> None:
        if self._received is not None:
            raise SystemExit(128 + self._received)

    @contextmanager
    def allowed(self) -> Iterator[None]:
        """Let a signal end the program at once; the caller cleans up around this context."""
        before, self._allowed = self._allowed, True
        try:
            self.check()
            yield
        finally:
            self._allowed = before and self._received is None

    @contextmanager
    def delayed(self) -> Iterator[None]:
        """Only note a signal until the end of the context."""
        before, self._allowed = self._allowed, False
        try:
            yield
        finally:
            self._allowed = before and self._received is None
        self.check()

    def _receive(self, number: int, _frame: FrameType | None) -> None:
        self._received = number
        if self._allowed:
            self._allowed = False
            raise SystemExit(128 + number)


class ProgressLine(Progress):
    """Shows the current step, and each ``log_every_s`` seconds how far and how old it is.

    On a terminal that is one changing line, in a log file a line each time.
    """

    def __init__(self, console: Console, log_every_s: float = LOG_EVERY_S) -> None:
        self._console = console
        self._status = console.status("")
        self._text = self._reached = ""
        self._total: int | None = None
        self._done = 0
        self._began = time.monotonic()
        self._log_every_s = log_every_s
        self._ended = threading.Event()

    def __enter__(self) -> Self:
        self._status.start()
        threading.Thread(target=self._repeat, name="progress", daemon=True).start()
        return self

    def __exit__(self, *_error: object) -> None:
        self._ended.set()
        self._status.stop()

    def step(self, text: str, total: int | None = None) -> None:
        self._text, self._reached, self._began = text, "", time.monotonic()
        self._total, self._done = total, 0
        self._status.update(f"{text} ...")
        if not self._console.is_terminal:
            self._console.print(f"{text} ...")

    def rest(self, text: str) -> None:
        """Begin a wait about which there is nothing more to say."""
        self.step(text)
        self._text = ""

    def advance(self) -> None:
        self._done += 1
        self.reached(self._count)

    def layer(self, index: int, of: int) -> None:
        """Show which layer the step has passed, beside what it has done."""
        self.reached(f"{self._count}, layer {index} of {of}")

    @property
    def _count(self) -> str:
        return f"{self._done} of {self._total}" if self._total is not None else str(self._done)

    def reached(self, text: str) -> None:
        self._reached = text
        self._status.update(f"{self._text} ({text}) ...")

    def _repeat(self) -> None:
        while not self._ended.wait(self._log_every_s):
            seconds = time.monotonic() - self._began
            if not self._text or seconds < self._log_every_s:
                continue
            reached = f"{self._reached}, " if self._reached else ""
            line = f"{self._text} ({reached}{seconds:.0f} s) ..."
            self._status.update(line)
            if not self._console.is_terminal:
                self._console.print(line, markup=False, highlight=False, soft_wrap=True)


@dataclass(frozen=True, slots=True)
class CommandSession:
    """Where a command prints its results, when signals may end it, and its progress line."""

    console: Console
    interrupts: Interrupts
    line: ProgressLine

    def tell(self, text: str, style: str | None = None) -> None:
        self.console.print(text, style=style, markup=False, soft_wrap=True)

    def show(self, verdict: SequentialResult, lines: Iterable[str]) -> None:
        self.console.print(f"[bold {COLOURS[verdict]}]{verdict}[/]")
        for line in lines:
            self.tell(line)

    def say(self, label: str, text: str) -> None:
        """Print a line of a demo."""
        line = f"[bold]{label:9}[/bold] {escape(text)}"
        self.console.print(line, highlight=False, soft_wrap=True)


def worst_exit_code(verdicts: Iterable[SequentialResult]) -> int:
    """Of several verdicts: that of a fraud, else of none, else of an undecided one; 0 for none."""
    codes = {EXIT_CODES[each] for each in verdicts}
    return next((code for code in (1, EXIT_NO_VERDICT, 2) if code in codes), 0)


@contextmanager
def open_session(exit_code: int = EXIT_ERROR) -> Iterator[CommandSession]:
    """The session of one command. Prints expected errors and ends with ``exit_code``."""
    console = Console()
    try:
        with Interrupts() as interrupts, ProgressLine(console) as line:
            yield CommandSession(console, interrupts, line)
    except (
        ReportedError,
        ServerFailed,
        CheckpointError,
        RoundsError,
        ValueError,
        OSError,
    ) as error:
        console.print(str(error), style="red", markup=False, soft_wrap=True)
        raise typer.Exit(exit_code) from error


class VerdictCommand(TyperCommand):
    """Ends with ``EXIT_NO_VERDICT`` after a usage error (else 2) or a crash (else 1)."""

    def make_context(self, *args: Any, **kwargs: Any) -> Any:
        with _no_verdict():
            return super().make_context(*args, **kwargs)

    def invoke(self, ctx: Any) -> Any:
        with _no_verdict():
            return super().invoke(ctx)


@contextmanager
def _no_verdict() -> Iterator[None]:
    try:
        yield
    except (typer.Exit, ModuleNotFoundError):
        # The table of commands says what to install, and ends the command.
        raise
    except SystemExit as error:
        # rich ends so if the reader of the output has left, as `head` does; but 1 is fraud.
        raise typer.Exit(EXIT_NO_VERDICT) from error
    except BrokenPipeError as error:
        # Here too the reader has left. Python writes what is left when it ends, and would fail.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        raise typer.Exit(EXIT_NO_VERDICT) from error
    except Exception as error:
        # Usage errors carry their exit code; the command line library shows them.
        if hasattr(error, "exit_code"):
            error.exit_code = EXIT_NO_VERDICT
            raise
        Console(stderr=True).print_exception()
        raise typer.Exit(EXIT_NO_VERDICT) from error
