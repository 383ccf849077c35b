"""The processes of ``fleet demo``: a controller, a worker, and servers that join the fleet."""

import os
import secrets
import signal
import subprocess
import sys
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path

from proofserve.cli.servers import ServerOptions, small_server
from proofserve.cli.session import CommandSession
from proofserve.lab.client.errors import LabError
from proofserve.lab.host.processor import ServedDtype
from proofserve.settings.process import environment
from proofserve.wiring.launch import Server, ServerCommand, free_port, running_server, stop

FORWARD_BATCH = 8
# An engine on a GPU computes in its own process. On a CPU, vLLM would start a second one for it,
# which imports everything again.
ONE_PROCESS = (
    "--distributed-executor-backend",
    "vllm.v1.executor.uniproc_executor.UniProcExecutor",
)
NICE = 5
# An engine that shares cores may answer late. One that is dead refuses connections at once.
PATIENT = ("--look-sec", "10", "--lost-after-sec", "12")
CONTROLLER = "controller"
# Of the log of a process that ended.
SHOWN_LINES = 20
# Several engines share the cores of one machine: vLLM would bind all of them to the same core.
SHARED_CORES = {"OMP_NUM_THREADS": "1", "VLLM_CPU_OMP_THREADS_BIND": "nobind"}


@dataclass(frozen=True, slots=True)
class DemoMember:
    """A server of the fleet. ``checkpoint`` is what it serves as the model ``model``."""

    name: str
    checkpoint: Path
    model: str


@dataclass(slots=True)
class DemoProcesses:
    """Everything that the demo started, with files in ``folder``; ``close`` ends all of it.

    Servers have weights and values of ``dtype``.
    """

    folder: Path
    session: CommandSession
    dtype: ServedDtype
    _key: str = field(default_factory=secrets.token_hex)
    _stack: ExitStack = field(default_factory=ExitStack)
    _servers: dict[str, Server] = field(default_factory=dict)
    _alive: "dict[str, tuple[subprocess.Popen[bytes], Path]]" = field(default_factory=dict)

    def close(self) -> None:
        # The servers and the worker beside each other, and the controller last.
        ended = [process for name, (process, _) in self._alive.items() if name != CONTROLLER]
        if ended:
            with ThreadPoolExecutor(len(ended)) as threads:
                list(threads.map(stop, ended))
        self._stack.close()

    def require_alive(self) -> None:
        """Raise LabError if a process has ended that was not killed."""
        for name, (process, log) in self._alive.items():
            if process.poll() is not None:
                lines = log.read_text(errors="replace").splitlines()[-SHOWN_LINES:]
                text = "\n".join([f"the {name} has ended with {process.returncode}:", *lines])
                raise LabError(text)

    def controller(self, policy: str) -> str:
        """Start a controller on SQLite with this policy of verification; its URL.

        Raises ServerFailed.
        """
        file = self.folder / "policy.toml"
        file.write_text(policy, "utf-8")
        options = ("--database", self._database, "--policy", str(file), "--lanes", "8")
        command = _proofserve("fleet", "serve", *options, *PATIENT, FLEET_JOIN_KEY=self._key)
        log = self.folder / "controller.log"
        running = running_server(command, free_port(), log, self._waiting)
        server = self._stack.enter_context(running)
        self._alive[CONTROLLER] = server.process, log
        return server.url

    def worker(self, model: Path) -> None:
        """Start a worker that verifies ``model``."""
        options = ("--database", self._database, "--model", str(model))
        command = _proofserve("fleet", "worker", *options)
        log = self.folder / "worker.log"
        with log.open("wb") as out:
            process = subprocess.Popen(
                command.argv,
                env={**command.env, **SHARED_CORES},
                stdout=out,
                stderr=out,
                start_new_session=True,
            )
        self._stack.callback(stop, process)
        self._alive["worker"] = process, log

    def members(self, fleet: str, wanted: Sequence[DemoMember]) -> None:
        """Start servers beside each other, which join the fleet at this URL by themselves.

        Raises ServerFailed.
        """
        with ThreadPoolExecutor(len(wanted)) as threads:
            starts = [threads.submit(self._start, fleet, each) for each in wanted]
        for start in starts:
            start.result()

    def kill(self, name: str) -> None:
        """``kill -9`` for the server and its engine."""
        del self._alive[name]
        os.killpg(self._servers[name].process.pid, signal.SIGKILL)

    @property
    def _database(self) -> str:
        return str(self.folder / "fleet.sqlite")

    def _start(self, fleet: str, member: DemoMember) -> None:
        folder, port = self.folder / member.name.replace(" ", "-"), free_port()
        folder.mkdir()
        options = ServerOptions(
            member.checkpoint,
            member.model,
            FORWARD_BATCH,
            dtype=self.dtype,
            vllm_options=ONE_PROCESS,
        )
        served = small_server(options, folder)
        joining = {
            "POC_FLEET": fleet,
            "POC_FLEET_KEY": self._key,
            "POC_FLEET_NAME": member.name,
            "POC_FLEET_ADDRESS": f"http://127.0.0.1:{port}",
            "POC_CALLBACK_INTERVAL_SEC": "1",
            "POC_CALLBACK_MAX_RETRIES": "0",
        }
        command = ServerCommand(served.argv, {**served.env, **SHARED_CORES, **joining})
        log = folder / "server.log"
        running = running_server(command, port, log, self._waiting)
        server = self._stack.enter_context(running)
        # Engines that prove leave the cores to a server that starts, and to the worker.
        os.setpriority(os.PRIO_PGRP, server.process.pid, NICE)
        self._servers[member.name], self._alive[member.name] = server, (server.process, log)

    def _waiting(self, seconds: float) -> None:
        self.session.interrupts.check()
        self.session.line.seconds(seconds)


def _proofserve(*options: str, **variables: str) -> ServerCommand:
    return ServerCommand((sys.executable, "-m", "proofserve", *options), environment(variables))
