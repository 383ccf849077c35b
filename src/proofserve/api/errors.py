"""How a request can disagree with this server, one name each."""

import math
from collections.abc import Mapping
from typing import Any


class ApiError(Exception):
    """Root of this layer's errors. ``detail`` is what the client reads, ``headers`` go with it."""

    headers: Mapping[str, str] = {}

    def __init__(self, detail: str | Mapping[str, Any]) -> None:
        super().__init__(detail)
        self.detail = detail


class KeyMissing(ApiError):
    """The server asks for a key, and the request came without one or with a wrong one."""

    headers: Mapping[str, str] = {"WWW-Authenticate": "Bearer"}


class NotAllowed(ApiError):
    """This caller may not do that, or may not call at all."""


class BodyTooLarge(ApiError):
    """The body is larger than this server reads."""


class TooMany(ApiError):
    """A limit is reached that is not always so; ``retry_after_s`` is when to try again."""

    def __init__(self, detail: str, retry_after_s: float) -> None:
        super().__init__(detail)
        self.headers = {"Retry-After": str(max(1, math.ceil(retry_after_s)))}


class NotEnabled(ApiError):
    """The server was started without proofs."""


class DeploymentMismatch(ApiError):
    """The request is for another deployment: both sides are in the detail."""


class ClaimsMismatch(ApiError):
    """The claims are not about the requested nonces."""


class LaneMissing(ApiError):
    """The order does not say which nonces are the node's."""


class NotReady(ApiError):
    """A part that proofs need does not work; the detail says of each how it is."""


class ClientGone(ApiError):
    """The client left before its answer was ready. Nobody reads the detail."""
