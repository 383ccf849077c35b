"""An audit as one HTML file that can be published as it is."""

from pathlib import Path

from jinja2 import Environment, PackageLoader, StrictUndefined

from proofserve.lab.audit.audit_plots import distances_plot, power_plot
from proofserve.lab.audit.audit_report import ASSUMPTIONS, COLUMNS, AuditReport

TEMPLATE = "audit_page.html"


def page(report: AuditReport) -> str:
    """The page as HTML, with the pictures inside; it loads nothing from anywhere."""
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


def write_page(report: AuditReport, file: Path) -> None:
    """Write the page to ``file``. Raises OSError."""
    file.write_text(page(report), encoding="utf-8")
