"""Operators' routes of verification: verdicts, their reports, and a verdict at once."""

import base64
import hashlib
from collections.abc import Callable
from dataclasses import asdict
from typing import Annotated, Any

from fastapi import APIRouter, Query, Request
from fastapi.responses import HTMLResponse

from proofserve.api.errors import ApiError
from proofserve.api.node import Node
from proofserve.api.requests import guarded
from proofserve.api.response_models import documented, refused
from proofserve.fleet.errors import NothingToVerify
from proofserve.fleet.routes.answers import VerdictPage, VerdictReportAnswer, VerificationJobAnswer
from proofserve.fleet.routes.operators import FleetParts
from proofserve.fleet.verification.verdict_page import STYLE, page
from proofserve.fleet.verification_records import MemberVerdict
from proofserve.wire.paths import FLEET

MOST_VERDICTS = 500


class VerdictNotFound(ApiError):
    status = 404


class NoVerdictPossible(ApiError):
    """No policy, no rule, or nothing stored; or the job has no report."""

    status = 409


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
