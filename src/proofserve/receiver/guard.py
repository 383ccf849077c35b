"""Checks the signature and the size of a callback before it is parsed."""

import logging
from collections.abc import Callable
from typing import Any

from fastapi import Request, Response
from fastapi.responses import JSONResponse
from fastapi.routing import APIRoute

from proofserve.receiver.signature_check import BadSignature, SignatureCheck
from proofserve.web.bounded_body import with_body

_log = logging.getLogger(__name__)


class _BodyTooLarge(Exception):
    pass


def guarded(check: SignatureCheck | None, max_body_bytes: int) -> type[APIRoute]:
    """A route class for callbacks: 401 for a bad signature, 413 for a body above the limit."""

    class GuardedRoute(APIRoute):
        def get_route_handler(self) -> Callable[[Request], Any]:
            handle = super().get_route_handler()
            if "POST" not in self.methods:
                return handle

            async def answer(request: Request) -> Response:
                try:
                    request = await _checked(request, check, max_body_bytes)
                except BadSignature as error:
                    return _refused(401, str(error))
                except _BodyTooLarge:
                    text = (
                        f"the body has more than {max_body_bytes} bytes: give the receiver a"
                        " larger --max-body-bytes or the node a smaller POC_CALLBACK_MAX_ARTIFACTS"
                    )
                    return _refused(413, text)
                response: Response = await handle(request)
                return response

            return answer

    return GuardedRoute


async def _checked(request: Request, check: SignatureCheck | None, max_bytes: int) -> Request:
    # The headers first: the body of a refused callback need not be read.
    signed = None if check is None else check.headers(request)
    bounded = await with_body(Request, request, max_bytes, _BodyTooLarge())
    if check is not None and signed is not None:
        await check.body(*signed, await bounded.body())
    return bounded


def _refused(status: int, reason: str) -> JSONResponse:
    _log.warning("refused a callback: %s", reason)
    return JSONResponse({"detail": reason}, status)
