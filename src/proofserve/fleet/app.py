"""The application of a fleet: a node's routes, those of operators, and members' callbacks."""

import asyncio
import logging
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Annotated, Any

from fastapi import APIRouter, FastAPI, Header, Path, Query, Request, Response
from fastapi.responses import HTMLResponse, JSONResponse, PlainTextResponse
from prometheus_client import CONTENT_TYPE_LATEST, CollectorRegistry, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from pydantic import AfterValidator, Field
from pydantic_core import PydanticCustomError

from proofserve import __version__
from proofserve.api import node_page
from proofserve.api import routes as node_routes
from proofserve.api.access import Access, ApiError
from proofserve.api.metrics import NodeCollector
from proofserve.api.node import Node, ServedNode
from proofserve.api.requests import guarded
from proofserve.api.response_models import documented, refused
from proofserve.api.schemas import Body
from proofserve.fleet import callback_bodies
from proofserve.fleet import snapshot as answers
from proofserve.fleet.client import MemberError
from proofserve.fleet.members import MemberCondition
from proofserve.fleet.reconciler import Reconciler
from proofserve.fleet.records import MemberSource, MemberState, StoreUnavailable, Wish
from proofserve.fleet.sources import plain_url
from proofserve.fleet.sql.locks import Leadership
from proofserve.fleet.sql.store import FleetStore
from proofserve.fleet.verification import VerificationControl
from proofserve.fleet.verification_records import JobPhase, MemberVerdict, VerdictOutcome
from proofserve.fleet.watch import FleetWatch
from proofserve.protocol.errors import ProtocolError
from proofserve.receiver import callbacks
from proofserve.receiver.app import MAX_BODY_BYTES
from proofserve.receiver.callbacks import SignatureCheck
from proofserve.rounds.errors import Refusal, Refused
from proofserve.rounds.status import NodeTotals
from proofserve.wire import FLEET, GENERATED
from proofserve.wire.callbacks import KEY_HEADER
from proofserve.wire.records import UnicodeText, problems

_logger = logging.getLogger(__name__)

PREFIX = "proofserve_fleet"
MOST_VERDICTS = 500
_MOST_LANES = 2**31
# A controller whose view is older does not know what is desired, and says so. Seconds.
OLDEST_VIEW_S = 5.0
# The call that needs no deployment, though it changes something.
_STOP = "/stop"
# Why a member may not join by this URL; None if it may.
JoinCheck = Callable[[str], Awaitable[str | None]]
FirstMember = Annotated[int, Query(ge=0, le=100_000)]
MembersOfPage = Annotated[int, Query(ge=0, le=answers.MOST_OF_PAGE)]
OfMember = Annotated[str | None, Query(max_length=200)]
FirstVerdict = Annotated[int, Query(ge=0, le=10_000_000)]
VerdictsOfPage = Annotated[int, Query(ge=1, le=MOST_VERDICTS)]


def _url(text: str) -> str:
    try:
        return plain_url(text)
    except ValueError as error:
        raise PydanticCustomError("url", "{why}", {"why": str(error)}) from error


class JoinRequest(Body, json_schema_extra={"examples": [{"url": "http://node-7:8000"}]}):
    """A server that wants to be a member. It repeats this as its sign of life."""

    url: Annotated[str, Field(min_length=1, max_length=2000), AfterValidator(_url)] = Field(
        description="Where the fleet reaches its proof endpoints, without a path."
    )
    name: Annotated[UnicodeText, Field(min_length=1, max_length=200)] | None = Field(
        None, description="How operators see it; host and port if left out."
    )


class WishRequest(Body, json_schema_extra={"examples": [{"reason": "a new driver"}]}):
    """What an operator wants of a member, and why."""

    reason: Annotated[UnicodeText, Field(min_length=1, max_length=500)] = Field(
        description="Shown beside the member until the next wish."
    )


@dataclass(frozen=True, slots=True)
class FleetParts:
    """What the routes work with; ``node`` has the deployment until a member has answered."""

    node: Node
    store: FleetStore
    watch: FleetWatch
    reconciler: Reconciler
    join_access: Access
    join_check: JoinCheck
    leadership: Leadership
    verification: VerificationControl | None

    def node_with_members(self, request: Request) -> Node:
        """The node for calls that may need a member. Raises ApiError while none has answered."""
        node, overview = self.present_node(request), self.watch.current
        waits_for_member = request.method == "POST" and not request.url.path.endswith(_STOP)
        if overview.deployment is None and waits_for_member:
            raise ApiError("not_ready", overview.why_not_ready or "no member has answered yet")
        return node

    def present_node(self, _request: Request) -> Node:
        """The node for calls that need no member. Raises ApiError without the database."""
        if self.watch.age_s > OLDEST_VIEW_S and self.watch.error is not None:
            raise ApiError(
                "not_ready",
                f"the fleet's database has not answered for {self.watch.age_s:.0f} s; members go"
                " on proving, and keep their results until it does",
            )
        return replace(self.node, deployment=self.watch.current.deployment or self.node.deployment)

    async def changed(self) -> None:
        await self.watch.refresh()
        self.reconciler.wake()

    def condition(self, member_id: str) -> MemberCondition:
        """Raises Refused (UNKNOWN_MEMBER)."""
        if (found := self.watch.current.by_id.get(member_id)) is None:
            text = f"there is no member {member_id!r}: GET {FLEET}/members lists them"
            raise Refused(Refusal.UNKNOWN_MEMBER, text)
        return found

    def answer(self, member_id: str) -> answers.MemberAnswer:
        return answers.member_answer(self.watch.current, self.condition(member_id), time.time())


