"""Operators' routes of verification: verdicts, their reports as pages, and a verdict at once."""

import base64
import hashlib
from collections.abc import Callable, Mapping
from dataclasses import asdict
from datetime import UTC, datetime
from typing import Annotated, Any, Final

from fastapi import APIRouter, Query, Request
from fastapi.responses import HTMLResponse
from jinja2 import Environment, PackageLoader, StrictUndefined

from proofserve.api.errors import ApiError
from proofserve.api.node import Node
from proofserve.api.requests import guarded
from proofserve.api.response_models import documented, refused
from proofserve.fleet.errors import NothingToVerify
from proofserve.fleet.routes.operators import FleetParts
from proofserve.fleet.routes.snapshot import VerdictPage, VerdictReportAnswer, VerificationJobAnswer
from proofserve.fleet.verification_records import MemberVerdict
from proofserve.wire.paths import FLEET

MOST_VERDICTS = 500
_TEMPLATE: Final = "verdict_page.html"
_MOST_DISTANCES: Final = 1000
STYLE: Final = (
    "body{font:16px/1.5 system-ui,sans-serif;max-width:60rem;margin:2rem auto;padding:0 1rem}"
    "table{border-collapse:collapse}th,td{padding:.2rem .8rem;border-bottom:1px solid #ccc;"
    "text-align:left}.fraud{color:#b42318}.honest{color:#1a7f37}"
    "@media(prefers-color-scheme:dark){body{background:#16181d;color:#e6e6e6}"
    ".fraud{color:#ff7b72}.honest{color:#3fb950}}"
)
# The page has no script, and one style of its own.
_STYLE_HASH = base64.b64encode(hashlib.sha256(STYLE.encode()).digest()).decode()
_PAGE_HEADERS = {
    "Content-Security-Policy": (
        f"default-src 'none'; style-src 'sha256-{_STYLE_HASH}'; base-uri 'none';"
        " form-action 'none'; frame-ancestors 'none'"
    ),
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
}


class VerdictNotFound(ApiError):
    status = 404


class NoVerdictPossible(ApiError):
    """No policy, no rule, or nothing stored; or the job has no report."""

    status = 409


def router(parts: FleetParts, get_node: Callable[[Request], Node]) -> APIRouter:
    """Reading needs a viewer's key, asking for a verdict an operator's."""
    made = APIRouter(prefix=FLEET, tags=["fleet"], route_class=guarded(get_node))
    store = parts.store.verdicts

    @made.get("/verdicts", **documented(VerdictPage, 422, 503))
    async def verdicts(
        member: Annotated[str | None, Query(max_length=200)] = None,
        offset: Annotated[int, Query(ge=0, le=10_000_000)] = 0,
        limit: Annotated[int, Query(ge=1, le=MOST_VERDICTS)] = 100,
    ) -> dict[str, Any]:
        """Verdicts about all members or the one with this id, the newest first."""
        found = await store.page(member, offset, limit)
        return {"verdicts": [asdict(each) for each in found], "offset": offset}

    @made.get("/verdicts/{verdict_id}", **documented(VerdictReportAnswer, 404, 503))
    async def verdict(verdict_id: str) -> dict[str, Any]:
        """One verdict with its report, which is null for an abstention."""
        found, report = await _found(parts, verdict_id)
        return {**asdict(found), "report": report}

    # With HTML as the class of responses, the page of the API would promise refusals in HTML.
    @made.get(
        "/verdicts/{verdict_id}/report",
        response_model=None,
        responses={200: {"content": {"text/html": {}}}, **refused(404, 503)},
    )
    async def report(verdict_id: str) -> HTMLResponse:
        """The report as a page for people."""
        found, content = await _found(parts, verdict_id)
        return HTMLResponse(page(found, content), headers=_PAGE_HEADERS)

    @made.post("/members/{member_id}/verify", **documented(VerificationJobAnswer, 404, 409, 503))
    async def verify(member_id: str) -> dict[str, Any]:
        """Have all that the member has stored of the round sampled now; answers the job's id."""
        return await _asked(parts, member_id)

    return made


async def _asked(parts: FleetParts, member_id: str) -> dict[str, Any]:
    name = parts.condition(member_id).member.name
    if parts.verification is None:
        raise NoVerdictPossible("the fleet has no policy: start it with --policy FILE")
    try:
        job = await parts.verification.ask(member_id)
    except NothingToVerify as error:
        raise NoVerdictPossible(f"{name}: {error}") from error
    return {"id": job.id, "member_id": member_id, "member_name": name, "queue": job.queue}


async def _found(parts: FleetParts, verdict_id: str) -> tuple[MemberVerdict, dict[str, Any] | None]:
    found = await parts.store.verdicts.find(verdict_id)
    if found is None:
        raise VerdictNotFound(
            f"there is no verdict {verdict_id!r}: its job may still run; GET {FLEET}/verdicts lists"
            " all"
        )
    return found


def page(verdict: MemberVerdict, report: Mapping[str, Any] | None) -> str:
    """``report`` is None for an abstention."""
    # Names and errors come from other machines.
    environment = Environment(
        loader=PackageLoader("proofserve.fleet.routes", package_path=""),
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
