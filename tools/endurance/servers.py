"""The servers of a trial: each can be killed and started again with the same port and files."""

import signal
import subprocess
import tempfile
import time
from contextlib import ExitStack
from pathlib import Path
from typing import Self

import psutil

from measuring.jobs import proofserve
from proofserve.cli.model import SmallModel, checkpoint
from proofserve.cli.servers import ServerOptions, small_server
from proofserve.host import quick_dtype
from proofserve.wiring.launch import Server, ServerCommand, ServerFailed, free_port, running_server

MODEL = SmallModel("qwen3", "tiny")
FORWARD_BATCH = 8
# How long a server may still run after a kill of one of its processes, seconds.
END_S = 60.0


class Killable:
    """A server on one port with one set of files, which can be killed and started repeatedly."""

    def __init__(self, folder: Path, name: str, command: ServerCommand) -> None:
        self._log = folder / f"{name}.log"
        self._command = command
        self._port = free_port()
        self.url = f"http://127.0.0.1:{self._port}"
        self._context = ExitStack()
        self._server: Server | None = None

    def start(self) -> float:
        """Start the server; return the seconds until it serves. Raises ServerFailed."""
        began = time.monotonic()
        running = running_server(self._command, self._port, self._log)
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

        Raises ServerFailed if it still runs after a minute.
        """
        try:
            self._running().process.wait(END_S)
        except subprocess.TimeoutExpired as error:
            name = self._log.stem
            text = f"{name} still runs {END_S:.0f} s after one of its processes was killed"
            raise ServerFailed(text) from error
        finally:
            self.stop()

    def kept_log(self) -> Path:
        """A copy of the log of this start, which stays when the trial's folder goes."""
        with tempfile.NamedTemporaryFile(prefix=f"{self._log.stem}-", delete=False) as copy:
            copy.write(self._log.read_bytes())
        return Path(copy.name)

    def stop(self) -> None:
        self._context.close()
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
    def __init__(self, folder: Path) -> None:
        self.database = folder / "received.sqlite"
        command = proofserve("receive", "--quiet", "--database", str(self.database))
        super().__init__(folder, "receiver", command)


class Node(Killable):
    """vLLM with the plugin, serving a tiny model; ``poc`` holds its POC_ variables."""

    def __init__(self, folder: Path, **poc: str) -> None:
        self.outbox = folder / "outbox.sqlite"
        self.model = MODEL.name
        deployment = ServerOptions(
            checkpoint(MODEL), self.model, FORWARD_BATCH, dtype=quick_dtype()
        )
        served = small_server(deployment, folder)
        super().__init__(folder, "api", ServerCommand(served.argv, {**served.env, **poc}))

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
    """In front of one backend, with default settings."""

    def __init__(self, folder: Path, backend_url: str) -> None:
        command = proofserve("gateway", VLLM_BACKEND_URL=backend_url)
        super().__init__(folder, "gateway", command)
