"""The application of a fleet: a node's routes, those of operators, and members' callbacks."""

import asyncio
import logging
from typing import Annotated, Any

from fastapi import APIRouter, FastAPI, Header, Path, Request
from fastapi.responses import JSONResponse, Response

from proofserve.api import node_page
from proofserve.api import routes as node_routes
from proofserve.api.node import ServedNode
from proofserve.api.requests import guarded
from proofserve.api.response_models import documented
from proofserve.fleet import callback_bodies
from proofserve.fleet.records import StoreUnavailable
from proofserve.fleet.routes import operators
from proofserve.fleet.routes.operators import FleetParts
from proofserve.fleet.routes.snapshot import StoredAnswer
from proofserve.fleet.sql.store import FleetStore
from proofserve.protocol.errors import ProtocolError
from proofserve.receiver import callbacks
from proofserve.receiver.app import MAX_BODY_BYTES
from proofserve.receiver.callbacks import SignatureCheck
from proofserve.rounds.errors import Refused
from proofserve.rounds.status import NodeTotals
from proofserve.wire.callbacks import KEY_HEADER
from proofserve.wire.paths import FLEET, GENERATED
from proofserve.wire.records import problems

_logger = logging.getLogger(__name__)

_MOST_LANES = 2**31


def create_app(parts: FleetParts, check: SignatureCheck | None) -> FastAPI:
    """``check`` is that of members' callbacks, None without a secret."""
    app, node = FastAPI(title="proofserve fleet"), parts.node
    app.include_router(callback_router(parts.store, node.manager.totals, check))
    app.include_router(operators.router(parts))
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
    answers = documented(StoredAnswer, 401, 404, 422, 503, needs_key=False)

    @made.post(path, **answers)
    async def generated(
        request: Request,
        member_id: str,
        round_id: str,
        lane: Annotated[int, Path(ge=0, lt=_MOST_LANES)],
        key: Annotated[str | None, Header(alias=KEY_HEADER, max_length=200)] = None,
    ) -> Response:
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
        return JSONResponse({"status": "stored" if fresh else "duplicate"})

    return made


def _refused(where: str, field: str, reason: str) -> JSONResponse:
    error = {"type": "callback", "loc": (where, *field.split(".")), "msg": reason}
    return JSONResponse({"detail": problems([error])}, 422)
