"""An audit as one HTML file that can be published as it is, with its pictures as SVG."""

import io
from collections.abc import Callable
from typing import TYPE_CHECKING

import numpy as np
from jinja2 import Environment, PackageLoader, StrictUndefined

from proofserve.lab.audit.audit import FARTHEST, Audit
from proofserve.lab.audit.audit_report import ASSUMPTIONS, COLUMNS, AuditReport
from proofserve.protocol.verdict.counting import power

if TYPE_CHECKING:
    from matplotlib.axes import Axes

TEMPLATE = "audit_page.html"
# Inches.
WIDTH, HEIGHT, ROW = 9.0, 4.0, 0.28
# The left end of the logarithmic axis; smaller distances, zero too, are drawn there.
NEAREST = 1e-3
# Shares of mismatches.
RATES = (1.0, 0.5, 0.2, 0.1, 0.05, 0.02)
POINTS = 60


def page(report: AuditReport) -> str:
    # A model's name is the name of a folder, which may contain HTML.
    environment = Environment(
        loader=PackageLoader("proofserve.lab.audit", package_path=""),
        autoescape=True,
        undefined=StrictUndefined,
    )
    return environment.get_template(TEMPLATE).render(
        report=report,
        columns=COLUMNS,
        distances=distances_plot(report.audit),
        power=power_plot(report.audit),
        assumptions=ASSUMPTIONS,
        facts=[*report.setup.items(), *report.machine.items()],
    )


def distances_plot(audit: Audit) -> str:
    """A row for each attack that has distances, honest vectors at the top, and the threshold."""
    seen = [audit.honest, *(found.measurement for found in audit.results)]
    rows = [(each.name, each.distances) for each in seen if each.distances is not None]

    def draw(axes: "Axes") -> None:
        for height, (_, distances) in enumerate(rows):
            shown = np.clip(distances, NEAREST, FARTHEST)
            colour = "tab:green" if height == 0 else "tab:blue"
            axes.plot(shown, np.full(len(shown), height), "|", color=colour, alpha=0.5)
        axes.axvline(audit.rule.dist_threshold, color="tab:red", linestyle="--")
        axes.set_yticks(range(len(rows)), [name for name, _ in rows])
        axes.invert_yaxis()
        axes.set(xscale="log", xlabel="distance from the validator's vector; dashed: threshold")

    return _svg(draw, ROW * len(rows) + 1.0)


def power_plot(audit: Audit) -> str:
    """The chance that the fixed test convicts, by nonces, for several rates of mismatches."""
    rule = audit.rule
    sizes = np.unique(np.geomspace(1, rule.max_nonces, POINTS).astype(int)).tolist()

    def draw(axes: "Axes") -> None:
        for rate in RATES:
            chances = [power(n, rule.p_mismatch, rule.alpha, rate) for n in sizes]
            axes.plot(sizes, chances, label=f"{rate:.0%} mismatch")
        axes.axhline(rule.power, color="black", linewidth=0.8, linestyle=":")
        axes.set(xscale="log", xlabel="nonces", ylabel="chance to convict")
        axes.legend()

    return _svg(draw, HEIGHT)


def _svg(draw: Callable[["Axes"], None], height: float) -> str:
    # Only commands that draw wait for this import.
    from matplotlib.figure import Figure  # noqa: PLC0415

    figure = Figure(figsize=(WIDTH, height), layout="constrained")
    draw(figure.subplots())
    file = io.StringIO()
    figure.savefig(file, format="svg", metadata={"Date": None})
    text = file.getvalue()
    return text[text.index("<svg") :]