def operators_router(parts: FleetParts) -> APIRouter:
    """Reading needs a viewer's key, the rest an operator's; joining has keys of its own, too."""

    def joined_node(request: Request) -> Node:
        return replace(parts.present_node(request), access=parts.join_access)

    both = APIRouter(prefix=FLEET, tags=["fleet"])
    made = APIRouter(route_class=guarded(parts.present_node))
    joining = APIRouter(route_class=guarded(joined_node))
    _add_reading(made, parts)
    _add_wishes(made, parts)
    _add_removal(made, parts)
    _add_verdicts(made, parts)
    _add_joining(joining, parts)
    both.include_router(made)
    both.include_router(joining)
    return both


def _add_reading(router: APIRouter, parts: FleetParts) -> None:
    @router.get("/snapshot", **documented(answers.SnapshotAnswer, 422, 503))
    async def read_snapshot(offset: FirstMember = 0, limit: MembersOfPage = 100) -> Response:
        """The fleet, its round, and one page of members, the worst first."""
        found = answers.snapshot(parts.watch.current, time.time(), offset, limit)
        # FastAPI would take longer to encode a page than all else here.
        return Response(found.model_dump_json(), media_type="application/json")

    @router.get("/metrics", response_class=PlainTextResponse, responses=refused(503))
    async def metrics() -> PlainTextResponse:
        """Members, lanes and leadership in the text format of Prometheus."""
        registry = CollectorRegistry()
        registry.register(NodeCollector(lambda: _families(parts)))
        return PlainTextResponse(generate_latest(registry), media_type=CONTENT_TYPE_LATEST)

    @router.get("/members", **documented(answers.MembersPage, 422, 503))
    async def members(offset: FirstMember = 0, limit: MembersOfPage = 100) -> Response:
        """One page of members, the worst first."""
        found = answers.snapshot(parts.watch.current, time.time(), offset, limit)
        page = found.model_dump_json(include=set(answers.MembersPage.model_fields))
        return Response(page, media_type="application/json")

    @router.get("/members/{member_id}", **documented(answers.MemberAnswer, 404, 503))
    async def member(member_id: str) -> answers.MemberAnswer:
        """One member. 404 if there is none with this id."""
        return parts.answer(member_id)


def _add_wishes(router: APIRouter, parts: FleetParts) -> None:
    changed = documented(answers.MemberAnswer, 404, 422, 503)

    async def wish(member_id: str, wanted: Wish, reason: str | None) -> answers.MemberAnswer:
        await parts.store.wish(member_id, wanted, reason)
        await parts.changed()
        return parts.answer(member_id)

    @router.post("/members/{member_id}/cordon", **changed)
    async def cordon(member_id: str, body: WishRequest) -> answers.MemberAnswer:
        """Give the member nothing new; its lane goes on."""
        return await wish(member_id, Wish.CORDONED, body.reason)

    @router.post("/members/{member_id}/drain", **changed)
    async def drain(member_id: str, body: WishRequest) -> answers.MemberAnswer:
        """Stop the member's lane, and give it nothing new. Its results are still taken."""
        return await wish(member_id, Wish.DRAINING, body.reason)

    @router.post("/members/{member_id}/uncordon", **changed)
    async def uncordon(member_id: str) -> answers.MemberAnswer:
        """Let a cordoned or drained member take part again."""
        return await wish(member_id, Wish.ACTIVE, None)


def _add_removal(router: APIRouter, parts: FleetParts) -> None:
    removed = documented(answers.RemovedAnswer, 404, 409, 422, 503)

    @router.post("/members/{member_id}/remove", **removed)
    async def remove(member_id: str, body: WishRequest) -> answers.RemovedAnswer:
        """Forget a member that joined by itself. What it has proved stays."""
        condition = parts.condition(member_id)
        member = condition.member
        if member.source is not MemberSource.JOINED:
            where = "the list of members" if member.source is MemberSource.LIST else "the DNS"
            raise ApiError(
                "stays_named",
                f"{member.name} comes from {where}: take it out there; until then cordon or"
                " drain it",
            )
        if condition.generates:
            # Later nothing would stop it: the fleet knows only its members.
            with suppress(MemberError):
                await parts.reconciler.client(member.url).change("/stop")
        await parts.store.remove_member(member_id, body.reason)
        await parts.changed()
        return answers.RemovedAnswer(id=member_id, name=member.name, removed=True)


