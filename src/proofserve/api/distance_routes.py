"""The endpoints that only the distance protocol has (protocol A.7 with P.2)."""

import uuid
from collections.abc import Awaitable, Callable
from typing import Any

from fastapi import APIRouter, Request

from proofserve.api import translate
from proofserve.api.access import Role
from proofserve.api.node import Node, ServedCaller, ServedNode, require_engine, while_connected
from proofserve.api.response_models import JudgeAnswer, PowAnswer, documented
from proofserve.api.schemas import DistanceClaimsRequest, DistanceRoundRequest
from proofserve.api.status import pow_status
from proofserve.rounds.records import RoundSpec


def add_to(router: APIRouter) -> None:
    configured = documented(PowAnswer, 409, 422, 503)
    changed = documented(PowAnswer, 400, 409, 503)
    router.post("/init", **configured)(init)
    router.post("/init/validate", **configured)(init_validate)
    router.post("/phase/generate", **changed)(phase_generate)
    router.post("/phase/validate", **changed)(phase_validate)
    router.post("/validate", **documented(JudgeAnswer, 400, 409, 422, 503))(validate)


async def init(node: ServedNode, body: DistanceRoundRequest) -> dict[str, Any]:
    """Configure a round without starting it. 409 while a round generates."""
    return await _configure(node, body, node.manager.init)


async def init_validate(node: ServedNode, body: DistanceRoundRequest) -> dict[str, Any]:
    """Configure the round by which claims are judged, and send verdicts to its callback_url.

    409 while a round generates.
    """
    return await _configure(node, body, node.manager.init_validate)


async def phase_generate(node: ServedNode) -> dict[str, Any]:
    """Start the configured round, or continue it where it stopped. 400 if there is no round."""
    await require_engine(node)
    await node.manager.generate()
    return await _ok(node)


async def phase_validate(node: ServedNode) -> dict[str, Any]:
    """Stop generating, and judge claims by the configured round. 400 if there is no round."""
    await require_engine(node)
    await node.manager.validate()
    return await _ok(node)


async def validate(
    request: Request, node: ServedNode, caller: ServedCaller, body: DistanceClaimsRequest
) -> dict[str, Any]:
    """Recompute a prover's winners and judge them by the configured round.

    400 if there is no round, 409 if the round is for another block. Chat goes first. A validator's
    call is within its budget of an hour, and no part of the round: its verdict is not sent.
    """
    claims = translate.distance_claims(body, node.deployment)
    await require_engine(node)
    of_round = caller.role is not Role.VALIDATOR
    with node.waits.one(), node.challenges.one(caller, len(claims.nonces)):
        verdict = await while_connected(request, node.manager.judge(claims, of_round))
    return {
        "status": "OK",
        "fraud_detected": verdict.fraud_detected,
        "computed_distances": list(verdict.computed),
        "n_invalid": verdict.n_invalid,
        "probability_honest": verdict.probability_honest,
    }


async def _configure(
    node: Node, body: DistanceRoundRequest, configure: Callable[[RoundSpec], Awaitable[None]]
) -> dict[str, Any]:
    spec = translate.distance_round(body, node.deployment, str(uuid.uuid4()))
    warning = await translate.url_warning("callback_url", spec.url, node.deployment)
    await require_engine(node)
    await configure(spec)
    return {**await _ok(node), **node.warn(spec.round_id, warning)}


async def _ok(node: Node) -> dict[str, Any]:
    return {"status": "OK", "pow_status": await pow_status(node)}
