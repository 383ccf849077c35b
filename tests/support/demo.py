"""A demo as a new user runs it: its output, its processes, and what it leaves behind."""

import os
import re
import signal
import socket
import subprocess
import sys
import tempfile
import time
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

MARK = "PROOFSERVE_TEST_MARK"
# torch makes this folder for its caches at every import; the demo need not remove it.
TORCH_CACHE = re.compile(r"torchinductor_\w+")


class Demo:
    """``proofserve COMMAND`` in a process; its children have a mark in their environment."""

    def __init__(self, folder: Path, *command: str) -> None:
        self.temp = folder / "tmp"
        self.temp.mkdir()
        self._mark = uuid.uuid4().hex
        self._log = folder / "output.txt"
        env = os.environ | {MARK: self._mark, "TMPDIR": str(self.temp), "COLUMNS": "120"}
        with self._log.open("wb") as out:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "proofserve", *command],
                env=env,
                stdout=out,
                stderr=out,
                start_new_session=True,
            )

    @property
    def output(self) -> str:
        return self._log.read_text(errors="replace")

    def wait_for(self, text: str, timeout_s: float = 300.0) -> None:
        deadline = time.monotonic() + timeout_s
        while text not in self.output:
            assert self.process.poll() is None, self.output
            assert time.monotonic() < deadline, self.output
            time.sleep(0.05)

    def processes(self) -> list[str]:
        """The command lines of all running processes that inherited the mark."""
        found = []
        for folder in Path("/proc").glob("[0-9]*"):
            try:
                environment = (folder / "environ").read_bytes()
                command = (folder / "cmdline").read_bytes()
            except OSError:
                continue
            if f"{MARK}={self._mark}".encode() in environment.split(b"\0"):
                found.append(command.replace(b"\0", b" ").decode())
        return found

    def leftovers(self) -> list[str]:
        names = [path.name for path in self.temp.iterdir()]
        return [name for name in names if not TORCH_CACHE.fullmatch(name)]

    def port(self) -> int:
        found = re.search(r"http://127\.0\.0\.1:(\d+)", self.output)
        assert found, self.output
        return int(found[1])


@contextmanager
def running_demo(*command: str) -> Iterator[Demo]:
    """Its folder is not pytest's own: vLLM binds sockets below it, whose paths must be short."""
    with tempfile.TemporaryDirectory(prefix="demo-", dir="/tmp") as folder:
        demo = Demo(Path(folder), *command)
        try:
            yield demo
        finally:
            # Only after a failed test: a test that passed has ended its demo.
            if demo.process.poll() is None:
                demo.process.send_signal(signal.SIGTERM)
                demo.process.wait(60)


def is_free(port: int) -> bool:
    with socket.socket() as probe:
        return probe.connect_ex(("127.0.0.1", port)) != 0