def _add_verdicts(router: APIRouter, parts: FleetParts) -> None:
    @router.get("/verdicts", **documented(answers.VerdictPage, 422, 503))
    async def verdicts(
        member: OfMember = None, offset: FirstVerdict = 0, limit: VerdictsOfPage = 100
    ) -> answers.VerdictPage:
        """Verdicts about all members or the one with this id, the newest first."""
        found = await parts.store.verdicts.page(member, offset, limit)
        return answers.VerdictPage(verdicts=found, offset=offset)

    @router.get("/verdicts/{verdict_id}", **documented(answers.VerdictReportAnswer, 404, 503))
    async def verdict(verdict_id: str) -> answers.VerdictReportAnswer:
        """One verdict with its report, which is null for an abstention."""
        found, report = await _found(parts, verdict_id)
        return answers.VerdictReportAnswer(**found.model_dump(), report=report)

    # With HTML as the class of responses, the page of the API would promise refusals in HTML.
    @router.get(
        "/verdicts/{verdict_id}/report",
        response_model=None,
        responses={200: {"content": {"text/html": {}}}, **refused(404, 503)},
    )
    async def report(verdict_id: str) -> HTMLResponse:
        """The report as a page for people."""
        found, content = await _found(parts, verdict_id)
        return HTMLResponse(answers.report_page(found, content), headers=answers.PAGE_HEADERS)

    @router.post(
        "/members/{member_id}/verify", **documented(answers.VerificationJobAnswer, 404, 409, 503)
    )
    async def verify(member_id: str) -> answers.VerificationJobAnswer:
        """Have all that the member has stored of the round sampled now; answers the job's id."""
        name = parts.condition(member_id).member.name
        if parts.verification is None:
            why = "the fleet has no policy: start it with --policy FILE"
            raise ApiError("no_verdict_possible", why)
        try:
            job = await parts.verification.ask(member_id)
        except Refused as error:
            raise ApiError("no_verdict_possible", f"{name}: {error}") from error
        return answers.VerificationJobAnswer(
            id=job.id, member_id=member_id, member_name=name, queue=job.queue
        )


async def _found(parts: FleetParts, verdict_id: str) -> tuple[MemberVerdict, dict[str, Any] | None]:
    found = await parts.store.verdicts.find(verdict_id)
    if found is None:
        raise ApiError(
            "verdict_not_found",
            f"there is no verdict {verdict_id!r}: its job may still run; GET {FLEET}/verdicts lists"
            " all",
        )
    return found


def _add_joining(router: APIRouter, parts: FleetParts) -> None:
    @router.post("/members", **documented(answers.JoinAnswer, 409, 422, 503))
    async def join(body: JoinRequest) -> answers.JoinAnswer:
        """Add the server, or take its sign of life. The answer says what it is for the fleet."""
        if refusal := await parts.join_check(body.url):
            raise ProtocolError("url", refusal)
        known = {each.member.url: each for each in parts.watch.current.members}
        condition = known.get(body.url)
        if condition is None or (body.name and body.name != condition.member.name):
            source = condition.member.source if condition else MemberSource.JOINED
            name = body.name or body.url.partition("://")[2]
            member = await parts.store.put_member(body.url, name, source)
            await parts.changed()
            condition = parts.condition(member.id)
        return answers.JoinAnswer(
            id=condition.member.id, state=condition.state, reason=condition.reason
        )


