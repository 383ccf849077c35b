"""Whether this server lives, is ready for proofs, and can really compute one.

vLLM's own ``/health`` speaks for chat.
"""

import asyncio
from collections.abc import Callable
from typing import Any

from fastapi import APIRouter, Request
from fastapi.routing import APIRoute

from proofserve.api.errors import NotReady
from proofserve.api.failures import guarded
from proofserve.api.node import Node
from proofserve.api.response_models import DeepAnswer, HealthAnswer, documented
from proofserve.api.snapshot import OUTBOX_ANSWER_S
from proofserve.rounds.errors import EngineFault, EngineGone, OutboxUnavailable

OK = "ok"


def router(get_node: Callable[[Request], Node]) -> APIRouter:
    """The three routes below ``/health``; see ``routes.router``."""

    async def live() -> dict[str, Any]:
        """This process answers; nothing else is looked at. With proofs switched off, too."""
        return {"status": OK}

    async def ready(request: Request) -> dict[str, Any]:
        """The engine answers and the outbox can be written. 503 names the part that does not."""
        node = get_node(request)
        node.manager.require_open()
        engine, outbox = await asyncio.gather(_engine(node), _outbox(node))
        if (engine, outbox) != (OK, OK):
            raise NotReady({"engine": engine, "outbox": outbox})
        return {"status": OK}

    async def deep(request: Request) -> dict[str, Any]:
        """One real forward, in its turn after chat. 503 if it failed, or chat left no time."""
        return {"status": OK, "seconds": await get_node(request).manager.self_check()}

    made = APIRouter(prefix="/health", tags=["health"], route_class=guarded(get_node))
    # Not guarded: what restarts a process that does not live must not see whether proofs are on.
    made.add_api_route(
        "/live", live, methods=["GET"], route_class_override=APIRoute, **documented(HealthAnswer)
    )
    made.add_api_route("/ready", ready, methods=["GET"], **documented(HealthAnswer, 503))
    made.add_api_route("/deep", deep, methods=["GET"], **documented(DeepAnswer, 503))
    return made


async def _engine(node: Node) -> str:
    try:
        await node.manager.engine_gauges()
    except (EngineFault, EngineGone) as error:
        return str(error)
    return OK


async def _outbox(node: Node) -> str:
    try:
        async with asyncio.timeout(OUTBOX_ANSWER_S):
            await node.outbox.probe()
    except TimeoutError:
        return f"the outbox did not answer within {OUTBOX_ANSWER_S:g} s"
    except OutboxUnavailable as error:
        return str(error)
    return OK
