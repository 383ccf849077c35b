"""Takes the callbacks of members: stored before they are acknowledged, and stored once."""

import asyncio
import logging
from typing import Annotated

from fastapi import APIRouter, Header, Path, Request
from fastapi.responses import JSONResponse, Response

from proofserve.api.response_models import documented
from proofserve.fleet import callback_reader
from proofserve.fleet.errors import BadCallback, StoreUnavailable, UnknownLane
from proofserve.fleet.records import FleetRound, Lane
from proofserve.fleet.routes.answers import StoredAnswer
from proofserve.fleet.sql.store import FleetStore
from proofserve.receiver.callbacks import SignatureCheck, guarded
from proofserve.rounds.status import NodeTotals
from proofserve.wire.callbacks import KEY_HEADER
from proofserve.wire.paths import FLEET, GENERATED
from proofserve.wire.records import problems

_logger = logging.getLogger(__name__)

# A million artifacts of k_dim 12, the most in one callback by default, have 70 MB.
MAX_CALLBACK_BYTES = 256 * 1024 * 1024
_MOST_LANES = 2**31


def router(
    store: FleetStore,
    totals: NodeTotals,
    check: SignatureCheck | None,
    max_body_bytes: int = MAX_CALLBACK_BYTES,
) -> APIRouter:
    """The route to which members send what they found.

    401 refuses a callback that ``check`` does not accept, 404 one of an unknown lane, 413 a large
    one, 422 names the wrong field, and 503 asks for another attempt.
    """
    made = APIRouter(prefix=FLEET, tags=["fleet"], route_class=guarded(check, max_body_bytes))
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
            round_, given = await _given(store, member_id, round_id, lane)
            async with parsing:
                found = await asyncio.to_thread(callback_reader.read, body, round_, lane)
            fresh = await store.ingest(round_, given, key, found)
        except UnknownLane as error:
            return JSONResponse({"detail": str(error)}, 404)
        except BadCallback as error:
            _logger.warning("a callback of member %s, lane %d: %s", member_id, lane, error)
            return _refused("body", error.field, error.reason)
        except StoreUnavailable as error:
            return JSONResponse({"detail": f"not stored: {error}"}, 503)
        if fresh:
            totals.computed("round", len(found.nonces), 0)
        return JSONResponse({"status": "stored" if fresh else "duplicate"})

    return made


async def _given(
    store: FleetStore, member_id: str, round_id: str, lane: int
) -> tuple[FleetRound, Lane]:
    """The round and its lane. Raises UnknownLane also for a lane of another member."""
    round_, given = await store.lane(round_id, lane)
    if given.member_id != member_id:
        raise UnknownLane(f"round {round_id!r} has not given lane {lane} to {member_id!r}")
    return round_, given


def _refused(where: str, field: str, reason: str) -> JSONResponse:
    error = {"type": "callback", "loc": (where, *field.split(".")), "msg": reason}
    return JSONResponse({"detail": problems([error])}, 422)
