"""Measure a controller with many members: ``python -m benchmarks.fleet scale --help``.

Members are nodes over the fake engine, slow on purpose: what is measured is the controller.
"""

import asyncio
import statistics
import tempfile
import time
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any

import httpx
import typer
from rich.console import Console

from benchmarks.fleet.deployment import Deployed, deployed
from measuring.processes import ProcessFailed
from proofserve.host import machine
from proofserve.reports import Figure, Limit, Report
from proofserve.wire import FLEET, PROOFS
from proofserve_lab.bench.statistics import quantile

_BODY: dict[str, Any] = {
    "block_height": 7,
    "public_key": "key",
    "node_id": 0,
    "node_count": 1,
    "batch_size": 4,
    "params": {"model": "toy", "seq_len": 16, "k_dim": 12},
}
# Between two readings of the controller, seconds.
_EVERY_S = 1.0
_ROUND_S = 60.0
# The controller's whole page of members, and what a browser asks for.
_PAGES = {
    "status": f"{PROOFS}/status",
    "snapshot": f"{FLEET}/snapshot?limit=200",
    "dashboard": "/dashboard/snapshot",
}
_RECONCILING = 'proofserve_fleet_pass_seconds{pass="last"}'
# What takes time, and the milliseconds that 95 of 100 shall keep, of 200 members.
_TIMES: dict[str, tuple[str, float | None]] = {
    "fan_out": ("from a start call until a member generates", 1500),
    "start_call": ("a call that starts a round", None),
    "stop_call": ("a call that stops it", None),
    "status": (f"GET {_PAGES['status']}", 200),
    "snapshot": (f"GET {_PAGES['snapshot']}", 100),
    "dashboard": (f"GET {_PAGES['dashboard']}", 100),
    "pass": ("a pass of the reconciler", 1000),
}


@dataclass(slots=True)
class Samples:
    """Everything that a run measured: ``seconds`` by what took them.

    ``usage`` has (monotonic seconds, CPU seconds, MB).
    """

    seconds: dict[str, list[float]] = field(default_factory=lambda: defaultdict(list))
    distinct_lanes: list[int] = field(default_factory=list)
    usage: list[tuple[float, float, float]] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class _Run:
    """Measures one fleet. Times of members are wall-clock, as they run on this machine."""

    fleet: Deployed
    http: httpx.AsyncClient
    samples: Samples = field(default_factory=Samples)

    async def fan_out(self, number: int) -> None:
        """Start a round, and note when each member began to generate."""
        began = time.time()
        await self._call("POST", f"{PROOFS}/init/generate", {**_BODY, "block_hash": f"b{number}"})
        self.samples.seconds["start_call"].append(time.time() - began)
        began_at, lanes = await self._generating(began + _ROUND_S)
        self.samples.seconds["fan_out"] += [at - began for at in began_at]
        self.samples.distinct_lanes.append(len(set(lanes)))

    async def stop(self) -> None:
        began = time.monotonic()
        await self._call("POST", f"{PROOFS}/stop")
        self.samples.seconds["stop_call"].append(time.monotonic() - began)

    async def watch(self, seconds: float) -> None:
        """Read the controller each second, for ``seconds``."""
        end = time.monotonic() + seconds
        while (began := time.monotonic()) < end:
            for name, path in _PAGES.items():
                asked = time.perf_counter()
                await self._call("GET", path)
                self.samples.seconds[name].append(time.perf_counter() - asked)
            text = (await self.http.get(f"{self.fleet.url}{FLEET}/metrics")).text
            line = next(each for each in text.splitlines() if each.startswith(_RECONCILING))
            self.samples.seconds["pass"].append(float(line.rpartition(" ")[2]))
            usage = self.fleet.controller.usage()
            self.samples.usage.append((time.monotonic(), usage.cpu_s, usage.rss_mb))
            await asyncio.sleep(max(0.0, began + _EVERY_S - time.monotonic()))

    async def stored(self) -> int:
        """What the controller has stored of the round."""
        return int((await self._call("GET", _PAGES["status"]))["stats"]["total_processed"])

    async def _generating(self, deadline: float) -> tuple[list[float], list[int]]:
        """When each member began, and its group. Raises ProcessFailed if one does not begin."""
        waiting, began, groups = list(self.fleet.members), [], []
        while waiting:
            if time.time() > deadline:
                raise ProcessFailed(f"{len(waiting)} members have not begun, {waiting[0]} for one")
            left = []
            for url in waiting:
                status = (await self.http.get(f"{url}{PROOFS}/status")).json()
                if status["status"] == "GENERATING":
                    began.append(time.time() - status["stats"]["elapsed_s"])
                    groups.append(status["config"]["group_id"])
                else:
                    left.append(url)
            waiting = left
        return began, groups

    async def _call(self, method: str, path: str, body: Any = None) -> Any:
        answer = await self.http.request(method, f"{self.fleet.url}{path}", json=body)
        answer.raise_for_status()
        return answer.json()


