"""Runs the rounds: every contestant in turn, restarted for every scenario, under its load."""

import json
import shutil
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx

from benchmarks.gateway.contestants import (
    DIRECT,
    KEYS,
    PROOFSERVE,
    Contestant,
    Site,
    Skipped,
    Unusable,
)
from benchmarks.gateway.readings import Reading, Results, figures
from benchmarks.gateway.scenarios import Scenario
from measuring.processes import Process, ProcessFailed, Usage, pinned, running, wait_until
from proofserve.cli.session import ProgressLine
from proofserve.wiring.launch import free_port

SELF_CHECK_S = 0.3
# Seconds that a server may take to end when it is asked to.
END_S = 5.0
# Seconds. LiteLLM takes long to import, and all contestants share the machine.
START_LIMIT_S = 90.0
# Seconds for the warm-up and the end, beside the measured time.
EXTRA_S = 150.0
# Seconds before memory is read, so that each held stream has had a few events.
SETTLE_S = 3.0
CHAT = {"model": "mock", "messages": [{"role": "user", "content": "Are you there?"}]}

# A line that the load generator prints.
Outcome = dict[str, Any]
# The mock backend and the load generator are C, so that neither is the limit.
SOURCES = Path(__file__).with_name("native")
SHARED = ("http.c", "net.c")
PROGRAMS = {
    "mock": ("mock.c", *SHARED),
    "load": ("load.c", "exchange.c", "options.c", "marks.c", "samples.c", *SHARED),
}
OPTIONS = ("-std=gnu11", "-O2", "-Wall", "-Wextra")


def build(folder: Path) -> tuple[Path, Path]:
    """The mock backend and the load generator, compiled into ``folder`` if their sources changed.

    Raises Unusable.
    """
    compiler = shutil.which("cc") or shutil.which("gcc")
    if compiler is None:
        raise Unusable("a C compiler is needed for the load generator: apt install gcc libc6-dev")
    folder.mkdir(parents=True, exist_ok=True)
    newest = max(file.stat().st_mtime for file in SOURCES.iterdir())
    for name, sources in PROGRAMS.items():
        program = folder / name
        if not program.exists() or program.stat().st_mtime < newest:
            _compile(compiler, [SOURCES / source for source in sources], program)
    return folder / "mock", folder / "load"


def _compile(compiler: str, sources: list[Path], program: Path) -> None:
    argv = [compiler, *OPTIONS, "-o", str(program), *map(str, sources), "-lm"]
    done = subprocess.run(argv, capture_output=True, text=True, check=False)
    if done.returncode:
        raise Unusable(f"{program.name} does not compile:\n{done.stderr}")


def wait_until_it_relays(port: int, service: Process) -> None:
    """Return when a chat request is answered. Raises Skipped if it ends, or answers none."""
    url, answer = f"http://127.0.0.1:{port}/v1/chat/completions", "no answer"

    def relays() -> bool:
        nonlocal answer
        try:
            response = client.post(url, json=CHAT)
        except httpx.HTTPError as error:
            answer = str(error)
            return False
        answer = f"status {response.status_code}"
        return response.status_code == httpx.codes.OK

    with httpx.Client(headers={"Authorization": f"Bearer {KEYS[0]}"}, timeout=5.0) as client:
        try:
            wait_until(relays, "a relayed chat", [service], START_LIMIT_S)
        except ProcessFailed as error:
            raise Skipped(f"{error} ({answer})") from error


def _parsed(line: str, reason: str) -> Outcome:
    try:
        outcome: Outcome = json.loads(line)
    except ValueError:
        raise Unusable(f"the load generator gave no result: {reason.strip()}") from None
    return outcome


@dataclass(frozen=True, slots=True)
class Plan:
    """The contestants, scenarios, seconds and cores; backend and clients share ``load_core``."""

    contestants: Sequence[Contestant]
    scenarios: Sequence[Scenario]
    rounds: int
    seconds: float
    load_core: int
    gateway_core: int
    cache: Path


