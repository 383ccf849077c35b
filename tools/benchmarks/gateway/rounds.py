"""Runs the rounds: every contestant in turn, restarted for every scenario."""

import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from benchmarks.gateway.contestants import DIRECT, PROOFSERVE, Contestant, Site
from benchmarks.gateway.errors import Skipped, Unusable
from benchmarks.gateway.load import Load, Outcome, wait_until_it_relays
from benchmarks.gateway.processes import Service, Usage, running
from benchmarks.gateway.programs import Programs
from benchmarks.gateway.readings import Reading, Results, figures
from benchmarks.gateway.scenarios import Scenario
from proofserve.cli.session import ProgressLine
from proofserve.wiring.launch import free_port

SELF_CHECK_S = 0.3


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
class Installed:
    """A contestant that is installed. ``direct`` has no program."""

    contestant: Contestant
    program: Path | None


class Bench:
    """Runs a plan."""

    def __init__(self, plan: Plan, programs: Programs, line: ProgressLine) -> None:
        self._plan = plan
        self._programs = programs
        self._line = line
        self._load = Load(programs.load, plan.load_core)
        self._results = Results()

    def run(self) -> Results:
        """Run the whole plan.

        Raises:
            Unusable: the mock backend or the load generator does not work by itself.
        """
        self._check_own_programs()
        installed = self._installed()
        for number in range(self._plan.rounds):
            # Every second round reverses the order: no contestant always follows the same one.
            for each in installed if number % 2 == 0 else reversed(installed):
                if each.contestant.name not in self._results.skipped:
                    self._take_turn(each, number)
        return self._results

    def _check_own_programs(self) -> None:
        self._line.step("checking the mock backend and the load generator")
        with self._backend() as port:
            for scenario in self._plan.scenarios:
                if scenario.mode != "hold" and not scenario.once:
                    _refuse_errors(scenario, self._load.run(scenario, port, SELF_CHECK_S))

    def _installed(self) -> list[Installed]:
        found = []
        for contestant in self._plan.contestants:
            self._line.step(f"finding {contestant.name}, or installing it")
            try:
                source = contestant.source
                program = source.program(self._plan.cache) if source else None
                found.append(Installed(contestant, program))
            except Skipped as error:
                self._results.skipped[contestant.name] = str(error)
        return found

    def _take_turn(self, installed: Installed, number: int) -> None:
        name = installed.contestant.name
        try:
            with self._backend() as backend:
                if installed.program is None:
                    self._measure(installed, number, backend, lambda: None)
                    return
                self._line.step(f"round {number + 1}: starting {name}")
                with self._gateway(installed.contestant, installed.program, backend) as (
                    port,
                    gateway,
                ):
                    self._measure(installed, number, port, gateway.usage)
        except Skipped as error:
            self._results.skipped[name] = str(error)

    def _measure(
        self, installed: Installed, number: int, port: int, usage: Callable[[], Usage | None]
    ) -> None:
        contestant = installed.contestant
        for scenario in self._plan.scenarios:
            if not _takes_part(contestant, scenario) or (scenario.once and number):
                continue
            self._line.step(f"round {number + 1}: {contestant.name}, {scenario.name}")
            before = usage()
            if scenario.mode == "hold":
                outcome, after = self._load.hold(scenario, port, usage)
            else:
                outcome = self._load.run(scenario, port, self._plan.seconds)
                after = usage()
            if contestant.name == DIRECT:
                _refuse_errors(scenario, outcome)
            self._results.readings.append(
                Reading(
                    round=number,
                    contestant=contestant.name,
                    scenario=scenario.name,
                    figures=figures(outcome, before, after),
                    errors=outcome["errors"],
                    first_error=outcome["first_error"],
                )
            )

    @contextmanager
    def _backend(self) -> Iterator[int]:
        port = free_port()
        with (
            _folder() as folder,
            running([str(self._programs.mock), str(port)], self._plan.load_core, folder) as mock,
        ):
            try:
                wait_until_it_relays(port, mock)
            except Skipped as error:
                raise Unusable(f"the mock backend: {error}") from error
            yield port

    @contextmanager
    def _gateway(
        self, contestant: Contestant, program: Path, backend: int
    ) -> Iterator[tuple[int, Service]]:
        with _folder() as folder:
            site = Site(program, f"127.0.0.1:{backend}", free_port(), free_port(), folder)
            command = contestant.command(site)
            with running(command, self._plan.gateway_core, folder) as gateway:
                wait_until_it_relays(site.port, gateway)
                yield site.port, gateway


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
