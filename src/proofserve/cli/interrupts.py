"""Ctrl-C and SIGTERM, let through only where they leave nothing behind."""

import signal
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType, TracebackType
from typing import Any, Self

SIGNALS = (signal.SIGINT, signal.SIGTERM)


class Interrupts:
    """Holds both signals back as long as the context lasts, except inside ``allowed``.

    An exception that strikes between the start of a server and the note of its process id would
    leave that server running for ever, and one that strikes its cleanup would undo it. So a signal
    only leaves a mark, which ``check`` and ``allowed`` turn into SystemExit with the code that a
    shell expects: 130 after Ctrl-C, 143 after SIGTERM. It does so once; what is cleaned up
    afterwards is not disturbed again.
    """

    def __init__(self) -> None:
        self._received: int | None = None
        self._allowed = False
        self._before: dict[int, Any] = {}

    def __enter__(self) -> Self:
        for number in SIGNALS:
            self._before[number] = signal.signal(number, self._strike)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)
        if error is None:
            self.check()

    def check(self) -> None:
        """Raise SystemExit if a signal has come."""
        if self._received is not None:
            raise SystemExit(128 + self._received)

    @contextmanager
    def allowed(self) -> Iterator[None]:
        """Let signals end the program at once; whoever enters cleans up around this context."""
        self._allowed = True
        try:
            self.check()
            yield
        finally:
            self._allowed = False

    def _strike(self, number: int, _frame: FrameType | None) -> None:
        self._received = number
        if self._allowed:
            self._allowed = False
            raise SystemExit(128 + number)
