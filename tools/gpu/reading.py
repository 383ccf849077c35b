"""What a report says at a glance: the main figures of each step, and the aims on known cards."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from gpu.report import RunReport, StepResult, figures_of

# Figures whose names begin so are shown beside a step's name. Of several, the largest.
HEADLINES: Mapping[str, Sequence[str]] = {
    "golden": ("cases_passed", "cases_failed"),
    "pick-order": ("rows", "in_another_order"),
    "reference": ("nonces_per_second_64_", "nonces_per_second_256_", "matmul_tflops"),
    "profile": ("overhead_artifact-v1", "overhead_sketch-v1"),
    "generation": ("busy_ratio", "nonces_per_second", "vs_prefill"),
    "chat-priority": ("identical", "throughput_ratio", "resume_ms_p50"),
    "chat-graphs": ("identical", "throughput_ratio", "resume_ms_p50"),
    "same-batch": ("same_batch_over_dedicated",),
}
NOISE = ("dist_threshold", "left_out_convicted", "room")


@dataclass(frozen=True, slots=True)
class Aim:
    """A number that a figure of ``step`` shall reach, or with ``at_most`` not exceed.

    The figure is the largest whose name begins with ``prefix``. ``card`` is a part of the card's
    name, empty for every card.
    """

    step: str
    prefix: str
    bound: float
    text: str
    card: str = ""
    at_most: bool = False


AIMS = (
    Aim("reference", "nonces_per_second_64_", 4000.0, "0.6B, 64 tokens, nonces a second", "H200"),
    Aim("reference", "nonces_per_second_64_", 380.0, "0.6B, 64 tokens, nonces a second", "H100"),
    Aim("profile", "overhead_artifact-v1", 0.05, "inputs and finish, of a forward", at_most=True),
    Aim("profile", "overhead_distance-v1", 0.05, "inputs and finish, of a forward", at_most=True),
)


def headline(step: StepResult) -> str:
    """The main figures of a step; empty if it has none."""
    figures = figures_of(step.record)
    prefixes = NOISE if step.name.startswith("noise") else HEADLINES.get(step.name, ())
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
    for aim in AIMS:
        value = largest(steps.get(aim.step, {}), aim.prefix)
        if aim.card not in cards[0]["name"] or value is None:
            continue
        reached = value <= aim.bound if aim.at_most else value >= aim.bound
        sign = "at most" if aim.at_most else "at least"
        aim_text = f"{aim.prefix.rstrip('_')}: {aim.text}, {sign} {number(aim.bound)}"
        found.append({"aim": aim_text, "value": value, "reached": reached})
    return found
