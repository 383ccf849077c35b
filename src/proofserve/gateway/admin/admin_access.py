"""Which clients may operate the gateway: with the admin key or, without one, on this machine."""

import hmac
import json
from collections.abc import Callable
from typing import Any

import msgspec
from fastapi import Request, Response
from fastapi.routing import APIRoute
from starlette.requests import ClientDisconnect, HTTPConnection
from starlette.types import ASGIApp, Receive, Scope, Send

from proofserve.gateway.failures import BODY_TOO_LARGE, INVALID_BODY, Failure, RefusedByGateway
from proofserve.gateway.records import GatewayPlan
from proofserve.web import bearer_key, why_not_local, with_body

# Limit of a body, which only names a backend.
MAX_BYTES = 64 * 1024


def refusal_of(plan: GatewayPlan, connection: HTTPConnection) -> Failure | None:
    """Why a client may not operate the gateway of ``plan``; None if it may."""
    if plan.admin_key is None:
        reason = why_not_local(connection)
        if reason is None:
            return None
        message = (
            f"Without VLLM_GATEWAY_ADMIN_KEY only clients on this machine may do this: {reason}."
        )
    else:
        given = bearer_key(connection.scope["headers"])
        if given and hmac.compare_digest(given, plan.admin_key.encode()):
            return None
        message = "This needs the admin key: send it as 'Authorization: Bearer KEY'."
    return Failure(403, "admin_only", message)


class AdminOnly:
    """Lets only operators call an application, except for the paths of ``plan.self_guarded``.

    Those paths need keys of their own, and a request has only one key.
    """

    def __init__(self, app: ASGIApp, plan: GatewayPlan) -> None:
        self._app = app
        self._plan = plan

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        app = self._app
        # The decoded path, by which the application chooses the route.
        guarded = scope["type"] == "http" and not scope["path"].startswith(self._plan.self_guarded)
        if guarded and (failure := refusal_of(self._plan, HTTPConnection(scope))):
            app = Response(failure.body(), failure.status, media_type="application/json")
        await app(scope, receive, send)


class AdminRoute(APIRoute):
    """Checks that the client is an operator before it reads the body, which is bounded."""

    def get_route_handler(self) -> Callable[[Request], Any]:
        handle = super().get_route_handler()

        async def answer(request: Request) -> Response:
            if failure := refusal_of(request.state.gateway.plan, request):
                raise RefusedByGateway(failure)
            too_large = RefusedByGateway(BODY_TOO_LARGE)
            try:
                bounded = await with_body(_StrictRequest, request, MAX_BYTES, too_large)
            except ClientDisconnect:
                # The client has disconnected and does not read this answer.
                raise RefusedByGateway(INVALID_BODY) from None
            response: Response = await handle(bounded)
            return response

        return answer


class _StrictRequest(Request):
    async def json(self) -> Any:
        """The body as JSON in UTF-8, without NaN and halves of surrogate pairs."""
        try:
            return msgspec.json.decode(await self.body())
        except RecursionError as error:
            raise json.JSONDecodeError("it is nested too deeply", "", 0) from error
        except ValueError as error:
            raise json.JSONDecodeError(str(error), "", 0) from error
