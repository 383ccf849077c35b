"""``proofserve fleet demo``: real servers, one that dies, and one that cheats and is found."""

import os
import secrets
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, closing
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import httpx
import typer
from rich.markup import escape
from rich.table import Column, Table

from proofserve.cli.model import SmallModel, checkpoint
from proofserve.cli.servers import ServerOptions, scratch_folder, small_server
from proofserve.cli.session import EXIT_FAILED, CommandSession, open_session
from proofserve.host import ServedDtype
from proofserve.models.trained import DENSE
from proofserve.protocol.sketch import SketchScheme
from proofserve.remote.node_client import NodeClient
from proofserve.remote.records import Work
from proofserve.reports import ReportedError
from proofserve.rounds.records import StoredResult
from proofserve.settings.process import environment
from proofserve.wire import FLEET
from proofserve.wiring.launch import Server, ServerCommand, free_port, running_server, started, stop
from proofserve_lab.checkpoints import write_rounded_copy
from proofserve_lab.facts import served_in
from proofserve_lab.nodes import wait_while_moving

MODEL = SmallModel(DENSE.name)
SCHEME = SketchScheme(seeded_experts=True)
WORK = Work(
    MODEL.name,
    block_hash="demo-block",
    public_key="demo-fleet",
    k_dim=SCHEME.k_dim,
    scheme=SCHEME.name,
)
FIRST, SECOND, THIRD, CHEAT, REPLACEMENT = (f"server {number}" for number in range(1, 6))
# Honest servers that are alike have equal bits. Other bits are no fraud, but nothing is proved.
EXPECTED = {FIRST: "honest", THIRD: "honest", CHEAT: "unproved", REPLACEMENT: "honest"}
CHEAPER = "int4 g128"
# What others compute again for a verdict about one member.
NONCES = 24
# No member is trusted, and no worker has the weights. One unproved verdict cordons.
POLICY = f"""
[default]
by = "members"
every_sec = 600
nonces = {NONCES}
unproved_share = 0
"""
COLOURS = {"honest": "green", "unproved": "red"}
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


def demo(stay: bool, served: ServedDtype) -> None:
    """The course of ``proofserve fleet demo``; its engines compute in ``served``."""
    with open_session() as session, scratch_folder() as folder:
        session.line.step("writing a small model, and a copy with weights in 4 bits")
        honest, cheap = checkpoint(MODEL), folder / "4-bits"
        write_rounded_copy(honest, cheap, CHEAPER)
        with closing(DemoProcesses(folder, session, served)) as processes:
            session.line.step("starting a controller and a worker")
            url = processes.controller(POLICY)
            processes.worker()
            with NodeClient(url) as node, httpx.Client(base_url=url, timeout=30) as http:
                checkpoints = {FIRST: honest, CHEAT: cheap}
                holds = DemoFleet(processes, session, node, http, checkpoints).show()
            if stay:
                session.line.rest("running until Ctrl-C")
                with session.interrupts.allowed():
                    while True:
                        time.sleep(1)
            session.line.step("stopping everything")
        session.console.print("[bold]Stopped[/bold]   no process of the demo is running")
    if not holds:
        raise typer.Exit(EXIT_FAILED)


