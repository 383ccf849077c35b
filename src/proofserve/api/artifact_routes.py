"""The job endpoints of the artifact protocol (protocol B.5, B.6 with P.2)."""

import contextlib
import uuid
from typing import Any

from fastapi import APIRouter, Request

from proofserve.api import translate
from proofserve.api.access import Role
from proofserve.api.errors import NotAllowed
from proofserve.api.node import (
    Deployment,
    Node,
    ServedCaller,
    ServedNode,
    require_engine,
    while_connected,
)
from proofserve.api.response_models import JobAnswer, documented
from proofserve.api.schemas import JobRequest
from proofserve.protocol import SEQ_LEN
from proofserve.protocol.errors import ProtocolError
from proofserve.rounds.errors import OutboxUnavailable, QueueFull
from proofserve.rounds.records import Job
from proofserve.wire.callbacks import outcome_body


def add_to(router: APIRouter) -> None:
    router.post("/generate", **documented(JobAnswer, 400, 409, 422, 503))(generate)
    router.get("/generate/{request_id}", **documented(JobAnswer, 404, 503))(job_result)


async def generate(
    request: Request, node: ServedNode, caller: ServedCaller, body: JobRequest
) -> dict[str, Any]:
    """Prove the given nonces, or judge claims about them, after the running round.

    A validator's key may have nonces proved and wait for them, within its budget of an hour.
    """
    if caller.role is Role.VALIDATOR:
        _require_challenge(body, node.deployment)
    job = translate.job(body, node.deployment)
    warning = await translate.url_warning("url", job.url, node.deployment)
    more = {"warning": warning} if warning else {}
    await require_engine(node)
    if not body.wait:
        await _require_callback_room(node, job)
        request_id = await node.manager.submit(job)
        queued = {"status": "queued", "request_id": request_id, "queued_count": len(job.nonces)}
        return queued | more
    with node.waits.one(), node.challenges.one(caller, len(job.nonces)):
        outcome = await while_connected(request, node.manager.run(job))
    done = {"status": "completed", "request_id": str(uuid.uuid4())}
    return done | outcome_body(job, outcome) | more


async def job_result(node: ServedNode, request_id: str) -> dict[str, Any]:
    """The state of a queued job, and its result. 404 once the result has expired."""
    view = await node.manager.result(request_id)
    body: dict[str, Any] = {"status": view.state.value, "request_id": view.request_id}
    if view.completed is not None:
        body |= outcome_body(view.completed.job, view.completed.outcome)
    if view.error is not None:
        body["error"] = view.error
    return body


def _require_challenge(body: JobRequest, deployment: Deployment) -> None:
    """Raise NotAllowed for what only an operator may order, and ProtocolError for long nonces."""
    if not body.wait or body.validation is not None or body.url is not None:
        raise NotAllowed(
            "a validator's key has nonces computed and waits for them: send wait true, and neither"
            " url nor validation"
        )
    # Chat waits for a forward, which is as long as its nonces are.
    longest = deployment.seq_len or SEQ_LEN
    if body.params.seq_len > longest:
        raise ProtocolError(
            "params.seq_len",
            f"{body.params.seq_len} is more than the {longest} tokens of a validator's nonce here;"
            " the operator may fix another number (POC_SEQ_LEN)",
        )


async def _require_callback_room(node: Node, job: Job) -> None:
    """Raises QueueFull. The outbox never drops a callback to make room for another."""
    if job.url is None:
        return
    limit, waiting = node.deployment.max_callbacks, 0
    # While the outbox cannot be read, work is still accepted.
    with contextlib.suppress(OutboxUnavailable):
        waiting = (await node.outbox.gauges()).pending
    if waiting >= limit:
        raise QueueFull(f"Callback queue full: {waiting} callbacks wait, limit is {limit}")
