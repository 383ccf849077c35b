"""An audit as one HTML file that can be published as it is, with its pictures as SVG."""

from dataclasses import dataclass

from jinja2 import Environment, PackageLoader, StrictUndefined

from proofserve.lab.audit.audit_plots import convictions_plot, distances_plot
from proofserve.lab.audit.audit_report import ASSUMPTIONS, COLUMNS, GOOD, AuditReport

TEMPLATE = "audit_page.html"


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
        good=GOOD,
        heat=heat_table(report),
        distances=distances_plot(report.audit),
        convictions=convictions_plot(report.audit),
        assumptions=ASSUMPTIONS,
        facts=[*report.setup.items(), *report.machine.items()],
    )


@dataclass(frozen=True, slots=True)
class Cell:
    """A mean cosine, and the colour of its background in CSS."""

    text: str
    colour: str


def heat_table(report: AuditReport) -> list[tuple[str, list[Cell]]]:
    """A row for each prover whose vectors have directions: the cosines with every suspect."""
    audit = report.audit
    rows = ((each.measurement.name, each.mean_cosines) for each in (*audit.honest, *audit.attacks))
    return [(name, [_cell(c) for c in means]) for name, means in rows if means is not None]


def _cell(c: float) -> Cell:
    # Red points to the suspect, blue away from it.
    tone = "180, 35, 24" if c > 0 else "31, 119, 180"
    return Cell(f"{c:.2f}", f"rgba({tone}, {min(1.0, abs(c)):.2f})")
