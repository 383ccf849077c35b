"""The web pages of reports: their templates extend ``report_page.html``; colours of pictures."""

from typing import Any

from jinja2 import Environment, PackageLoader, StrictUndefined

GREEN, BLUE, RED = "tab:green", "tab:blue", "tab:red"


def rendered(template: str, **values: Any) -> str:
    """The page of a ``template``, a path from this folder on."""
    # Prompts, answers and names of models come from elsewhere and may contain HTML.
    environment = Environment(
        loader=PackageLoader("proofserve.verifier", package_path=""),
        autoescape=True,
        undefined=StrictUndefined,
    )
    return environment.get_template(template).render(**values)
