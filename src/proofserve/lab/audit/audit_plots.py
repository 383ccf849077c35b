"""The pictures of an audit, as SVG."""

from typing import TYPE_CHECKING, Final

import numpy as np

from proofserve.lab.audit.measurement import FARTHEST
from proofserve.lab.audit.results import Audit
from proofserve.lab.report.svg import drawn

if TYPE_CHECKING:
    from matplotlib.axes import Axes

# Inches.
HEIGHT, ROW = 4.0, 0.28
# The left end of the logarithmic axis; smaller distances, zero too, are drawn there.
NEAREST: Final = 1e-4
GREEN, BLUE, RED = "tab:green", "tab:blue", "tab:red"


def distances_plot(audit: Audit) -> str:
    """A row for each prover that was measured, honest ones at the top, and the threshold."""
    seen = [each.measurement for each in (*audit.honest, *audit.attacks)]
    rows = [(each.name, each.distances) for each in seen if each.chances is None]

    def draw(axes: "Axes") -> None:
        for height, (_, distances) in enumerate(rows):
            shown = np.clip(distances, NEAREST, FARTHEST)
            colour = GREEN if height < len(audit.honest) else BLUE
            axes.plot(shown, np.full(len(shown), height), "|", color=colour, alpha=0.5)
        axes.axvline(audit.dist_threshold, color=RED, linestyle="--")
        axes.set_yticks(range(len(rows)), [name for name, _ in rows])
        axes.invert_yaxis()
        axes.set(xscale="log", xlabel="distance from the validator's vector; dashed: the count's")

    return drawn([draw], ROW * len(rows) + 1.0)


def convictions_plot(audit: Audit) -> str:
    """A line for each prover: the share of its verifications that have convicted so far."""
    every = [(each, GREEN) for each in audit.honest]
    every += [(each, BLUE if each.caught else RED) for each in audit.attacks]

    def draw(axes: "Axes") -> None:
        for each, colour in every:
            stops = np.sort(each.endings.convicted_at)
            share = np.arange(1, len(stops) + 1) / len(stops)
            axes.step(stops, share, where="post", color=colour, alpha=0.6)
        axes.set(xscale="log", xlabel="nonces", xlim=(1, audit.rule.max_nonces), ylim=(0, 1))

    return drawn([draw], HEIGHT)
