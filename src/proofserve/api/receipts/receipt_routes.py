"""``GET /api/v1/receipts``: the receipts of a response, and the public log.

No key is needed: a response's id is known to its client only, unless the client chose one that
others can guess; the log has no ids.
"""

from collections.abc import Callable
from typing import Annotated, Any

from fastapi import APIRouter, Path, Query, Request

from proofserve.api.access import Caller, Role
from proofserve.api.errors import NotEnabled
from proofserve.api.failures import guarded
from proofserve.api.node import Node, ServedNode
from proofserve.api.response_models import ResponseModel, documented
from proofserve.protocol.nonces import MAX_NONCE
from proofserve.rounds.receipts.service import ReceiptService
from proofserve.wire.paths import RECEIPTS
from proofserve.wire.receipts import (
    SignedEntryRecord,
    SignedReceiptRecord,
    signed_entry_body,
    signed_receipt_body,
)

# All clients of receipts together; operators' calls have their own limits.
_CLIENTS = Caller("receipts", Role.VIEWER)
# As long as every id that a client may choose, with what a server adds to it.
_LONGEST_ID = 512

ResponseId = Annotated[
    str, Path(max_length=_LONGEST_ID, description="The `id` of the answer, as chatcmpl-….")
]


class ReceiptsAnswer(ResponseModel):
    """One receipt for each choice of the response, in order."""

    receipts: list[SignedReceiptRecord]


class LogPage(ResponseModel):
    """Entries of the log; go on with ``after`` = ``next_after``."""

    public_key: str
    entries: list[SignedEntryRecord]
    next_after: int


def router(get_node: Callable[[Request], Node]) -> APIRouter:
    made = APIRouter(prefix=RECEIPTS, tags=["receipts"], route_class=guarded(get_node, _CLIENTS))
    # The log first: the other path has every id.
    made.get("/log", **documented(LogPage, 422, 503, needs_key=False))(log)
    of_response = documented(ReceiptsAnswer, 404, 410, 422, 425, 503, needs_key=False)
    made.get("/{response_id:path}", **of_response)(receipts)
    return made


async def receipts(node: ServedNode, response_id: ResponseId) -> dict[str, Any]:
    """The signed receipts of an answer that has ended, each with its place in the log.

    An id that is not known is waited for up to 2 s, then 404. 425 with Retry-After until the log
    has the receipt, which takes a second. 410 after the receipt's time to live.
    """
    found = await _service(node).of_response(response_id)
    return {"receipts": [signed_receipt_body(each) for each in found]}


async def log(
    node: ServedNode,
    after: Annotated[int, Query(ge=-1, le=MAX_NONCE)] = -1,
    limit: Annotated[int, Query(ge=1, le=10_000)] = 1000,
) -> dict[str, Any]:
    """Entries with an index above ``after``, in order: each has the hash of the one before."""
    service = _service(node)
    entries = await service.entries(after, limit)
    return {
        "public_key": service.public_key.hex(),
        "entries": [signed_entry_body(each) for each in entries],
        "next_after": entries[-1].entry.index if entries else after,
    }


def _service(node: Node) -> ReceiptService:
    if node.receipts is None:
        raise NotEnabled("this server makes no receipts")
    return node.receipts
