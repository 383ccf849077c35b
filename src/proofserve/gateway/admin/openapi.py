"""The schemas of the gateway's OpenAPI page."""

from typing import Any, Literal

from fastapi import Security
from fastapi.security import HTTPBearer
from pydantic import BaseModel

Arguments = dict[Any, Any]

# Only for the page: the endpoints check the keys themselves.
CLIENTS = Security(HTTPBearer(scheme_name="client", auto_error=False, description="A client key."))
ADMIN = Security(HTTPBearer(scheme_name="admin", auto_error=False, description="The admin key."))

UNREAD = {"description": "Passed on, like every field that is not listed."}
_REASONS: dict[int | str, str] = {
    400: "the request is not valid HTTP, its body is not a JSON object or has a field of a wrong"
    " type, or it may cost more tokens than the key has per minute",
    401: "no client has this key",
    403: "only operators may do this",
    404: "there is no such model or backend, or this key got no such answer",
    408: "the request did not arrive in time",
    410: "the receipt is deleted: its time to live has passed",
    413: "the body is too large",
    422: "a field is wrong; its name is in param",
    425: "the receipt is not in the node's log yet; Retry-After says when to try again",
    429: "a limit of the key is reached; Retry-After says when to try again",
    431: "the request has too many headers, or too large ones",
    501: "the gateway does not support this method",
    502: "the backend refuses connections, closed early, or does not answer in HTTP",
    503: "the queue is full, the wait for a permit was too long, no backend takes requests, or the"
    " gateway is shutting down; Retry-After says when to try again",
    504: "the backend took too long",
}


class Shown(BaseModel, extra="forbid"):
    """Base of the gateway's own answers, which have no other fields."""


class Fault(Shown):
    """Why a request was refused; ``code`` is stable."""

    message: str
    type: Literal[
        "invalid_request_error", "authentication_error", "rate_limit_error", "server_error"
    ]
    param: str | None
    code: str


class ErrorModel(Shown):
    """A refusal, in OpenAI's shape."""

    error: Fault


class BackendError(BaseModel, extra="allow"):
    """An error of the backend, passed on as it came. In vLLM's, ``error.code`` is a number."""

    error: dict[str, Any] | str | None = None


class Health(Shown):
    """The gateway accepts new requests."""

    status: Literal["ok"]


class Draining(Shown):
    """The gateway is shutting down."""

    status: Literal["draining"]


class Ready(Health):
    """``backends`` lists those that can take a request."""

    backends: list[str]


class NotReadyModel(Shown):
    """The gateway serves no requests: it shuts down, or no backend is up."""

    status: Literal["draining", "no backend"]
    backends: list[str]


class Models(Shown):
    """The models of all backends that are up, as the backends describe them."""

    object: Literal["list"]
    data: list[dict[str, Any]]


class Receipts(BaseModel, extra="allow"):
    """One signed receipt for each choice of the answer; docs/receipts.md has their fields."""

    receipts: list[dict[str, Any]]


class ShownBackend(Shown):
    """The state of a backend. ``models`` is null until the backend has listed them."""

    backend: str
    weight: float
    healthy: bool
    resting: bool
    draining: bool
    in_flight: int
    connections: int
    models: list[str] | None


def answering(answer: Any, *refusals: int, unavailable: type[Shown] | None = None) -> Arguments:
    """Arguments of a route that answers ``answer``, one of ``refusals``, or 503.

    The answers are not validated: that would cost time and could change them.
    """
    responses: Arguments = {200: {"model": answer}, **_errors(ErrorModel, *refusals)}
    if unavailable is not None:
        responses[503] = {"model": unavailable, "description": unavailable.__doc__}
    return {"response_model": None, "responses": responses}


def relaying(example: Any, *prompts: str) -> Arguments:
    """Arguments of a relayed route, whose requests have one of the fields ``prompts``."""
    count = {"type": ["integer", "null"], "maximum": 2**31 - 1}
    fields: Arguments = {
        "model": {"type": ["string", "null"], "description": "As GET /v1/models names it."},
        **dict.fromkeys(prompts, UNREAD),
        "stream": {"type": ["boolean", "null"]},
        "n": count,
        **dict.fromkeys(("max_tokens", "max_completion_tokens", "max_output_tokens"), count),
    }
    body = {
        "schema": {
            "type": "object",
            "properties": fields,
            "anyOf": [{"required": [prompt]} for prompt in prompts],
        },
        "example": {"model": "tiny", prompts[0]: example, "max_tokens": 16},
    }
    answers = {"application/json": {"schema": {"type": "object"}}, "text/event-stream": {}}
    passed = {"description": "An error of the backend, as it came.", "model": BackendError}
    codes = (400, 401, 404, 408, 413, 429, 431, 501, 502, 503, 504)
    return {
        "response_model": None,
        "openapi_extra": {"requestBody": {"required": True, "content": {"application/json": body}}},
        "responses": {
            200: {"description": "The backend's answer.", "content": answers},
            **_errors(ErrorModel | BackendError, *codes),
            "4XX": passed,
            "5XX": passed,
        },
    }


def _errors(model: Any, *codes: int) -> Arguments:
    return {code: {"model": model, "description": _REASONS[code]} for code in codes}
