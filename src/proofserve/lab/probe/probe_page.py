"""A probe as one HTML file that can be published as it is, with its pictures as SVG."""

import math
from typing import TYPE_CHECKING, Any, Final

import numpy as np
from jinja2 import Environment, PackageLoader, StrictUndefined

from proofserve.lab.probe.probe_report import ProbeReport
from proofserve.lab.probe.probe_verdict import OTHER_RATIO
from proofserve.lab.report.svg import drawn
from proofserve.protocol.verdict.sequential import SequentialResult

if TYPE_CHECKING:
    from matplotlib.axes import Axes

TEMPLATE = "probe_page.html"
HEIGHT: Final = 3.2
# Powers of ten of the evidence that are shown.
LEAST, MOST = -12.0, 12.0
# Smaller gaps of greedy tokens, zero too, are drawn there.
NEAREST: Final = 1e-4
GREEN, BLUE, RED = "tab:green", "tab:blue", "tab:red"
CLASSES: Final = {
    SequentialResult.HONEST: "good",
    SequentialResult.FRAUD: "bad",
    SequentialResult.UNDECIDED: "open",
    SequentialResult.UNEXPLAINED: "open",
}


def page(report: ProbeReport) -> str:
    # Prompts, answers and names come from elsewhere and may contain HTML.
    environment = Environment(
        loader=PackageLoader("proofserve.lab.probe", package_path=""),
        autoescape=True,
        undefined=StrictUndefined,
    )
    return environment.get_template(TEMPLATE).render(
        report=report,
        judgement=report.probed.judgement,
        tone=CLASSES[report.probed.judgement.result],
        rows=report.rows(),
        pictures=pictures(report),
    )


def pictures(report: ProbeReport) -> list[tuple[str, str]]:
    """Captions, and SVG. Only what was measured is drawn."""
    probed, found = report.probed, []
    if probed.ratios:
        caption = (
            "The endpoint's errors over our own rounding, block by block. Honest ones lie around 1;"
            f" from {OTHER_RATIO:g} on (dashed) only 4 bits or another model do it."
        )
        found.append((caption, drawn([lambda axes: _ratios(axes, probed.ratios)], HEIGHT)))
    if probed.diagnosis.cosines:
        caption = (
            f"Cosines of the errors with what {probed.diagnosis.suspect} would do, block by block."
            " Honest ones lie around 0."
        )
        cosines = probed.diagnosis.cosines
        found.append((caption, drawn([lambda axes: _cosines(axes, cosines)], HEIGHT)))
    if probed.evidence:
        caption = (
            "Evidence of the token test after each answer, as a power of ten: it falls for honest"
            " answers, and convicts far above 6."
        )
        found.append((caption, drawn([lambda axes: _evidence(axes, probed.evidence)], HEIGHT)))
    gaps = [float(g) for r in probed.answers if r.answer.prompt.greedy for g in r.gaps]
    if gaps:
        caption = (
            "How far the logits of greedy tokens are below the largest: the largest first. Honest"
            " rounding explains those below the dashed line."
        )
        found.append((caption, drawn([lambda axes: _gaps(axes, gaps, probed.bound)], HEIGHT)))
    return found


def _ratios(axes: "Axes", ratios: Any) -> None:
    axes.plot(np.arange(len(ratios)), ratios, "o", color=BLUE, alpha=0.6)
    axes.axhline(1.0, color=GREEN, linewidth=0.8)
    axes.axhline(OTHER_RATIO, color=RED, linewidth=0.8, linestyle="--")
    axes.set(yscale="log", xlabel="block of 16 tokens", ylabel="error / own rounding")


def _cosines(axes: "Axes", cosines: Any) -> None:
    axes.plot(np.arange(len(cosines)), cosines, "o", color=RED, alpha=0.6)
    axes.axhline(0.0, color=GREEN, linewidth=0.8)
    axes.set(ylim=(-1.0, 1.05), xlabel="block of 16 tokens", ylabel="cosine")


def _evidence(axes: "Axes", evidence: Any) -> None:
    powers = np.clip(np.array(evidence) / math.log(10), LEAST, MOST)
    axes.step(np.arange(1, len(powers) + 1), powers, where="post", color=BLUE)
    axes.set(ylim=(LEAST, MOST), xlabel="answers", ylabel="log10 E")


def _gaps(axes: "Axes", gaps: Any, bound: float) -> None:
    ordered = np.maximum(np.sort(gaps)[::-1], NEAREST)
    axes.plot(np.arange(1, len(ordered) + 1), ordered, "o", color=BLUE, alpha=0.6, markersize=3)
    axes.axhline(max(bound, NEAREST), color=RED, linewidth=0.8, linestyle="--")
    axes.set(xscale="log", yscale="log", xlabel="greedy tokens", ylabel="gap of logits")