@dataclass(frozen=True, slots=True)
class Bench:
    """``mock`` is the backend; ``load``, the load generator, uses the keys of clients in turn."""

    plan: Plan
    mock: Path
    load: Path
    line: ProgressLine
    results: Results = field(default_factory=Results)

    def run(self) -> Results:
        """Raises Unusable if the mock backend or the load generator does not work by itself."""
        self._check_own_programs()
        installed = self._installed()
        for number in range(self.plan.rounds):
            # Every second round reverses the order: no contestant always follows the same one.
            for each in installed if number % 2 == 0 else reversed(installed):
                if each[0].name not in self.results.skipped:
                    self._take_turn(*each, number)
        return self.results

    def _check_own_programs(self) -> None:
        self.line.step("checking the mock backend and the load generator")
        with self._backend() as port:
            for scenario in self.plan.scenarios:
                if scenario.mode != "hold" and not scenario.once:
                    _refuse_errors(scenario, self._load(scenario, port, SELF_CHECK_S))

    def _installed(self) -> list[tuple[Contestant, Path | None]]:
        """The contestants and their programs; ``direct`` has none."""
        found = []
        for contestant in self.plan.contestants:
            self.line.step(f"finding {contestant.name}, or installing it")
            try:
                source = contestant.source
                program = source(self.plan.cache) if source else None
                found.append((contestant, program))
            except Skipped as error:
                self.results.skipped[contestant.name] = str(error)
        return found

    def _take_turn(self, contestant: Contestant, program: Path | None, number: int) -> None:
        try:
            with self._backend() as backend:
                if program is None:
                    self._measure(contestant, number, backend, lambda: None)
                    return
                self.line.step(f"round {number + 1}: starting {contestant.name}")
                with self._gateway(contestant, program, backend) as (port, gateway):
                    self._measure(contestant, number, port, gateway.usage)
        except Skipped as error:
            self.results.skipped[contestant.name] = str(error)

    def _measure(
        self, contestant: Contestant, number: int, port: int, usage: Callable[[], Usage | None]
    ) -> None:
        for scenario in self.plan.scenarios:
            if not _takes_part(contestant, scenario) or (scenario.once and number):
                continue
            self.line.step(f"round {number + 1}: {contestant.name}, {scenario.name}")
            before = usage()
            if scenario.mode == "hold":
                outcome, after = self._hold(scenario, port, usage)
            else:
                outcome = self._load(scenario, port, self.plan.seconds)
                after = usage()
            if contestant.name == DIRECT:
                _refuse_errors(scenario, outcome)
            self.results.readings.append(
                Reading(
                    round=number,
                    contestant=contestant.name,
                    scenario=scenario.name,
                    figures=figures(outcome, before, after),
                    errors=outcome["errors"],
                    first_error=outcome["first_error"],
                )
            )

    def _load(self, scenario: Scenario, port: int, seconds: float) -> Outcome:
        """Send the scenario's load to a gateway for ``seconds``."""
        done = subprocess.run(
            self._argv(scenario, port, seconds),
            capture_output=True,
            text=True,
            timeout=(scenario.seconds or seconds) + EXTRA_S,
            check=False,
        )
        return _parsed(done.stdout, done.stderr)

    def _hold(
        self, scenario: Scenario, port: int, usage: Callable[[], Usage | None]
    ) -> tuple[Outcome, Usage | None]:
        """Open the scenario's streams, and read the gateway's usage while all are open."""
        argv = self._argv(scenario, port, 0.0)
        with subprocess.Popen(argv, stdout=subprocess.PIPE, text=True) as process:
            try:
                line = process.stdout.readline() if process.stdout else ""
                outcome = _parsed(line, "it printed nothing")
                if outcome["open"] < scenario.connections:
                    return outcome, None
                time.sleep(SETTLE_S)
                return outcome, usage()
            finally:
                process.kill()

    def _argv(self, scenario: Scenario, port: int, seconds: float) -> Sequence[str]:
        options = [str(self.load), *scenario.options(seconds), "--port", str(port)]
        for key in KEYS:
            options += ["--key", key]
        return pinned(options, self.plan.load_core)

    @contextmanager
    def _backend(self) -> Iterator[int]:
        port = free_port()
        argv = [str(self.mock), str(port)]
        with _folder() as folder, _running(argv, self.plan.load_core, folder) as mock:
            try:
                wait_until_it_relays(port, mock)
            except Skipped as error:
                raise Unusable(f"the mock backend: {error}") from error
            yield port

    @contextmanager
    def _gateway(
        self, contestant: Contestant, program: Path, backend: int
    ) -> Iterator[tuple[int, Process]]:
        with _folder() as folder:
            site = Site(program, f"127.0.0.1:{backend}", free_port(), free_port(), folder)
            command = contestant.command(site)
            with _running(command, self.plan.gateway_core, folder) as gateway:
                wait_until_it_relays(site.port, gateway)
                yield site.port, gateway


def _running(argv: Sequence[str], core: int, folder: Path) -> AbstractContextManager[Process]:
    return running(argv, folder / "server.log", cwd=folder, core=core, end_s=END_S)


def starts_missing(results: Results, plan: Plan) -> bool:
    """Whether the plan has proofserve and proofserve did not run."""
    asked = any(contestant.name == PROOFSERVE for contestant in plan.contestants)
    return asked and PROOFSERVE in results.skipped


def _takes_part(contestant: Contestant, scenario: Scenario) -> bool:
    if scenario.mode == "hold" and contestant.source is None:
        return False
    most = contestant.most_streams
    fits = scenario.mode == "plain" or most is None or scenario.connections <= most
    return fits and scenario.includes(contestant.name)


def _refuse_errors(scenario: Scenario, outcome: Outcome) -> None:
    if outcome["errors"]:
        raise Unusable(
            f"{scenario.name}: the load generator and the mock backend had {outcome['errors']} "
            f"errors without any gateway between them (the first: {outcome['first_error']}). "
            "Nothing that is measured with them would mean anything."
        )


@contextmanager
def _folder() -> Iterator[Path]:
    with tempfile.TemporaryDirectory(
        prefix="proofserve-gateway-bench-", ignore_cleanup_errors=True
    ) as name:
        yield Path(name)
