"""Health of the API process, of engine and outbox, and of proofs. vLLM's own is for chat."""

import asyncio
from typing import Any

from fastapi import APIRouter, Request

from proofserve.api import status
from proofserve.api.access import Role
from proofserve.api.errors import KeyMissing, NotAllowed, NotReady
from proofserve.api.failures import ClosingRoute
from proofserve.api.node import Node, ServedNode
from proofserve.api.response_models import DeepAnswer, HealthAnswer, documented

OK = "ok"
# How long a watched engine may take to answer before it counts as busy, seconds. Supervisors wait
# for few seconds, and a busy engine must not look like a dead one.
BUSY_ANSWER_S = 1.0


def add_to(router: APIRouter, without_key: APIRouter) -> None:
    """Add ``deep`` to ``router``, and the others to the router for every client."""
    router.get("/health/deep", **documented(DeepAnswer, 503), tags=["health"])(deep)
    # Not guarded: a supervisor must see that the process is alive, with or without proofs.
    without_key.add_api_route(
        "/health/live",
        live,
        methods=["GET"],
        route_class_override=ClosingRoute,
        **documented(HealthAnswer, needs_key=False),
    )
    for path, check in (("/health/ready", ready), ("/health/engine", engine)):
        without_key.get(path, **documented(HealthAnswer, 503, needs_key=False))(check)


async def live() -> dict[str, Any]:
    """The API process answers. Needs no key, and works while proofs are off."""
    return {"status": OK}


async def ready(request: Request, node: ServedNode) -> dict[str, Any]:
    """The engine works and the outbox can be written. Needs no key.

    503 names the part that failed; only a caller with a key gets the reason. An engine that has
    work and has not stepped for POC_ENGINE_STALL_SEC seconds has failed; one that is busy has not.
    """
    node.manager.require_open()
    probe = status.answer_of_outbox(node.outbox.probe())
    fault, (_, outbox) = await asyncio.gather(_engine_fault(node), probe)
    return _answer(node, request, {"engine": fault, "outbox": outbox})


async def engine(request: Request, node: ServedNode) -> dict[str, Any]:
    """The engine works. Needs no key.

    For supervisors that restart a server: a full disk, which no restart repairs, is no reason for
    a 503 here. Otherwise as ``ready``.
    """
    return _answer(node, request, {"engine": await _engine_fault(node)})


async def deep(node: ServedNode) -> dict[str, Any]:
    """Run one real forward after chat. 503 if it fails or chat leaves no time."""
    return {"status": OK, "seconds": await node.manager.self_check()}


async def _engine_fault(node: Node) -> str | None:
    """Why the engine does not work; None if it does.

    A core that is busy with one long step answers nothing meanwhile. Where all cores are watched,
    such an engine is ready.
    """
    if not node.is_watched:
        return (await status.read_engine(node))[1]
    try:
        async with asyncio.timeout(BUSY_ANSWER_S):
            return (await status.read_engine(node))[1]
    except TimeoutError:
        return node.stall


def _answer(node: Node, request: Request, faults: dict[str, str | None]) -> dict[str, Any]:
    """The answer of a node whose parts have ``faults``. Raises NotReady if one has."""
    if not any(faults.values()):
        return {"status": OK}
    if not _may_see_reasons(node, request):
        faults = {part: fault and "failed" for part, fault in faults.items()}
    raise NotReady({part: fault or OK for part, fault in faults.items()})


def _may_see_reasons(node: Node, request: Request) -> bool:
    try:
        node.access.admit(request, Role.VIEWER)
    except (KeyMissing, NotAllowed):
        return False
    return True
