"""Whether this server lives, is ready for proofs, and can really compute one.

vLLM's own ``/health`` is about chat.
"""

import asyncio
from collections.abc import Callable
from typing import Any

from fastapi import APIRouter, Request

from proofserve.api import status
from proofserve.api.access import Role
from proofserve.api.errors import KeyMissing, NotAllowed, NotReady
from proofserve.api.failures import ClosingRoute, guarded
from proofserve.api.node import Node
from proofserve.api.response_models import HealthAnswer, documented
from proofserve.rounds.errors import OutboxUnavailable
from proofserve.wire.paths import PROOFS

OK = "ok"
FAILED = "failed"


class HealthRoutes:
    """The three health checks; ``live`` and ``ready`` need no key."""

    def __init__(self, get_node: Callable[[Request], Node]) -> None:
        self._get_node = get_node

    def without_key(self) -> APIRouter:
        """The routes that every client may call."""
        made = APIRouter(
            prefix=f"{PROOFS}/health",
            tags=["health"],
            route_class=guarded(self._get_node, needs_key=False),
        )
        # Not guarded: a supervisor must see that the process lives, with or without proofs.
        made.add_api_route(
            "/live",
            self.live,
            methods=["GET"],
            route_class_override=ClosingRoute,
            **documented(HealthAnswer, needs_key=False),
        )
        made.add_api_route(
            "/ready", self.ready, methods=["GET"], **documented(HealthAnswer, 503, needs_key=False)
        )
        return made

    async def live(self) -> dict[str, Any]:
        """The API process answers. Needs no key; works with proofs switched off, too."""
        return {"status": OK}

    async def ready(self, request: Request) -> dict[str, Any]:
        """The engine answers and the outbox can be written. Needs no key.

        503 names the part that failed; only a caller with a key gets the reason.
        """
        node = self._get_node(request)
        node.manager.require_open()
        (_, engine), outbox = await asyncio.gather(status.read_engine(node), _probe(node))
        if engine is None and outbox is None:
            return {"status": OK}
        if not _may_see_reasons(node, request):
            engine, outbox = engine and FAILED, outbox and FAILED
        raise NotReady({"engine": engine or OK, "outbox": outbox or OK})

    async def deep(self, request: Request) -> dict[str, Any]:
        """One real forward, in its turn after chat. 503 if it failed, or chat left no time."""
        return {"status": OK, "seconds": await self._get_node(request).manager.self_check()}


def _may_see_reasons(node: Node, request: Request) -> bool:
    try:
        node.access.admit(request, Role.VIEWER)
    except (KeyMissing, NotAllowed):
        return False
    return True


async def _probe(node: Node) -> str | None:
    """Why the outbox cannot be written; None if it can."""
    try:
        async with asyncio.timeout(status.OUTBOX_ANSWER_S):
            await node.outbox.probe()
    except TimeoutError:
        return f"the outbox did not answer within {status.OUTBOX_ANSWER_S:g} s"
    except OutboxUnavailable as error:
        return str(error)
    return None
