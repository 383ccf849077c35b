"""The pictures of an audit, as SVG."""

import math
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Final

import numpy as np

from proofserve.lab.audit.bootstrap import log_mean
from proofserve.lab.audit.measurement import FARTHEST
from proofserve.lab.audit.results import Audit, ProverResult
from proofserve.lab.report.svg import drawn

if TYPE_CHECKING:
    from matplotlib.axes import Axes

# Inches.
HEIGHT, ROW = 4.0, 0.28
# The left end of the logarithmic axis; smaller distances, zero too, are drawn there.
NEAREST: Final = 1e-4
POINTS: Final = 60
# Powers of ten of the evidence that are shown.
LEAST, MOST = -4.0, 12.0
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


def evidence_plot(audit: Audit) -> str:
    """A panel for each default test: the evidence against every prover, growing by its mean."""
    every = [(each, GREEN) for each in audit.honest]
    every += [(each, BLUE if each.caught else RED) for each in audit.attacks]
    tests = list(audit.honest[0].tests.growth)
    nonces = np.unique(np.geomspace(1, audit.rule.max_nonces, POINTS).round())

    def panel(test: str) -> Callable[["Axes"], None]:
        limit = math.log10(len(tests) * _suspects(test, audit) / audit.rule.alpha)

        def draw(axes: "Axes") -> None:
            for each, colour in every:
                axes.plot(nonces, _evidence(each, test, nonces), color=colour, alpha=0.6)
            axes.axhline(limit, color="black", linewidth=0.8, linestyle="--")
            axes.set(xscale="log", xlabel="nonces", title=test, ylim=(LEAST, MOST))

        return draw

    return drawn([panel(test) for test in tests], HEIGHT)


def _suspects(test: str, audit: Audit) -> int:
    return len(audit.suspects) if test == "direction" else 1


def _evidence(found: ProverResult, test: str, nonces: Any) -> Any:
    """log10 of the evidence after each of ``nonces``, if every nonce gave the mean."""
    paths = nonces[:, np.newaxis] * found.tests.growth[test]
    return np.clip(log_mean(paths) / math.log(10), LEAST, MOST)