@dataclass(frozen=True, slots=True)
class DemoFleet:
    """Shows a fleet step by step. A server without a checkpoint of its own has that of FIRST."""

    processes: "DemoProcesses"
    session: CommandSession
    node: NodeClient
    http: httpx.Client
    checkpoints: Mapping[str, Path]

    def show(self) -> bool:
        """Whether everything ended as it should."""
        self.session.say("Fleet", f"a controller on SQLite and a worker, at {self.node.url}")
        self.session.say("", f"its page: {self.node.url}/dashboard")
        first = FIRST, SECOND, THIRD, CHEAT
        self._start("starting four vLLM servers, about a minute", *first)
        self.session.say("Servers", f"four, which serve {served_in(self.processes.dtype)}")
        self.session.say("", f"{CHEAT} has weights in 4 bits, and claims the published ones")
        self.node.start_round(WORK)
        lanes = self._lanes(*first)
        self.session.say("Round", f"one start call, four lanes: {_listed(lanes)}")
        self.processes.kill(SECOND)
        self._await("the dead server is lost", lambda: self._member(SECOND)["state"] == "lost")
        self.session.say("Killed", f"{SECOND}: {self._member(SECOND)['reason']}")
        self._start("starting its replacement", REPLACEMENT)
        replaced = self._lanes(REPLACEMENT)
        self.session.say("Replaced", f"a new server, a new lane: {_listed(replaced)}")
        return self._disjoint(lanes | replaced) and self._verdicts()

    def _verdicts(self) -> bool:
        self.session.line.step("after the round, members compute each other's nonces again")
        self._await("verdicts", lambda: all(self._member(each)["verdict"] for each in EXPECTED))
        if self._member(CHEAT)["verdict"]["outcome"] == EXPECTED[CHEAT]:
            self._await("the cordon", lambda: self._member(CHEAT)["state"] == "cordoned")
        found = {name: self._member(name) for name in EXPECTED}
        table = Table(Column(""), "verdict", Column("nonces", justify="right"), "why", box=None)
        for name, member in found.items():
            table.add_row(*_row(name, member["verdict"]))
        self.session.console.print(table)
        if found[CHEAT]["state"] == "cordoned":
            self.session.say("Cordoned", f"{CHEAT}: {found[CHEAT]['wish_reason']}")
        return all(found[name]["verdict"]["outcome"] == EXPECTED[name] for name in EXPECTED)

    def _disjoint(self, lanes: Mapping[str, int]) -> bool:
        self.node.stop()
        rows: list[StoredResult] = []
        while more := self.node.results(rows[-1].seq if rows else 0):
            rows += more
        nonces = [row.nonce for row in rows]
        different = len(set(nonces)) == len(nonces) and len(set(lanes.values())) == len(lanes)
        twice = "none twice" if different else "[red]SOME TWICE[/red]"
        self.session.say("Results", f"{len(nonces)} nonces of {len(lanes)} lanes, {twice}")
        return different

    def _lanes(self, *names: str) -> dict[str, int]:
        """The lanes of these servers, once each one has proved something."""
        self._await("all prove", lambda: all(self._member(each)["stored"] for each in names))
        return {name: self._member(name)["lane"] for name in names}

    def _start(self, text: str, *names: str) -> None:
        self.session.line.step(text)
        usual = self.checkpoints[FIRST]
        wanted = {name: self.checkpoints.get(name, usual) for name in names}
        self.processes.members(self.node.url, wanted)
        self._await("they join", lambda: self._ready().issuperset(names))

    def _ready(self) -> set[str]:
        members = self._snapshot()["members"]
        return {each["name"] for each in members if each["state"] == "ready"}

    def _member(self, name: str) -> Any:
        return next(each for each in self._snapshot()["members"] if each["name"] == name)

    def _snapshot(self) -> Any:
        answer = self.http.get(f"{FLEET}/snapshot")
        if answer.is_error:
            raise ReportedError(f"the fleet answers {answer.status_code}: {answer.text[:300]}")
        return answer.json()

    def _await(self, what: str, condition: Callable[[], bool]) -> None:
        def holds() -> bool:
            self.processes.require_alive()
            return condition()

        wait_while_moving(self.session, what, holds, self._reached)

    def _reached(self) -> str:
        """What moves while the demo waits. Beyond a sample, more nonces bring it no further."""
        snapshot = self._snapshot()
        jobs = snapshot["verification"]["jobs"]
        members = [
            f"{each['name']} {each['state']}, {min(each['stored'], NONCES)} nonces"
            + (f", {each['verdict']['outcome']}" if each["verdict"] else "")
            for each in sorted(snapshot["members"], key=lambda each: str(each["name"]))
        ]
        members += [f"{count} jobs {state}" for state, count in jobs.items() if count]
        return "; ".join(members) or "no member yet"


def _listed(lanes: Mapping[str, int]) -> str:
    return ", ".join(f"{name} has lane {lane}" for name, lane in lanes.items())


def _row(name: str, verdict: Any) -> tuple[str, str, str, str]:
    outcome = verdict["outcome"]
    said = f"[{COLOURS.get(outcome, 'yellow')}]{outcome}[/]"
    if outcome != EXPECTED[name]:
        said += "  [red](should not be)[/red]"
    return f"          {name}", said, str(verdict["nonces"]), escape(verdict["reason"] or "")