async def measure(fleet: Deployed, minutes: float, rounds: int) -> Report:
    """Start and stop ``rounds`` rounds, then watch the last one for ``minutes``."""
    async with httpx.AsyncClient(timeout=60.0, trust_env=False) as http:
        run = _Run(fleet, http)
        for number in range(rounds):
            if number:
                await run.stop()
            await run.fan_out(number)
        await run.watch(60.0 * minutes)
        # A stop waits for what the members have found.
        await run.stop()
        stored = await run.stored()
    return summarised(run.samples, len(fleet.members), stored)


def summarised(samples: Samples, members: int, stored: int) -> Report:
    lanes = min(samples.distinct_lanes, default=None)
    figures = [
        Figure("distinct_lanes", lanes, "of the members in a round, the fewest", Limit(members)),
        Figure("stored", stored, "artifacts of the last round"),
        *(figure for name, seconds in samples.seconds.items() for figure in _spread(name, seconds)),
        *_controller(samples.usage),
    ]
    windows = {**samples.seconds, "usage": samples.usage, "distinct_lanes": samples.distinct_lanes}
    return Report("fleet, scale", tuple(figures), {"members": members}, windows, machine())


def _spread(name: str, seconds: Sequence[float]) -> list[Figure]:
    meaning, aim = _TIMES[name]
    limit = None if aim is None else Limit(aim, at_most=True)
    return [
        Figure(f"{name}_ms", 1e3 * statistics.median(seconds), f"{meaning}, the median"),
        Figure(f"{name}_ms_p95", 1e3 * (quantile(seconds, 0.95) or 0.0), "the same, p95", limit),
        Figure(f"{name}_ms_longest", 1e3 * max(seconds), "the same, the longest"),
    ]


def _controller(usage: Sequence[tuple[float, float, float]]) -> list[Figure]:
    if not (third := len(usage) // 3):
        return []
    (first_at, first_cpu, _), (last_at, last_cpu, _) = usage[0], usage[-1]
    first, last = (
        statistics.median(mb for _, _, mb in part) for part in (usage[:third], usage[-third:])
    )
    return [
        Figure("cpu_share", (last_cpu - first_cpu) / (last_at - first_at), "of the controller"),
        Figure("memory_mb", last, "of the controller, in the last third of the run"),
        Figure("memory_growth", last / first, "that over the first third"),
    ]


def scale(
    members: Annotated[int, typer.Option(min=1, help="members of the fleet")] = 200,
    minutes: Annotated[float, typer.Option(min=0, help="how long the last round is watched")] = 1.0,
    rounds: Annotated[int, typer.Option(min=1, help="starts that are measured")] = 5,
    call_s: Annotated[
        float, typer.Option(min=0, help="seconds of an engine's call: 4 nonces")
    ] = 4.0,
    database: Annotated[
        str | None, typer.Option(help="postgresql://...; without it a new SQLite file")
    ] = None,
    json_: Annotated[Path | None, typer.Option("--json", help="write the figures here")] = None,
) -> None:
    """Start a controller and many members, and measure rounds, answers, passes and memory."""
    with tempfile.TemporaryDirectory(prefix="fleet-") as folder:
        file = database or str(Path(folder) / "fleet.sqlite")
        try:
            with deployed(Path(folder), members, call_s, file) as fleet:
                report = asyncio.run(measure(fleet, minutes, rounds))
        except ProcessFailed as error:
            raise SystemExit(f"nothing was measured: {error}") from error
    Console().print(report.table())
    if json_ is not None:
        report.write(json_)
