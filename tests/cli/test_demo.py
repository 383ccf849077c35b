"""The demo as a new user runs it: a real server, and no process or file left after any end."""

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

import pytest

pytestmark = pytest.mark.engine

MARK = "PROOFSERVE_TEST_MARK"
# torch makes this folder for its caches at every import; the demo need not remove it.
TORCH_CACHE = re.compile(r"torchinductor_\w+")


class Demo:
    """``proofserve demo`` in a process; its children have a mark in their environment."""

    def __init__(self, folder: Path) -> None:
        self.temp = folder / "tmp"
        self.temp.mkdir()
        self._mark = uuid.uuid4().hex
        self._log = folder / "output.txt"
        env = os.environ | {MARK: self._mark, "TMPDIR": str(self.temp), "COLUMNS": "120"}
        with self._log.open("wb") as out:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "proofserve", "demo"],
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


@pytest.fixture
def folder() -> Iterator[Path]:
    """Not pytest's own: vLLM binds sockets below it, whose paths must be short."""
    with tempfile.TemporaryDirectory(prefix="demo-", dir="/tmp") as made:
        yield Path(made)


@contextmanager
def running_demo(folder: Path) -> Iterator[Demo]:
    demo = Demo(folder)
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


def test_the_demo_tells_honest_from_forged_and_leaves_nothing(folder: Path) -> None:
    with running_demo(folder) as demo:
        assert demo.process.wait(400) == 0, demo.output
        lines = demo.output.splitlines()
        assert len([line for line in lines if not line.endswith(" ...")]) <= 35
        assert any("What is a nonce? - A nonce is a number." in line for line in lines)
        assert any("without proofs" in line and " ms a chat" in line for line in lines)
        assert any("with proofs:" in line and "8 of 8 identical" in line for line in lines)
        assert re.search(r"\d+ nonces/s", demo.output)
        assert re.search(r"nonce 2: [+-]\d\.\d\d", demo.output)
        # Each with the tests that agree on it.
        for what, verdict in (
            ("what this server produced", r"honest +\d+ +paired, direction, twins"),
            ("a copy with 32 of 64 altered", r"fraud +\d+ +paired: E = "),
            ("another model's artifacts", r"fraud +\d+ +paired: E = "),
            ("4-bit weights", r"fraud +\d+ +direction: int4 g128, E = "),
            ("fp8 weights", r"fraud +\d+ +direction: fp8 \S+ \S+, E = "),
        ):
            (line,) = [line for line in lines if what in line]
            assert re.search(verdict, line), line
        assert any("4 answers: honest (signature, log, prompt, answer" in line for line in lines)
        assert any("one with another token: fraud (answer" in line for line in lines)
        assert demo.processes() == []
        assert demo.leftovers() == []
        assert is_free(demo.port())


@pytest.mark.parametrize(
    ("moment", "seconds", "number", "code"),
    [
        ("starting vLLM", 6.0, signal.SIGINT, 130),
        pytest.param(
            *("chatting while a round runs", 0.3, signal.SIGINT, 130), marks=pytest.mark.slow
        ),
    ],
    ids=["while the server starts", "during a round"],
)
def test_an_interrupted_demo_leaves_nothing(
    moment: str, seconds: float, number: signal.Signals, code: int, folder: Path
) -> None:
    with running_demo(folder) as demo:
        demo.wait_for(moment)
        time.sleep(seconds)
        assert len(demo.processes()) > 1
        demo.process.send_signal(number)
        assert demo.process.wait(30) == code, demo.output
        assert "Traceback" not in demo.output
        assert demo.processes() == []
        assert demo.leftovers() == []
        if "http://" in demo.output:
            assert is_free(demo.port())
