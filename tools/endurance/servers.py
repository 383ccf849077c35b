"""The servers of a trial: each can be killed and started again with the same port and files."""

import signal
import subprocess
import sys
import tempfile
import time
from abc import ABC, abstractmethod
from contextlib import ExitStack
from pathlib import Path
from typing import Self

import psutil

from proofserve.cli.model import SmallModel, checkpoint
from proofserve.cli.servers import ServerOptions, small_server
from proofserve.host import quick_dtype
from proofserve.settings.process import environment
from proofserve.wiring.launch import Server, ServerCommand, ServerFailed, free_port, running_server

MODEL = SmallModel("qwen3", "tiny")
FORWARD_BATCH = 8
# How long a server may still run after a kill of one of its processes, seconds.
END_S = 60.0


class Killable(ABC):
    """A server on one port with one set of files, which can be killed and started repeatedly."""

    def __init__(self, folder: Path, name: str) -> None:
        self._log = folder / f"{name}.log"
        self._port = free_port()
        self._context = ExitStack()
        self._server: Server | None = None
        self.logs: list[str] = []

    @property
    def url(self) -> str:
        """The URL, which stays the same after a restart."""
        return f"http://127.0.0.1:{self._port}"

    @abstractmethod
    def command(self) -> ServerCommand:
        """The command line that starts the server."""

    def start(self) -> float:
        """Start the server; return the seconds until it serves. Raises ServerFailed."""
        began = time.monotonic()
        running = running_server(self.command(), self._port, self._log)
        self._server = self._context.enter_context(running)
        return time.monotonic() - began

    def processes(self) -> dict[str, psutil.Process]:
        """The running processes of the server, by role."""
        return {self._log.stem: psutil.Process(self._running().process.pid)}

    def kill(self, which: str) -> None:
        """Kill one process of the server, without waiting for the end of the others."""
        self.processes()[which].send_signal(signal.SIGKILL)

    def end_after_kill(self) -> None:
        """Wait until the server has ended after a kill, and end its remaining processes.

        Raises:
            ServerFailed: the server still ran after a minute.
        """
        try:
            self._running().process.wait(END_S)
        except subprocess.TimeoutExpired as error:
            text = (
                f"{self._log.stem} still runs {END_S:.0f} s after one of its processes was killed"
            )
            raise ServerFailed(text) from error
        finally:
            self.stop()

    def kept_log(self) -> Path:
        """A copy of the log of this start, which stays when the trial's folder goes."""
        with tempfile.NamedTemporaryFile(prefix=f"{self._log.stem}-", delete=False) as copy:
            copy.write(self._log.read_bytes())
        return Path(copy.name)

    def stop(self) -> None:
        """Stop the server in order."""
        self._context.close()
        if self._server is not None:
            self.logs.append(self._log.read_text(errors="replace"))
            self._server = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_error: object) -> None:
        self.stop()

    def _running(self) -> Server:
        if self._server is None:
            raise ServerFailed(f"{self._log.stem} is not running")
        return self._server


class Receiver(Killable):
    """``proofserve receive``."""

    def __init__(self, folder: Path) -> None:
        super().__init__(folder, "receiver")
        self.database = folder / "received.sqlite"

    def command(self) -> ServerCommand:
        """The command line of a receiver without the live summary."""
        argv = (sys.executable, "-m", "proofserve", "receive", "--quiet")
        return ServerCommand((*argv, "--database", str(self.database)), environment({}))


class Node(Killable):
    """vLLM with the plugin, serving a tiny model; ``poc`` holds its POC_ variables."""

    def __init__(self, folder: Path, **poc: str) -> None:
        super().__init__(folder, "api")
        self.outbox = folder / "outbox.sqlite"
        self.model = MODEL.name
        deployment = ServerOptions(
            checkpoint(MODEL), self.model, FORWARD_BATCH, dtype=quick_dtype()
        )
        served = small_server(deployment, folder)
        self._command = ServerCommand(served.argv, {**served.env, **poc})

    def command(self) -> ServerCommand:
        """The command line of a small server, with the variables of this trial."""
        return self._command

    def processes(self) -> dict[str, psutil.Process]:
        """The API server, the engine core that it started, and the worker that the core started.

        A worker is a separate process in vLLM's CPU build, and part of the core on one GPU.
        """
        family = super().processes()
        titles = {" ".join(p.cmdline()).strip(): p for p in family["api"].children(recursive=True)}
        for name, title in (("engine", "VLLM::EngineCore"), ("worker", "VLLM::Worker")):
            if title in titles:
                family[name] = titles[title]
        if "engine" not in family:
            raise ServerFailed(f"the server has no engine core, only {sorted(titles)}")
        return family


class Gateway(Killable):
    """``proofserve gateway`` in front of a backend."""

    def __init__(self, folder: Path, backend_url: str) -> None:
        super().__init__(folder, "gateway")
        self._backend_url = backend_url

    def command(self) -> ServerCommand:
        """The command line of a gateway with default settings."""
        argv = (sys.executable, "-m", "proofserve", "gateway")
        env = environment({"VLLM_BACKEND_URL": self._backend_url})
        return ServerCommand(argv, env)