@dataclass(slots=True)
class DemoProcesses:
    """What the demo started, with files in ``folder``; ``close`` ends all of it."""

    folder: Path
    session: CommandSession
    dtype: ServedDtype
    _key: str = field(default_factory=secrets.token_hex)
    _stack: ExitStack = field(default_factory=ExitStack)
    _alive: "dict[str, tuple[subprocess.Popen[bytes], Path]]" = field(default_factory=dict)

    def close(self) -> None:
        # The servers and the worker beside each other, and the controller last.
        ended = [process for name, (process, _) in self._alive.items() if name != CONTROLLER]
        if ended:
            with ThreadPoolExecutor(len(ended)) as threads:
                list(threads.map(stop, ended))
        self._stack.close()

    def require_alive(self) -> None:
        """Raise ReportedError if a process has ended that was not killed."""
        for name, (process, log) in self._alive.items():
            if process.poll() is not None:
                lines = log.read_text(errors="replace").splitlines()[-SHOWN_LINES:]
                text = "\n".join([f"the {name} has ended with {process.returncode}:", *lines])
                raise ReportedError(text)

    def controller(self, policy: str) -> str:
        """Start a controller on SQLite with this policy; its URL. Raises ServerFailed."""
        file = self.folder / "policy.toml"
        file.write_text(policy, "utf-8")
        options = ("--database", self._database, "--policy", str(file), "--lanes", "8")
        command = _proofserve("fleet", "serve", *options, *PATIENT, FLEET_JOIN_KEY=self._key)
        log = self.folder / "controller.log"
        return self._running(CONTROLLER, command, free_port(), log).url

    def worker(self) -> None:
        log = self.folder / "worker.log"
        options = ("fleet", "worker", "--database", self._database)
        process = started(_proofserve(*options, **SHARED_CORES), log)
        self._stack.callback(stop, process)
        self._alive["worker"] = process, log

    def members(self, fleet: str, checkpoints: Mapping[str, Path]) -> None:
        """Start servers beside each other, which join the ``fleet`` (a URL) by themselves.

        ``checkpoints`` are what each one, by its name, serves as MODEL. Raises ServerFailed.
        """
        with ThreadPoolExecutor(len(checkpoints)) as threads:
            starts = [threads.submit(self._start, fleet, *each) for each in checkpoints.items()]
        for start in starts:
            start.result()

    def kill(self, name: str) -> None:
        """``kill -9`` for the server and its engine."""
        process, _ = self._alive.pop(name)
        os.killpg(process.pid, signal.SIGKILL)

    @property
    def _database(self) -> str:
        return str(self.folder / "fleet.sqlite")

    def _start(self, fleet: str, name: str, weights: Path) -> None:
        folder, port = self.folder / name.replace(" ", "-"), free_port()
        folder.mkdir()
        options = ServerOptions(weights, MODEL.name, dtype=self.dtype, vllm_options=ONE_PROCESS)
        served = small_server(options, folder)
        joining = {
            "POC_FLEET": fleet,
            "POC_FLEET_KEY": self._key,
            "POC_FLEET_NAME": name,
            "POC_FLEET_ADDRESS": f"http://127.0.0.1:{port}",
            "POC_CALLBACK_INTERVAL_SEC": "1",
            "POC_CALLBACK_MAX_RETRIES": "0",
        }
        command = replace(served, env={**served.env, **SHARED_CORES, **joining})
        server = self._running(name, command, port, folder / "server.log")
        # Engines that prove leave the cores to a server that starts, and to the worker.
        os.setpriority(os.PRIO_PGRP, server.process.pid, NICE)

    def _running(self, name: str, command: ServerCommand, port: int, log: Path) -> Server:
        running = running_server(command, port, log, self.session.interrupts.check)
        server = self._stack.enter_context(running)
        self._alive[name] = server.process, log
        return server


def _proofserve(*options: str, **variables: str) -> ServerCommand:
    return ServerCommand((sys.executable, "-m", "proofserve", *options), environment(variables))
