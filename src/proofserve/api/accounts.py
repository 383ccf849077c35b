"""What became of each request: counted where it was refused, and one line in the log."""

import logging
import re
import uuid

from fastapi import Request, Response

from proofserve.api.node import Node

REQUEST_ID = "X-Request-Id"

_logger = logging.getLogger(__name__)
# What a client may call its request; anything else could forge lines of the log.
_ID = re.compile(r"[\w.:-]{1,64}", re.ASCII)
_WORD = re.compile(r"(?<=[a-z])(?=[A-Z])")
# Asked every few seconds by those who watch: only what is refused of it is worth a line.
_QUIET = ("GET", "HEAD")


def reason_of(error: Exception) -> str:
    """The label of an error: ``QueueFull`` is ``queue_full``."""
    return _WORD.sub("_", type(error).__name__).lower().removesuffix("_error")


def account(node: Node | None, request: Request, response: Response, reason: str | None) -> None:
    """Count and log ``response``, and give it the request's id; ``reason`` says why it refused.

    Bodies, headers and answers stay out of the log: they may hold keys.
    """
    request_id = _id_of(request)
    response.headers[REQUEST_ID] = request_id
    if node is not None and reason is not None:
        node.refusals[response.status_code, reason] += 1
    if reason is None and request.method in _QUIET:
        return
    spec = node.manager.status().spec if node is not None else None
    round_id = spec.round_id if spec is not None else None
    _logger.log(
        logging.INFO if response.status_code < 500 else logging.WARNING,
        "request %s, round %s: %s %s: %d %s",
        request_id,
        round_id,
        request.method,
        request.url.path,
        response.status_code,
        reason or "served",
        extra={"request_id": request_id, "round_id": round_id},
    )


def _id_of(request: Request) -> str:
    given = request.headers.get(REQUEST_ID, "")
    return given if _ID.fullmatch(given) else uuid.uuid4().hex
