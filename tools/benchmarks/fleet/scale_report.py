"""What a run of ``scale`` found, in seconds and megabytes, beside what is aimed at."""

import statistics
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field

_MS = 1000


@dataclass(slots=True)
class Samples:
    """Everything that a run measured; ``usage`` has (monotonic seconds, CPU seconds, MB)."""

    start_call_s: list[float] = field(default_factory=list)
    stop_call_s: list[float] = field(default_factory=list)
    fan_out_s: list[float] = field(default_factory=list)
    distinct_lanes: list[int] = field(default_factory=list)
    reads_s: dict[str, list[float]] = field(default_factory=lambda: defaultdict(list))
    pass_s: list[float] = field(default_factory=list)
    usage: list[tuple[float, float, float]] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class Spread:
    """The middle, the 95th percentile and the largest of ``count`` values."""

    count: int
    median: float
    p95: float
    longest: float


@dataclass(frozen=True, slots=True)
class Report:
    """``memory_growth``: median of the last third of the run over that of the first third."""

    members: int
    distinct_lanes: Sequence[int]
    stored: int
    fan_out_s: Spread
    start_call_s: Spread
    stop_call_s: Spread | None
    reads_s: dict[str, Spread]
    pass_s: Spread | None
    cpu_share: float | None
    memory_mb: float | None
    memory_growth: float | None

    def text(self) -> str:
        """A table; aims are for the 95th percentile of 200 members."""
        rows = [
            ("fan-out of a round", self.fan_out_s, 1.5),
            ("start call", self.start_call_s, None),
            ("stop call", self.stop_call_s, None),
            *((f"GET {name}", spread, _AIMS[name]) for name, spread in self.reads_s.items()),
            ("pass of the reconciler", self.pass_s, 1.0),
        ]
        lines = [f"{'':24}{'median':>10}{'p95':>10}{'longest':>10}{'aim':>10}   ms"]
        lines += [_line(name, spread, aim) for name, spread, aim in rows if spread]
        lines.append(
            f"{self.members} members, distinct lanes of each round:"
            f" {', '.join(map(str, self.distinct_lanes))}; stored of the last one: {self.stored}"
        )
        if self.memory_mb is not None:
            lines.append(
                f"controller: {self.cpu_share:.0%} of a core, {self.memory_mb:.0f} MB,"
                f" last third over first third {self.memory_growth:.3f}"
            )
        return "\n".join(lines) + "\n"


_AIMS = {"status": 0.2, "snapshot": 0.1, "dashboard": 0.1}


def summarised(samples: Samples, members: int, stored: int) -> Report:
    usage = samples.usage
    third = len(usage) // 3
    cpu_share = memory_mb = growth = None
    if third:
        (first_at, first_cpu, _), (last_at, last_cpu, _) = usage[0], usage[-1]
        cpu_share = (last_cpu - first_cpu) / (last_at - first_at)
        memory_mb = statistics.median(mb for _, _, mb in usage[-third:])
        growth = memory_mb / statistics.median(mb for _, _, mb in usage[:third])
    return Report(
        members=members,
        distinct_lanes=tuple(samples.distinct_lanes),
        stored=stored,
        fan_out_s=_spread(samples.fan_out_s),
        start_call_s=_spread(samples.start_call_s),
        stop_call_s=_spread(samples.stop_call_s) if samples.stop_call_s else None,
        reads_s={name: _spread(values) for name, values in samples.reads_s.items()},
        pass_s=_spread(samples.pass_s) if samples.pass_s else None,
        cpu_share=cpu_share,
        memory_mb=memory_mb,
        memory_growth=growth,
    )


def _spread(values: Sequence[float]) -> Spread:
    ordered = sorted(values)
    p95 = ordered[min(len(ordered) - 1, int(0.95 * len(ordered)))]
    return Spread(len(ordered), statistics.median(ordered), p95, ordered[-1])


def _line(name: str, spread: Spread, aim: float | None) -> str:
    values = "".join(f"{_MS * each:10.0f}" for each in (spread.median, spread.p95, spread.longest))
    return f"{name:24}{values}{f'{_MS * aim:10.0f}' if aim else ''}"
