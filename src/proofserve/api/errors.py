"""Why this server refuses a request: one class for each reason."""

import math
from collections.abc import Mapping
from typing import Any


class ApiError(Exception):
    """Base of the API's errors: the client gets ``status``, ``detail`` and ``headers``."""

    status: int
    headers: Mapping[str, str] = {}

    def __init__(self, detail: str | Mapping[str, Any]) -> None:
        super().__init__(detail)
        self.detail = detail


class KeyMissing(ApiError):
    """The server needs a key, and the request has none or a wrong one."""

    status = 401
    headers: Mapping[str, str] = {"WWW-Authenticate": "Bearer"}


class NotAllowed(ApiError):
    status = 403


class BodyTooLarge(ApiError):
    status = 413


class BodyLost(ApiError):
    """The HTTP server did not pass the body on, because the request asks for an upgrade."""

    status = 400


class TooMany(ApiError):
    """A limit is reached; the client may try again after ``retry_after_s`` seconds."""

    status = 429

    def __init__(self, detail: str, retry_after_s: float) -> None:
        super().__init__(detail)
        self.headers = {"Retry-After": str(max(1, math.ceil(retry_after_s)))}


class NotEnabled(ApiError):
    status = 503


class DeploymentMismatch(ApiError):
    """The request is for another deployment; the detail shows both."""

    status = 409

    def __init__(
        self, what: str, requested: Mapping[str, Any], deployed: Mapping[str, Any]
    ) -> None:
        detail = {"error": f"{what} mismatch", "requested": requested, "deployed": deployed}
        super().__init__(detail)


class ClaimsMismatch(ApiError):
    status = 400


class NotReady(ApiError):
    """A part that proofs need does not work; the detail names the state of each part."""

    status = 503


class ClientGone(ApiError):
    """The client closed the connection before its response was ready."""

    status = 499
