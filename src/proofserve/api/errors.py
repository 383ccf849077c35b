"""How a request can disagree with this server, one name each."""

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


class NotEnabled(ApiError):
    """The server was started without proofs."""


class Mismatch(ApiError):
    """The request is for another deployment: both sides are in the detail."""


class ClaimsMismatch(ApiError):
    """The claims are not about the requested nonces."""


class LaneMissing(ApiError):
    """The order does not say which nonces are the node's."""


class ClientGone(ApiError):
    """The client left before its answer was ready. Nobody reads the detail."""
