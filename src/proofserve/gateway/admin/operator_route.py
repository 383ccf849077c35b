"""Routes for operators alone: no stranger's body is read, and theirs is small and strict JSON."""

import json
from collections.abc import Callable
from typing import Any

import msgspec
from fastapi import Request, Response
from fastapi.routing import APIRoute
from starlette.requests import ClientDisconnect
from starlette.types import Message

from proofserve.gateway.admin.admin_access import ADMIN_ONLY, is_admin
from proofserve.gateway.failures import BODY_TOO_LARGE, INVALID_BODY, RefusedByGateway

# Room for the name of a backend, many times over.
MOST_BYTES = 64 * 1024


class AdminRoute(APIRoute):
    """Lets operators in, and nobody else, before anything is read."""

    def get_route_handler(self) -> Callable[[Request], Any]:
        """What answers a request."""
        handle = super().get_route_handler()

        async def answer(request: Request) -> Response:
            if not is_admin(request.state.gateway.plan, request):
                raise RefusedByGateway(ADMIN_ONLY)
            response: Response = await handle(await _with_small_body(request))
            return response

        return answer


class _StrictRequest(Request):
    async def json(self) -> Any:
        """What the body says; UTF-16, NaN and halves of surrogate pairs are no JSON."""
        try:
            return msgspec.json.decode(await self.body())
        except RecursionError as error:
            raise json.JSONDecodeError("it is nested too deeply", "", 0) from error
        except ValueError as error:
            raise json.JSONDecodeError(str(error), "", 0) from error


async def _with_small_body(request: Request) -> _StrictRequest:
    came = 0

    async def receive() -> Message:
        nonlocal came
        message = await request.receive()
        came += len(message.get("body", b""))
        if came > MOST_BYTES:
            raise RefusedByGateway(BODY_TOO_LARGE)
        return message

    small = _StrictRequest(request.scope, receive)
    try:
        await small.body()
    except ClientDisconnect:
        # Nobody reads it.
        raise RefusedByGateway(INVALID_BODY) from None
    return small
