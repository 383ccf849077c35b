"""The figures of one contestant in one scenario of one round, and their medians."""

import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from measuring.processes import Usage

# The names of the load generator's objects in figures.
DURATIONS = {"latency_ms": "latency", "first_event_ms": "first", "delay_ms": "delay"}


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

    def scenarios(self) -> list[str]:
        return list(dict.fromkeys(reading.scenario for reading in self.readings))

    def median(self, scenario: str, contestant: str, figure: str) -> float | None:
        return _median(self._by_round(scenario, contestant, figure).values())

    def ratio(self, scenario: str, figure: str, ours: str, peer: str) -> float | None:
        """The median of (ours / the peer's) per round, so that the machine's drift cancels."""
        mine = self._by_round(scenario, ours, figure)
        theirs = self._by_round(scenario, peer, figure)
        common = mine.keys() & theirs.keys()
        return _median(mine[number] / theirs[number] for number in common if theirs[number])

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


def _median(values: Iterable[float]) -> float | None:
    found = list(values)
    return statistics.median(found) if found else None
