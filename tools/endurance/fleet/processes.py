"""The processes of a fleet, which can be killed, and started again on the same port.

Each is forked from one process that has imported everything: Python's own imports take seconds of
a processor for each start, and dozens of starts are needed.
"""

import multiprocessing
import os
import signal
import time
from collections.abc import Callable
from multiprocessing.context import ForkServerProcess
from pathlib import Path
from typing import Any, Self

import httpx

from proofserve.wiring.launch import ServerFailed, free_port

# What the forked processes, and the module that starts them, import.
IMPORTED = [
    "endurance.__main__",
    "endurance.fleet.programs",
    "proofserve.cli.fleet",
    "proofserve.cli.receive",
    "proofserve.wiring.fleet",
    "proofserve.wiring.fleet_worker",
]
START_S = 120.0
STOP_S = 20.0
_LOOK_S = 0.05


class ForkedProcess:
    """Runs ``program(*options)`` in a process of its own, with a log in ``folder``.

    ``program`` is a function of a module. It works once its log has ``sign``.
    """

    def __init__(
        self, folder: Path, name: str, program: Callable[..., None], sign: str = ""
    ) -> None:
        self.name = name
        self._sign = sign.encode()
        self._log = folder / f"{name}.log"
        self._program = program
        self._process: ForkServerProcess | None = None
        self._began_at = 0
        self.is_frozen = False

    def start(self, *options: Any) -> None:
        """Start it and wait until it works. Raises ServerFailed."""
        self._began_at = self._log.stat().st_size if self._log.exists() else 0
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload(IMPORTED)
        process = context.Process(
            target=_run, args=(self._log, self._program, *options), name=self.name
        )
        process.start()
        self._process = process
        deadline = time.monotonic() + START_S
        while not self._works():
            if self.has_ended or time.monotonic() > deadline:
                self.kill()
                raise ServerFailed(f"{self.name} does not work; its log ends with:\n{self.log_end}")
            time.sleep(_LOOK_S)

    @property
    def runs(self) -> bool:
        """Whether it was started, and neither killed nor stopped."""
        return self._process is not None

    def kill(self) -> None:
        """Send SIGKILL, and wait for the end."""
        process, self._process, self.is_frozen = self._process, None, False
        if process is not None:
            process.kill()
            process.join()

    @property
    def has_ended(self) -> bool:
        """Whether it was started, and ended by itself."""
        return self._process is not None and self._process.exitcode is not None

    @property
    def log_end(self) -> str:
        return "\n".join(self._log.read_text(errors="replace").splitlines()[-20:])

    def freeze(self) -> None:
        """Stop it as a debugger would: it answers nothing, and its connections stay open."""
        self._signal(signal.SIGSTOP)
        self.is_frozen = True

    def thaw(self) -> None:
        self._signal(signal.SIGCONT)
        self.is_frozen = False

    def stop(self) -> None:
        """End it in order, and by SIGKILL if that takes too long."""
        if self._process is not None:
            self._process.terminate()
            self._process.join(STOP_S)
        self.kill()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_error: object) -> None:
        self.stop()

    def _works(self) -> bool:
        # The log goes on from start to start.
        return self._log.exists() and self._sign in self._log.read_bytes()[self._began_at :]

    def _signal(self, number: int) -> None:
        if self._process is None or self._process.pid is None:
            raise ServerFailed(f"{self.name} is not running")
        os.kill(self._process.pid, number)


class ForkedServer(ForkedProcess):
    """Runs ``program(port, *options)``, which must answer ``GET /health`` on its port."""

    def __init__(self, folder: Path, name: str, program: Callable[..., None]) -> None:
        super().__init__(folder, name, program)
        self.port = free_port()
        self.url = f"http://127.0.0.1:{self.port}"
        # Each client of httpx loads the system's certificates, which takes tenths of a second.
        self.http = httpx.Client(base_url=self.url, timeout=20.0, trust_env=False)

    def start(self, *options: Any) -> None:
        """Start it and wait until it answers. Raises ServerFailed."""
        super().start(self.port, *options)

    def __exit__(self, *error: object) -> None:
        super().__exit__(*error)
        self.http.close()

    def _works(self) -> bool:
        try:
            return self.http.get("/health").is_success
        except httpx.TransportError:
            return False


def _run(log: Path, program: Callable[..., None], *options: Any) -> None:
    descriptor = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(descriptor, 1)
    os.dup2(descriptor, 2)
    os.close(descriptor)
    program(*options)
