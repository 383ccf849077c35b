"""A verdict as one HTML page without scripts."""

from collections.abc import Mapping
from datetime import UTC, datetime
from typing import Any, Final

from jinja2 import Environment, PackageLoader, StrictUndefined

from proofserve.fleet.verification_records import MemberVerdict

_TEMPLATE: Final = "verdict_page.html"
_MOST_DISTANCES: Final = 1000
STYLE: Final = (
    "body{font:16px/1.5 system-ui,sans-serif;max-width:60rem;margin:2rem auto;padding:0 1rem}"
    "table{border-collapse:collapse}th,td{padding:.2rem .8rem;border-bottom:1px solid #ccc;"
    "text-align:left}.fraud{color:#b42318}.honest{color:#1a7f37}"
    "@media(prefers-color-scheme:dark){body{background:#16181d;color:#e6e6e6}"
    ".fraud{color:#ff7b72}.honest{color:#3fb950}}"
)


def page(verdict: MemberVerdict, report: Mapping[str, Any] | None) -> str:
    """``report`` is None for an abstention."""
    # Names and errors come from other machines.
    environment = Environment(
        loader=PackageLoader("proofserve.fleet.verification", package_path=""),
        autoescape=True,
        undefined=StrictUndefined,
    )
    content = report or {}
    distances = list(content.get("distances", {}).items())[:_MOST_DISTANCES]
    return environment.get_template(_TEMPLATE).render(
        style=STYLE,
        verdict=verdict,
        facts=list(_facts(verdict)),
        lines=content.get("lines", ()),
        distances=distances,
    )


def _facts(verdict: MemberVerdict) -> list[tuple[str, str]]:
    at = datetime.fromtimestamp(verdict.at, UTC).isoformat(" ", "seconds")
    found: list[tuple[str, object]] = [
        ("Member", f"{verdict.member_name} ({verdict.member_id})"),
        ("Round", verdict.round_id),
        ("Lane", verdict.lane),
        ("Asked for by", verdict.cause),
        ("Reason", verdict.reason),
        ("Test", verdict.test),
        ("Nonces recomputed", verdict.nonces),
        ("Median distance", verdict.distance),
        ("Threshold of honest distances", verdict.threshold),
        ("Logarithm of the evidence", verdict.log_evidence),
        ("p-value", verdict.p_value),
        ("Alpha, its chance to convict an honest member", verdict.alpha),
        ("At", at),
        ("Seconds", f"{verdict.seconds:.2f}"),
        ("Worker", verdict.worker),
    ]
    return [(label, str(value)) for label, value in found if value is not None]
