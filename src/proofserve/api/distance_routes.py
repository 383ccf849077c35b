"""The endpoints that only the distance protocol has (protocol A.7 with P.2)."""

import uuid
from collections.abc import Callable
from typing import Any

from fastapi import APIRouter, Request

from proofserve.api import translate
from proofserve.api.distance_schemas import DistanceClaimsRequest, DistanceRoundRequest
from proofserve.api.node import Node, require_engine, while_connected
from proofserve.api.response_models import JudgeAnswer, PowAnswer, documented
from proofserve.api.status import pow_status
from proofserve.api.translate import url_warning


class DistanceRoutes:
    """Configure a round, change its phase, judge claims by it."""

    def __init__(self, get_node: Callable[[Request], Node]) -> None:
        self._get_node = get_node

    def add_to(self, router: APIRouter) -> None:
        """Add the endpoints to ``router``."""
        configured = documented(PowAnswer, 409, 422, 503)
        changed = documented(PowAnswer, 400, 409, 503)
        judged = documented(JudgeAnswer, 400, 409, 422, 503)
        router.add_api_route("/init", self.init, methods=["POST"], **configured)
        router.add_api_route("/init/validate", self.init_validate, methods=["POST"], **configured)
        router.add_api_route("/phase/generate", self.phase_generate, methods=["POST"], **changed)
        router.add_api_route("/phase/validate", self.phase_validate, methods=["POST"], **changed)
        router.add_api_route("/validate", self.validate, methods=["POST"], **judged)

    async def init(self, request: Request, body: DistanceRoundRequest) -> dict[str, Any]:
        """Configure a round and do nothing yet. 409 while a round generates."""
        node = self._get_node(request)
        spec = translate.distance_round(body, node.deployment, str(uuid.uuid4()))
        warning = await url_warning("callback_url", spec.url, node.deployment)
        await require_engine(node)
        await node.manager.init(spec)
        return {**await _ok(node), **node.warn(spec.round_id, warning)}

    async def init_validate(self, request: Request, body: DistanceRoundRequest) -> dict[str, Any]:
        """Configure a round to judge claims by, and push verdicts to its callback_url.

        409 while a round generates.
        """
        node = self._get_node(request)
        spec = translate.distance_round(body, node.deployment, str(uuid.uuid4()))
        warning = await url_warning("callback_url", spec.url, node.deployment)
        await require_engine(node)
        await node.manager.init_validate(spec)
        return {**await _ok(node), **node.warn(spec.round_id, warning)}

    async def phase_generate(self, request: Request) -> dict[str, Any]:
        """Let the configured round generate, from where it stopped. 400 if there is none."""
        node = self._get_node(request)
        await require_engine(node)
        await node.manager.generate()
        return await _ok(node)

    async def phase_validate(self, request: Request) -> dict[str, Any]:
        """Let the configured round judge; it stops generating. 400 if there is none."""
        node = self._get_node(request)
        await require_engine(node)
        await node.manager.validate()
        return await _ok(node)

    async def validate(self, request: Request, body: DistanceClaimsRequest) -> dict[str, Any]:
        """Recompute a prover's winners and judge them by the configured round.

        400 if there is no round, 409 if it is for another block. Chat goes first, as always.
        """
        node = self._get_node(request)
        claims = translate.distance_claims(body, node.deployment)
        await require_engine(node)
        with node.waits.one():
            verdict = await while_connected(request, node.manager.judge(claims))
        return {
            "status": "OK",
            "fraud_detected": verdict.fraud_detected,
            "computed_distances": list(verdict.computed),
            "n_invalid": verdict.n_invalid,
            "probability_honest": verdict.probability_honest,
        }


async def _ok(node: Node) -> dict[str, Any]:
    return {"status": "OK", "pow_status": await pow_status(node)}
