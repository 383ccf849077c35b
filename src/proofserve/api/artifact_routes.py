"""The routes of the artifact protocol (protocol B.5 with P.2)."""

import contextlib
import uuid
from collections.abc import Callable
from typing import Annotated, Any

from fastapi import APIRouter, Query, Request

from proofserve.api import translate
from proofserve.api.disconnect import while_connected
from proofserve.api.failures import guarded
from proofserve.api.node import Node
from proofserve.api.schemas import JobOrder, RoundOrder
from proofserve.api.status import status_body
from proofserve.protocol.nonces import MAX_NONCE
from proofserve.rounds.bodies import outcome_body
from proofserve.rounds.errors import EngineFault, OutboxUnavailable, QueueFull
from proofserve.rounds.records import Job, StoredResult

PREFIX = "/api/v1/pow"


def router(get_node: Callable[[Request], Node]) -> APIRouter:
    """All routes, for an application whose requests lead ``get_node`` to their node."""
    routes = _Routes(get_node)
    made = APIRouter(prefix=PREFIX, tags=["proofs"], route_class=guarded(get_node))
    made.add_api_route("/init/generate", routes.start_round, methods=["POST"])
    made.add_api_route("/generate", routes.generate, methods=["POST"])
    made.add_api_route("/generate/{request_id}", routes.job_result, methods=["GET"])
    made.add_api_route("/status", routes.status, methods=["GET"])
    made.add_api_route("/stop", routes.stop, methods=["POST"])
    made.add_api_route("/results", routes.results, methods=["GET"])
    made.add_api_route("/versions", routes.versions, methods=["GET"])
    return made


class _Routes:
    def __init__(self, get_node: Callable[[Request], Node]) -> None:
        self._get_node = get_node

    async def start_round(self, request: Request, order: RoundOrder) -> dict[str, Any]:
        """Start generating proofs, until stopped. 409 while a round runs."""
        node = self._get_node(request)
        spec = translate.round_spec(order, node.deployment, str(uuid.uuid4()))
        await _require_engine(node)
        await node.manager.start(spec)
        return {"status": "OK", "pow_status": {"status": "GENERATING"}}

    async def generate(self, request: Request, order: JobOrder) -> dict[str, Any]:
        """Prove given nonces, or judge claims about them; after the round, while one runs."""
        node = self._get_node(request)
        job = translate.job(order, node.deployment)
        await _require_engine(node)
        if not order.wait:
            await _require_callback_room(node, job)
            request_id = node.manager.submit(job)
            return {
                "status": "queued",
                "request_id": request_id,
                "queued_count": len(job.nonces),
            }
        outcome = await while_connected(request, node.manager.run(job))
        return {
            "status": "completed",
            "request_id": str(uuid.uuid4()),
            **outcome_body(job, outcome),
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

    async def status(self, request: Request) -> dict[str, Any]:
        """The round, its counters, and how queue, outbox and engine are."""
        return await status_body(self._get_node(request))

    async def stop(self, request: Request) -> dict[str, Any]:
        """Stop the round and cancel queued jobs; what was finished is stored first."""
        await self._get_node(request).manager.stop()
        return {"status": "OK", "pow_status": {"status": "STOPPED"}}

    async def results(
        self,
        request: Request,
        after: Annotated[int, Query(ge=0, le=MAX_NONCE)] = 0,
        limit: Annotated[int, Query(ge=1, le=10_000)] = 1000,
    ) -> dict[str, Any]:
        """Stored results with ``seq > after``; go on from ``next_after``."""
        rows = await self._get_node(request).outbox.results(after, limit)
        return {
            "results": [_row(row) for row in rows],
            "next_after": rows[-1].seq if rows else after,
        }

    async def versions(self, request: Request) -> dict[str, Any]:
        """The versions of what runs here."""
        versions = dict(self._get_node(request).deployment.facts.versions)
        return {
            "vllm_version": versions.get("vllm"),
            "poc_validation_inference": True,
            "versions": versions,
        }


async def _require_engine(node: Node) -> None:
    """Raises EngineGone. An engine that is merely slow or at fault gets its chance."""
    with contextlib.suppress(EngineFault):
        await node.manager.engine_gauges()


async def _require_callback_room(node: Node, job: Job) -> None:
    """Raises QueueFull. Nothing in the outbox is ever dropped to make room."""
    if job.url is None:
        return
    limit, waiting = node.deployment.max_callbacks, 0
    # An outbox that is out of order for a while is no reason to refuse work now.
    with contextlib.suppress(OutboxUnavailable):
        waiting = (await node.outbox.gauges()).pending
    if waiting >= limit:
        raise QueueFull(f"Callback queue full: {waiting} callbacks wait, limit is {limit}")


def _row(row: StoredResult) -> dict[str, Any]:
    known = {"seq": row.seq, "round_id": row.round_id, "nonce": row.nonce}
    if row.error is not None:
        return {**known, "error": row.error}
    return {**known, "vector_b64": row.value}
