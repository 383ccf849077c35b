"""The tables for people and the JSON for programs."""

from collections.abc import Iterator, Sequence
from dataclasses import asdict
from typing import Any

from rich.table import Table

from benchmarks.gateway.contestants import NAIVE, NGINX, PROOFSERVE, VLLM_ROUTER
from benchmarks.gateway.readings import Judged, Results
from benchmarks.gateway.rounds import Plan
from benchmarks.gateway.scenarios import Mode, Scenario
from proofserve.host import machine
from proofserve.reports import readable

# (figure, heading). Durations are milliseconds, CPU is microseconds per request or chunk.
COLUMNS: dict[Mode, Sequence[tuple[str, str]]] = {
    "plain": (
        ("per_second", "requests/s"),
        ("latency_p50", "p50 ms"),
        ("latency_p99", "p99 ms"),
        ("cpu_us", "CPU us"),
        ("rss_mb", "RSS MB"),
    ),
    "streams": (
        ("per_second", "chunks/s"),
        ("first_p50", "first p50"),
        ("first_p99", "first p99"),
        ("delay_p50", "delay p50"),
        ("delay_p99", "delay p99"),
        ("delay_p999", "delay p99.9"),
        ("delay_max", "max ms"),
        ("cpu_us", "CPU us"),
        ("rss_mb", "RSS MB"),
    ),
    "hold": (("open", "open streams"), ("rss_mb", "RSS MB")),
}
# The figures in which gateways are compared.
COMPARED: dict[Mode, Sequence[str]] = {
    "plain": ("per_second", "latency_p99", "cpu_us"),
    "streams": ("per_second", "first_p99", "delay_p99", "cpu_us"),
    "hold": ("rss_mb",),
}
PEERS = (VLLM_ROUTER, NGINX, NAIVE)
COLOURS = {"PASS": "green", "FAIL": "red", "reached": "green", "missed": "yellow"}


def tables(results: Results, plan: Plan, judged: Sequence[Judged]) -> Iterator[Table]:
    read = [s for s in plan.scenarios if results.contestants(s.name)]
    for scenario in read:
        yield _scenario(results, scenario)
    if PROOFSERVE in {reading.contestant for reading in results.readings}:
        yield _ratios(results, read)
    if notes := {**results.skipped, **results.first_errors()}:
        yield _notes(notes)
    yield _acceptance(judged)


def document(results: Results, plan: Plan, judged: Sequence[Judged]) -> dict[str, Any]:
    """All readings and the figures computed from them, as JSON values."""
    return {
        "passed": all(line.verdict != "FAIL" for line in judged),
        "acceptance": [asdict(line) for line in judged],
        "medians": {
            scenario.name: {
                name: {
                    figure: results.median(scenario.name, name, figure)
                    for figure, _ in COLUMNS[scenario.mode]
                }
                for name in results.contestants(scenario.name)
            }
            for scenario in plan.scenarios
        },
        "skipped": results.skipped,
        "readings": [asdict(reading) for reading in results.readings],
        "setup": {"rounds": plan.rounds, "seconds": plan.seconds},
        "machine": machine(),
    }


def _table(title: str, *headings: str) -> Table:
    table = Table(title=title, title_justify="left")
    for number, heading in enumerate(headings):
        table.add_column(heading, justify="right" if number else "left")
    return table


def _scenario(results: Results, scenario: Scenario) -> Table:
    columns = COLUMNS[scenario.mode]
    headings = [heading for _, heading in columns]
    table = _table(f"{scenario.name}: {scenario.meaning}", "", *headings, "errors")
    for name in results.contestants(scenario.name):
        cells = [readable(results.median(scenario.name, name, figure)) for figure, _ in columns]
        table.add_row(name, *cells, str(results.errors(scenario.name, name)))
    return table


def _ratios(results: Results, scenarios: Sequence[Scenario]) -> Table:
    table = _table(f"{PROOFSERVE} over its peers (1.2 is 1.2 times theirs)", "", *PEERS)
    for scenario in scenarios:
        headings = dict(COLUMNS[scenario.mode])
        for figure in COMPARED[scenario.mode]:
            ratios = [results.ratio(scenario.name, figure, PROOFSERVE, peer) for peer in PEERS]
            if any(ratio is not None for ratio in ratios):
                label = f"{scenario.name}, {headings[figure]}"
                table.add_row(label, *(readable(ratio) for ratio in ratios))
    return table


def _notes(notes: dict[str, str]) -> Table:
    table = _table("left out, or not answered as it should be", "", "why")
    table.columns[1].justify = "left"
    for name, why in notes.items():
        table.add_row(name, why)
    return table


def _acceptance(judged: Sequence[Judged]) -> Table:
    table = _table("acceptance", "", "limit", "value", "", "")
    for line in judged:
        colour = COLOURS.get(line.verdict, "dim")
        verdict = f"[{colour}]{line.verdict}[/{colour}]"
        table.add_row(line.text, line.limit, readable(line.value), verdict, line.note)
    return table
