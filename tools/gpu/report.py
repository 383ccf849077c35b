"""The report of a run: what the host has, and what came of each step. JSON, written after each.

The main figures of each step are shown beside its name; on known cards there are aims.
"""

import argparse
import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from gpu.steps import TABLE
from measuring.files import write_whole

FORMAT, VERSION = "proofserve-gpu-report", 1
NAME = "gpu-report.json"
PASSED, FAILED, SKIPPED = "passed", "failed", "skipped"


HEADLINES = {row["name"]: row.get("headline", ()) for row in TABLE["step"]}


@dataclass(frozen=True, slots=True)
class StepResult:
    """What came of a step. ``outcome`` is passed, failed or skipped; ``reason`` says why, if not.

    ``record`` is what the step wrote: figures by name, then setup, windows and machine. ``log`` has
    the last lines that it printed. ``command`` runs the step by hand.
    """

    name: str
    title: str
    outcome: str
    reason: str | None = None
    seconds: float = 0.0
    command: Sequence[str] = ()
    record: Mapping[str, Any] | None = None
    log: str = ""


@dataclass(slots=True)
class RunReport:
    """``options`` are those of the run; ``host`` is None if the host could not be looked at.

    ``aims`` compares figures with what is wanted on a card (``steps.toml``).
    """

    started: str
    options: Mapping[str, Any]
    commit: str | None = None
    host: Mapping[str, Any] | None = None
    steps: list[StepResult] = field(default_factory=list)
    aims: list[dict[str, Any]] = field(default_factory=list)
    seconds: float = 0.0
    finished: bool = False

    def count(self, outcome: str) -> int:
        return sum(step.outcome == outcome for step in self.steps)

    @property
    def summary(self) -> str:
        counts = (f"{self.count(each)} {each}" for each in (PASSED, FAILED, SKIPPED))
        return f"{', '.join(counts)}, in {self.seconds:.0f} s"

    def json(self) -> dict[str, Any]:
        return {"format": FORMAT, "version": VERSION, **asdict(self)}

    def write(self, folder: Path) -> Path:
        file = folder / NAME
        write_whole(file, private(json.dumps(self.json(), indent=1)) + "\n")
        return file


def private(text: str) -> str:
    """``text`` without the name of this user's home: the report is sent to others."""
    home = str(Path.home())
    return text.replace(home, "~") if len(home) > 1 else text


def read(file: Path) -> RunReport:
    """Raises ValueError, which names the file, if it is not such a report."""
    try:
        body = json.loads(file.read_text(encoding="utf-8"))
        kind, version = body.pop("format"), body.pop("version")
        steps = [StepResult(**step) for step in body.pop("steps")]
        found = RunReport(**body, steps=steps)
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise ValueError(f"{file} is no report of make gpu: {error}") from error
    if (kind, version) != (FORMAT, VERSION):
        raise ValueError(f"{file} is no report of make gpu: {kind!r}, version {version!r}")
    return found


def step_parser(about: str | None) -> argparse.ArgumentParser:
    """The options of a step, to which it adds its own: where its record goes."""
    parser = argparse.ArgumentParser(description=about)
    parser.add_argument("--json", type=Path, required=True)
    return parser


def write_record(
    file: Path,
    figures: Mapping[str, float | None],
    *,
    setup: Mapping[str, Any],
    windows: Mapping[str, Any],
    failed: Sequence[str] = (),
) -> None:
    """Write what a step measured, in the form of ``proofserve.reports.Report.json``."""
    found = {
        **figures,
        "passed": not failed,
        "failed": list(failed),
        "setup": dict(setup),
        "windows": dict(windows),
    }
    write_whole(file, json.dumps(found, indent=1) + "\n")


def figures_of(record: Mapping[str, Any] | None) -> dict[str, float | None]:
    """The named numbers of a record; of a calibration those that say how far it reaches."""
    if record is None:
        return {}
    if (check := record.get("left_out")) is not None:
        convicted = max(check["convicted"].values(), default=0)
        figures = {"left_out_convicted": convicted, "room": check["room"]}
        return {"dist_threshold": record["dist_threshold"], **figures}
    return {
        name: value
        for name, value in record.items()
        if name != "passed" and (value is None or isinstance(value, int | float))
    }


def headline(step: StepResult) -> str:
    """The main figures of a step; empty if it has none."""
    figures = figures_of(step.record)
    prefixes = HEADLINES.get(step.name, ())
    shown = ((prefix.rstrip("_"), largest(figures, prefix)) for prefix in prefixes)
    return ", ".join(f"{name} {number(value)}" for name, value in shown if value is not None)


def largest(figures: Mapping[str, float | None], prefix: str) -> float | None:
    """The largest figure whose name is ``prefix``, or else begins with it."""
    if figures.get(prefix) is not None:
        return figures[prefix]
    found = [v for name, v in figures.items() if name.startswith(prefix) and v is not None]
    return max(found, default=None)


def number(value: float | None) -> str:
    """Four significant digits, or whole from 1000 on; "-" for None."""
    if value is None:
        return "-"
    return f"{value:,.0f}" if abs(value) >= 1000 or value == int(value) else f"{value:.4g}"


def aims_of(report: RunReport) -> list[dict[str, Any]]:
    """The aims that hold for the card of ``report``, and whether each was reached."""
    cards = (report.host or {}).get("torch", {}).get("cards", [])
    if not cards or report.options.get("short"):
        return []
    steps = {step.name: figures_of(step.record) for step in report.steps}
    found = []
    for aim in TABLE["aim"]:
        value, bound = largest(steps.get(aim["step"], {}), aim["prefix"]), aim["bound"]
        if aim.get("card", "") not in cards[0]["name"] or value is None:
            continue
        at_most = aim.get("at_most", False)
        reached = value <= bound if at_most else value >= bound
        limit = f"{'at most' if at_most else 'at least'} {number(bound)}"
        aim_text = f"{aim['prefix'].rstrip('_')}: {aim['text']}, {limit}"
        found.append({"aim": aim_text, "value": value, "reached": reached})
    return found
