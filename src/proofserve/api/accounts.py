"""One log line for each request, and a count of each refusal."""

import logging
import re

from fastapi import Request, Response

from proofserve.api.node import Node

_logger = logging.getLogger(__name__)
_WORD = re.compile(r"(?<=[a-z])(?=[A-Z])")
# Monitoring sends these every few seconds: only their refusals are logged.
_QUIET = ("GET", "HEAD")


def reason_of(error: Exception) -> str:
    """The label of an error: ``QueueFull`` is ``queue_full``."""
    return _WORD.sub("_", type(error).__name__).lower().removesuffix("_error")


def account(
    node: Node | None, request: Request, response: Response, request_id: str, reason: str | None
) -> None:
    """Count and log ``response``; ``reason`` says why the request was refused, None if it was not.

    Request bodies, headers and response bodies are not logged: they may hold keys.
    """
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
