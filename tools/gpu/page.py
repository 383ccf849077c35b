"""The report as one HTML file: ``python -m gpu.page gpu-report.json gpu-report.html``.

It needs no network to be read. Without matplotlib it has no pictures.
"""

import argparse
import sys
from pathlib import Path
from typing import Any

from jinja2 import Environment, FileSystemLoader, StrictUndefined

from gpu.report import RunReport, figures_of, headline, number, read

FOLDER, TEMPLATE = Path(__file__).parent, "page.html"


def page(report: RunReport) -> str:
    # Logs and names of models may contain HTML.
    environment = Environment(
        loader=FileSystemLoader(FOLDER), autoescape=True, undefined=StrictUndefined
    )
    environment.filters["number"] = number
    return environment.get_template(TEMPLATE).render(
        report=report,
        facts=facts(report),
        rows=[(step, headline(step)) for step in report.steps],
        figures=[(step, figures_of(step.record)) for step in report.steps if step.record],
        pictures=_pictures(report),
    )


def facts(report: RunReport) -> list[tuple[str, Any]]:
    """What the host has, as names and values; one row if the host could not be looked at."""
    host = report.host
    if host is None:
        return [("host", "could not be looked at: see host.log")]
    torch = host["torch"]
    cards = [f"{card['name']}, {card['memory_gib']:.0f} GiB" for card in torch["cards"]]
    return [
        ("cards", "; ".join(cards) or f"none: {torch['problem']}"),
        ("driver shows", "; ".join(host["driver_cards"]) or "-"),
        ("torch", f"{torch['version']}, CUDA {torch['cuda'] or 'none'}"),
        ("transformers", host["transformers"] or "none"),
        ("vLLM", host["vllm"] or "none"),
        ("proofserve is a plugin of it", "yes" if host["plugin"] else "no"),
        ("not installed", ", ".join(host["missing"]) or "-"),
        ("Python, cores", f"{host['python']}, {host['cores']}"),
        ("memory", f"{host['memory_gib']:.0f} GiB, {host['available_gib']:.0f} available"),
        ("commit", report.commit or "unknown"),
        *report.options.items(),
    ]


def _pictures(report: RunReport) -> list[tuple[str, str]]:
    try:
        from gpu.plots import pictures  # noqa: PLC0415 - a host may lack matplotlib

        return pictures(report)
    except ModuleNotFoundError:
        return []


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("report", type=Path)
    parser.add_argument("page", type=Path)
    options = parser.parse_args()
    try:
        report = read(options.report)
    except ValueError as error:
        print(error, file=sys.stderr)
        return 2
    options.page.write_text(page(report), encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