def _families(parts: FleetParts) -> Iterator[Metric]:
    overview = parts.watch.current
    states = Counter(each.state for each in overview.members)
    by_state = {state.value: states[state] for state in MemberState}
    yield _gauge("members", "Members by state.", "state", by_state)
    round_, given = overview.desired.round, len(overview.view.lanes)
    lanes = {"given": given, "left": (round_.lanes if round_ else 0) - given}
    yield _gauge("lanes", "Lanes of the newest round: given, and left.", "lane", lanes)
    leads = "1 for the controller that acts on the members."
    yield GaugeMetricFamily(f"{PREFIX}_leads", leads, value=parts.leadership.held)
    seen, open_states = overview.verification, (JobPhase.QUEUED, JobPhase.RUNNING)
    jobs = {each.value: seen.jobs.get(each, 0) for each in (*open_states, JobPhase.FAILED)}
    about = "Jobs of verification by state; failed ones of the last day."
    yield _gauge("verification_jobs", about, "state", jobs)
    # One number for what starts workers: it must not end one that runs a job.
    open_jobs = sum(jobs[each.value] for each in open_states)
    waiting = "Jobs of verification that are queued or running."
    yield GaugeMetricFamily(f"{PREFIX}_open_jobs", waiting, value=open_jobs)
    verdicts = CounterMetricFamily(
        f"{PREFIX}_verdicts", "Verdicts about members by outcome.", labels=["outcome"]
    )
    for outcome in VerdictOutcome:
        verdicts.add_metric([outcome.value], seen.outcomes.get(outcome, 0))
    yield verdicts
    age = "Seconds since the database was read."
    yield GaugeMetricFamily(f"{PREFIX}_view_age_seconds", age, value=parts.watch.age_s)
    what = "Duration of a pass over all members: the last one, and the longest of this process."
    times = {"last": parts.reconciler.pass_s, "longest": parts.reconciler.longest_pass_s}
    yield _gauge("pass_seconds", what, "pass", times)


def _gauge(name: str, about: str, label: str, values: Mapping[str, float]) -> Metric:
    made = GaugeMetricFamily(f"{PREFIX}_{name}", about, labels=[label])
    for key, value in values.items():
        made.add_metric([key], value)
    return made


def create_app(parts: FleetParts, check: SignatureCheck | None) -> FastAPI:
    """``check`` is that of members' callbacks, None without a secret."""
    app, node = FastAPI(title="proofserve fleet", version=__version__), parts.node
    app.include_router(callback_router(parts.store, node.manager.totals, check))
    app.include_router(operators_router(parts))
    app.include_router(node_routes.router(parts.node_with_members, bool(node.access.names)))
    app.include_router(node_page.router(parts.present_node))
    models = APIRouter(route_class=guarded(parts.node_with_members), tags=["fleet"])

    @models.get("/v1/models")
    async def list_models(node: ServedNode) -> dict[str, Any]:
        """The names of the model that the members serve. Chat itself goes to their gateway."""
        names = node.deployment.engine_info.model_names
        data = [{"id": name, "object": "model", "owned_by": "proofserve"} for name in names]
        return {"object": "list", "data": data}

    @app.get("/health")
    async def health() -> dict[str, str]:
        """The process answers. GET /api/v1/pow/health/ready says whether the fleet can prove."""
        return {"status": "ok"}

    app.include_router(models)
    return app


def callback_router(
    store: FleetStore, totals: NodeTotals, check: SignatureCheck | None
) -> APIRouter:
    """The route to which members send what they found.

    401 refuses a callback that ``check`` does not accept, 404 one of an unknown lane, 413 a large
    one, 422 names the wrong field, and 503 asks for another attempt.
    """
    guard = callbacks.guarded(check, MAX_BODY_BYTES)
    made = APIRouter(prefix=FLEET, tags=["fleet"], route_class=guard)
    # One large body at a time is parsed: it holds hundreds of megabytes, and the processor.
    parsing = asyncio.Lock()
    path = f"/members/{{member_id}}/lanes/{{round_id}}/{{lane}}/{GENERATED}"
    stored = documented(callbacks.StoredAnswer, 401, 404, 422, 503, needs_key=False)

    @made.post(path, **stored)
    async def generated(
        request: Request,
        member_id: str,
        round_id: str,
        lane: Annotated[int, Path(ge=0, lt=_MOST_LANES)],
        key: Annotated[str | None, Header(alias=KEY_HEADER, max_length=200)] = None,
    ) -> Response | callbacks.StoredAnswer:
        """Store what a member found in its lane."""
        if not key:
            return _refused("header", KEY_HEADER, "is needed: proofserve sends it")
        body = await request.body()
        try:
            round_, given = await store.lane(round_id, lane)
            if given.member_id != member_id:
                text = f"round {round_id!r} has not given lane {lane} to {member_id!r}"
                return JSONResponse({"detail": text}, 404)
            async with parsing:
                found = await asyncio.to_thread(callback_bodies.read, body, round_, lane)
            fresh = await store.ingest(round_, given, key, found)
        except Refused as error:
            return JSONResponse({"detail": str(error)}, 404)
        except ProtocolError as error:
            _logger.warning("a callback of member %s, lane %d: %s", member_id, lane, error)
            return _refused("body", error.field, error.message)
        except StoreUnavailable as error:
            return JSONResponse({"detail": f"not stored: {error}"}, 503)
        if fresh:
            totals.computed("round", len(found.nonces), 0)
        return callbacks.StoredAnswer(status="stored" if fresh else "duplicate")

    return made


def _refused(where: str, field: str, reason: str) -> JSONResponse:
    error = {"type": "callback", "loc": (where, *field.split(".")), "msg": reason}
    return JSONResponse({"detail": problems([error])}, 422)
