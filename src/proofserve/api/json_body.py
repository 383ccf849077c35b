"""Request bodies as JSON: bounded in bytes and in values, and parsed strictly.

Python's own parser also accepts UTF-16, byte order marks and halves of surrogate pairs. Every
parser holds the event loop for seconds while it makes millions of small objects, so the values of
a body are counted before it is parsed (ADR 16 has the figures).
"""

import json
import re
from contextlib import suppress
from typing import Any

import numpy as np
from fastapi import Request
from pydantic_core import from_json
from starlette.requests import ClientDisconnect

from proofserve.api.errors import BodyLost, BodyTooLarge, ClientGone
from proofserve.web import with_body

# JSON values for one nonce in a body: the nonce, and its claim, an object with two fields.
_VALUES_PER_NONCE = 4
# Values of the other fields, with room for unknown fields that the error names.
_OTHER_VALUES = 1024
# Limit of a body without a list of nonces: several times its longest texts, even if escaped.
_BYTES_WITHOUT_LIST = 256 * 1024
# Every value but the first of its list or object has a comma before it.
_COMMA, _LIST, _OBJECT, _QUOTE = b',[{"'
# Bytes that are counted at a time: temporary arrays stay small, and counting ends early.
_SLICE = 2**20
_HALF_OF_A_PAIR = re.compile(rb"\\u[dD][89a-fA-F]")


class StrictJsonRequest(Request):
    """A request whose body is JSON by the standard, in UTF-8.

    NaN and the infinities pass, because the error for the field can then name the field.
    """

    async def json(self) -> Any:
        """The parsed body. Raises JSONDecodeError for every fault in it."""
        body = await self.body()
        try:
            return from_json(body)
        except ValueError as error:
            if _HALF_OF_A_PAIR.search(body):
                # Python's parser accepts it; then the model's error names the field.
                with suppress(ValueError, RecursionError):
                    return json.loads(body.decode())
            raise json.JSONDecodeError(str(error), "", 0) from error


async def read_body(request: Request, max_bytes: int, nonces: int) -> StrictJsonRequest:
    """Read the body of ``request``: at most ``max_bytes``, and values for ``nonces`` nonces.

    Raises BodyTooLarge as soon as the body is known to be larger, BodyLost and ClientGone.
    """
    setting = "POC_MAX_BODY_BYTES"
    if not nonces and max_bytes > _BYTES_WITHOUT_LIST:
        max_bytes, setting = _BYTES_WITHOUT_LIST, "this call takes no list"
    too_large = BodyTooLarge(f"the body has more than {max_bytes} bytes ({setting})")
    try:
        read = await with_body(StrictJsonRequest, request, max_bytes, too_large)
    except ClientDisconnect:
        raise ClientGone("Client closed request") from None
    body = await read.body()
    require_body(request, body)
    if holds_more_values(body, nonces * _VALUES_PER_NONCE + _OTHER_VALUES):
        need = f"{nonces} nonces need (POC_MAX_QUEUED_NONCES)" if nonces else "this call takes"
        raise BodyTooLarge(f"the body has more values than {need}")
    return read


def require_body(request: Request, body: bytes) -> None:
    """Raise BodyLost if the HTTP server did not pass on the body of ``request``."""
    if not body and has_upgraded_body(request):
        raise BodyLost(
            "the body was lost, because the request asks for Connection: Upgrade: send it again"
            " without Upgrade (curl --http1.1, Java HttpClient.Version.HTTP_1_1)"
        )


def has_upgraded_body(request: Request) -> bool:
    """Whether the request asks for ``Connection: Upgrade`` and announces a body.

    uvicorn with httptools loses such a body, and reads what arrives of it later as the next
    request; the connection must be closed after the response (ADR 16).
    """
    headers = request.headers
    tokens = ",".join(headers.getlist("connection")).lower().split(",")
    announced = headers.get("content-length", "0") != "0" or "transfer-encoding" in headers
    return announced and "upgrade" in (token.strip() for token in tokens)


def holds_more_values(body: bytes, limit: int) -> bool:
    """Whether ``body`` holds more than ``limit`` JSON values, found without parsing it.

    Text inside strings does not count: a claim may be any text.
    """
    if len(body) <= limit:
        return False
    if b"\\" in body:
        body = body.replace(b"\\\\", b"").replace(b'\\"', b"")
    data = np.frombuffer(body, np.uint8)
    values = quotes = 0
    for start in range(0, data.size, _SLICE):
        part = data[start : start + _SLICE]
        begins = (part == _COMMA) | (part == _LIST) | (part == _OBJECT)
        borders = np.flatnonzero(part == _QUOTE)
        if borders.size:
            quotes_before = np.searchsorted(borders, np.flatnonzero(begins)) + quotes
            values += int(np.count_nonzero(quotes_before % 2 == 0))
            quotes += borders.size
        elif quotes % 2 == 0:
            values += int(np.count_nonzero(begins))
        if values > limit or quotes > 2 * limit:
            return True
    return False
