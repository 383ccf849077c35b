"""The job endpoints of the artifact protocol (protocol B.5, B.6 with P.2)."""

import contextlib
import uuid
from collections.abc import Callable
from typing import Any

from fastapi import APIRouter, Request

from proofserve.api import translate
from proofserve.api.node import Node, require_engine, while_connected
from proofserve.api.response_models import JobAnswer, documented
from proofserve.api.schemas import JobRequest
from proofserve.rounds.errors import OutboxUnavailable, QueueFull
from proofserve.rounds.records import Job
from proofserve.wire.callbacks import outcome_body


class ArtifactRoutes:
    """Prove given nonces, or judge claims about them."""

    def __init__(self, get_node: Callable[[Request], Node]) -> None:
        self._get_node = get_node

    def add_to(self, router: APIRouter) -> None:
        """Add the endpoints to ``router``."""
        router.add_api_route(
            "/generate",
            self.generate,
            methods=["POST"],
            **documented(JobAnswer, 400, 409, 422, 503),
        )
        router.add_api_route(
            "/generate/{request_id}",
            self.job_result,
            methods=["GET"],
            **documented(JobAnswer, 404, 503),
        )

    async def generate(self, request: Request, body: JobRequest) -> dict[str, Any]:
        """Prove given nonces, or judge claims about them; after the round, while one runs."""
        node = self._get_node(request)
        job = translate.job(body, node.deployment)
        warning = await translate.url_warning("url", job.url, node.deployment)
        more = {"warning": warning} if warning else {}
        await require_engine(node)
        if not body.wait:
            await _require_callback_room(node, job)
            request_id = node.manager.submit(job)
            return {
                "status": "queued",
                "request_id": request_id,
                "queued_count": len(job.nonces),
                **more,
            }
        with node.waits.one():
            outcome = await while_connected(request, node.manager.run(job))
        return {
            "status": "completed",
            "request_id": str(uuid.uuid4()),
            **outcome_body(job, outcome),
            **more,
        }

    async def job_result(self, request: Request, request_id: str) -> dict[str, Any]:
        """What has become of a queued job. 404 once its result has expired."""
        view = self._get_node(request).manager.result(request_id)
        body: dict[str, Any] = {"status": view.state.value, "request_id": view.request_id}
        if view.outcome is not None:
            body |= outcome_body(view.job, view.outcome)
        if view.error is not None:
            body["error"] = view.error
        return body


async def _require_callback_room(node: Node, job: Job) -> None:
    """Raises QueueFull. Nothing in the outbox is ever dropped to make room."""
    if job.url is None:
        return
    limit, waiting = node.deployment.max_callbacks, 0
    # While the outbox cannot be read, work is still accepted.
    with contextlib.suppress(OutboxUnavailable):
        waiting = (await node.outbox.gauges()).pending
    if waiting >= limit:
        raise QueueFull(f"Callback queue full: {waiting} callbacks wait, limit is {limit}")
