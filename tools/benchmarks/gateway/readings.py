"""The figures of one contestant in one scenario of one round, their medians, and the limits.

The limits in milliseconds were set on one machine. On a slower machine the ratio to vllm-router in
the same run counts instead. A machine counts as slower if vllm-router's figure is above its figure
on the first machine. The figure of `direct` says less, because other tools measure it.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from benchmarks.gateway.contestants import NAIVE, NGINX, PROOFSERVE, VLLM_ROUTER
from measuring.processes import Usage
from proofserve.reports import Limit
from proofserve_lab.bench.statistics import median

# The names of the load generator's objects in figures.
DURATIONS = {"latency_ms": "latency", "first_event_ms": "first", "delay_ms": "delay"}

Verdict = Literal["PASS", "FAIL", "not run", "reached", "missed"]
NOT_WORSE = Limit(1.0, at_most=True)


@dataclass(frozen=True, slots=True)
class Reading:
    """One run. Durations are milliseconds; ``cpu_us`` is per request, for streams per chunk."""

    round: int
    contestant: str
    scenario: str
    figures: Mapping[str, float]
    errors: int
    first_error: str


def figures(
    result: Mapping[str, Any], before: Usage | None, after: Usage | None
) -> dict[str, float]:
    """The figures of a run: the load generator's ``result``, and the gateway's usage."""
    streamed = result["mode"] != "plain"
    found: dict[str, float] = {
        "per_second": result["chunks_per_second" if streamed else "answers_per_second"],
        "open": result["open"],
    }
    for key, name in DURATIONS.items():
        for quantile, value in (result[key] or {}).items():
            found[f"{name}_{quantile}"] = value
    done = result["all_chunks" if streamed else "all_answers"]
    if after:
        found["rss_mb"] = after.rss_mb
    if before and after and done:
        found["cpu_us"] = 1e6 * (after.cpu_s - before.cpu_s) / done
    return found


@dataclass(frozen=True, slots=True)
class Results:
    """All readings, with their medians, ratios and errors."""

    readings: list[Reading] = field(default_factory=list)
    skipped: dict[str, str] = field(default_factory=dict)

    def contestants(self, scenario: str) -> list[str]:
        """The contestants of a scenario, in the order of their first reading."""
        return list(dict.fromkeys(r.contestant for r in self._of(scenario)))

    def median(self, scenario: str, contestant: str, figure: str) -> float | None:
        return median([*self._by_round(scenario, contestant, figure).values()])

    def ratio(self, scenario: str, figure: str, ours: str, peer: str) -> float | None:
        """The median of (ours / the peer's) per round, so that the machine's drift cancels."""
        mine = self._by_round(scenario, ours, figure)
        theirs = self._by_round(scenario, peer, figure)
        common = mine.keys() & theirs.keys()
        return median([mine[number] / theirs[number] for number in common if theirs[number]])

    def errors(self, scenario: str, contestant: str) -> int:
        return sum(r.errors for r in self._of(scenario) if r.contestant == contestant)

    def all_errors(self, contestant: str) -> int | None:
        """The errors over all scenarios; None if the contestant has no reading."""
        mine = [r.errors for r in self.readings if r.contestant == contestant]
        return sum(mine) if mine else None

    def first_errors(self) -> dict[str, str]:
        return {
            f"{r.contestant}, {r.scenario}": f"{r.errors} errors, first: {r.first_error}"
            for r in reversed(self.readings)
            if r.errors
        }

    def _of(self, scenario: str) -> Sequence[Reading]:
        return [reading for reading in self.readings if reading.scenario == scenario]

    def _by_round(self, scenario: str, contestant: str, figure: str) -> dict[int, float]:
        return {
            r.round: r.figures[figure]
            for r in self._of(scenario)
            if r.contestant == contestant and figure in r.figures
        }


@dataclass(frozen=True, slots=True)
class Judged:
    """A line of the acceptance with its verdict. An aim is reached or missed, and never fails."""

    text: str
    limit: str
    value: float | None
    verdict: Verdict
    note: str = ""


@dataclass(frozen=True, slots=True)
class Criterion:
    """A limit on our figure, which is divided by that of ``peer`` if one is named.

    ``router`` is vllm-router's figure where a limit in ``unit`` was set.
    """

    text: str
    scenario: str
    figure: str
    limit: Limit
    peer: str = ""
    aim: bool = False
    unit: str = ""
    router: float | None = None

    def judge(self, results: Results) -> Judged:
        if self.peer:
            value = results.ratio(self.scenario, self.figure, PROOFSERVE, self.peer)
            limit = f"{self.limit} x {self.peer}"
        else:
            value = results.median(self.scenario, PROOFSERVE, self.figure)
            limit = f"{self.limit} {self.unit}"
        verdict = _verdict(value, self.limit, self.aim)
        if verdict == "FAIL" and self._machine_is_slower(results):
            ratio = results.ratio(self.scenario, self.figure, PROOFSERVE, VLLM_ROUTER)
            if ratio is not None:
                note = f"slower machine: {ratio:.2f} x {VLLM_ROUTER} counts, {NOT_WORSE}"
                return Judged(self.text, limit, value, _verdict(ratio, NOT_WORSE), note)
        return Judged(self.text, limit, value, verdict)

    def _machine_is_slower(self, results: Results) -> bool:
        here = results.median(self.scenario, VLLM_ROUTER, self.figure)
        return self.router is not None and here is not None and here > self.router


def _at_most(
    bound: float, unit: str, text: str, scenario: str, figure: str, router: float | None = None
) -> Criterion:
    return Criterion(text, scenario, figure, Limit(bound, True), unit=unit, router=router)


CRITERIA: tuple[Criterion, ...] = (
    Criterion("requests/s, 32 at a time", "plain-32", "per_second", Limit(1.0), VLLM_ROUTER),
    Criterion("requests/s, 100 at a time", "plain-100", "per_second", Limit(1.0), VLLM_ROUTER),
    Criterion("requests/s, 32 at a time", "plain-32", "per_second", Limit(0.7), NGINX, aim=True),
    Criterion("requests/s, 100 at a time", "plain-100", "per_second", Limit(0.7), NGINX, aim=True),
    Criterion("p99 latency, 32 at a time", "plain-32", "latency_p99", NOT_WORSE, VLLM_ROUTER),
    Criterion("p99 latency, 100 at a time", "plain-100", "latency_p99", NOT_WORSE, VLLM_ROUTER),
    Criterion("requests/s, 100 at a time", "plain-100", "per_second", Limit(40.0), NAIVE),
    _at_most(0.2, "ms", "added delay p50, every 20 ms", "streams-20ms", "delay_p50", 0.10),
    _at_most(0.6, "ms", "added delay p99, every 20 ms", "streams-20ms", "delay_p99", 0.31),
    _at_most(1.1, "ms", "first byte p99, every 20 ms", "streams-20ms", "first_p99", 0.80),
    _at_most(1.2, "ms", "added delay p99, every 5 ms", "streams-5ms", "delay_p99", 0.82),
    Criterion("chunks/s without a gap", "streams-no-gap", "per_second", Limit(1.0), VLLM_ROUTER),
    _at_most(10.0, "ms", "added delay p99.9, five minutes", "long-20ms", "delay_p999"),
    _at_most(200.0, "MB", "memory at 1,000 open streams", "memory-1000", "rss_mb"),
)


def judge(results: Results) -> Iterator[Judged]:
    for criterion in CRITERIA:
        yield criterion.judge(results)
    errors = results.all_errors(PROOFSERVE)
    none = Limit(0, at_most=True)
    yield Judged("errors in all scenarios", str(none), errors, _verdict(errors, none))


def _verdict(value: float | None, limit: Limit, aim: bool = False) -> Verdict:
    if value is None:
        return "not run"
    if aim:
        return "reached" if limit.holds(value) else "missed"
    return "PASS" if limit.holds(value) else "FAIL"
