"""The loads that every contestant gets."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from benchmarks.gateway.contestants import Unusable

Mode = Literal["plain", "streams", "hold"]
MS = 1000
LONG_S = 300.0


@dataclass(frozen=True, slots=True)
class Scenario:
    """One load. ``seconds`` overrides the length that the user chose."""

    name: str
    mode: Mode
    connections: int
    meaning: str
    body_bytes: int = 300
    chunks: int = 64
    gap_us: int = 0
    seconds: float | None = None
    # Empty: all contestants.
    contestants: tuple[str, ...] = ()
    once: bool = False

    def options(self, seconds: float) -> list[str]:
        return [
            self.mode,
            *("--connections", str(self.connections)),
            *("--body-bytes", str(self.body_bytes)),
            *("--chunks", str(self.chunks)),
            *("--gap-us", str(self.gap_us)),
            *("--seconds", str(self.seconds or seconds)),
        ]

    def includes(self, contestant: str) -> bool:
        return not self.contestants or contestant in self.contestants


SCENARIOS = (
    Scenario("plain-1", "plain", 1, "plain requests, one after the other"),
    Scenario("plain-32", "plain", 32, "plain requests, 32 at a time"),
    Scenario("plain-100", "plain", 100, "plain requests, 100 at a time"),
    Scenario("plain-32k", "plain", 32, "prompts of 32 KB, 32 at a time", body_bytes=32 * 1024),
    Scenario("streams-20ms", "streams", 100, "100 streams, an event every 20 ms", gap_us=20 * MS),
    Scenario("streams-5ms", "streams", 100, "100 streams, an event every 5 ms", gap_us=5 * MS),
    Scenario("streams-no-gap", "streams", 100, "100 streams as fast as they go"),
    Scenario(
        "memory-1000",
        "hold",
        1000,
        "1,000 open streams, an event a second",
        chunks=1_000_000,
        gap_us=1000 * MS,
        seconds=60.0,
    ),
)
# Five minutes for each contestant would be an hour. `direct` shows the pauses of the machine.
LONG = Scenario(
    "long-20ms",
    "streams",
    100,
    "100 streams, an event every 20 ms, for five minutes",
    gap_us=20 * MS,
    seconds=LONG_S,
    contestants=("direct", "proofserve"),
    once=True,
)


def chosen(prefixes: Sequence[str], long: bool) -> tuple[Scenario, ...]:
    """The scenarios whose names equal or begin with one of ``prefixes``; without prefixes all.

    Raises Unusable for a prefix that fits none.
    """
    every = (*SCENARIOS, LONG) if long else SCENARIOS
    for prefix in prefixes:
        if not any(scenario.name.startswith(prefix) for scenario in every):
            names = ", ".join(scenario.name for scenario in every)
            raise Unusable(f"no scenario begins with {prefix!r}; there are {names}")
    return tuple(s for s in every if not prefixes or any(_fits(s, p, every) for p in prefixes))


def _fits(scenario: Scenario, prefix: str, every: Sequence[Scenario]) -> bool:
    """Whether the prefix fits the scenario: plain-1 fits only itself, not plain-100."""
    if any(other.name == prefix for other in every):
        return scenario.name == prefix
    return scenario.name.startswith(prefix)
