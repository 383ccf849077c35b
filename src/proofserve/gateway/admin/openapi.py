"""What the gateway's endpoints take and answer, as its OpenAPI page shows it."""

from typing import Any, Literal

from fastapi import Security
from fastapi.security import HTTPBearer
from pydantic import BaseModel, ConfigDict

Arguments = dict[Any, Any]

# The endpoints look at the key themselves: this is for the page alone.
CLIENTS = Security(HTTPBearer(scheme_name="client", auto_error=False, description="A client key."))
ADMIN = Security(HTTPBearer(scheme_name="admin", auto_error=False, description="The admin key."))

_REASONS: dict[int | str, str] = {
    400: "the body is no JSON object, has a field of a wrong type, or may cost more than the key's"
    " whole minute",
    401: "no client has this key",
    403: "for operators only",
    404: "unknown",
    408: "the request did not arrive in time",
    413: "the body is too large",
    422: "a field is wrong; its name is in param",
    429: "a limit of the key is reached; Retry-After says when to come again",
    431: "the request has too many headers, or too large ones",
    501: "the gateway does not support this method or transfer coding",
    502: "the backend is not there, broke off, or speaks something else",
    503: "no place came free, or none may; Retry-After says when to come again",
    504: "the backend took too long",
}


class Shown(BaseModel):
    """What all answers have in common."""

    model_config = ConfigDict(extra="forbid")


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


class Health(Shown):
    """New requests are accepted."""

    status: Literal["ok"]


class Draining(Shown):
    """This gateway ends."""

    status: Literal["draining"]


class Ready(Health):
    """These backends could take a request."""

    backends: list[str]


class NotReadyModel(Shown):
    """No request would be served, though some backends may be up."""

    status: Literal["draining", "no backend"]
    backends: list[str]


class Models(Shown):
    """The models of all backends that are up, as these describe them."""

    object: Literal["list"]
    data: list[dict[str, Any]]


class ShownBackend(Shown):
    """A backend as the gateway sees it. ``models`` is null until it has named any."""

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

    Answers do not pass through the models, which would cost and could change them.
    """
    responses: Arguments = {200: {"model": answer}, **_problems(*refusals)}
    if unavailable is not None:
        responses[503] = {"model": unavailable, "description": unavailable.__doc__}
    return {"response_model": None, "responses": responses}


def relaying(prompt: str, example: Any) -> Arguments:
    """Arguments of a route whose requests go to a backend; ``prompt`` names the field to answer."""
    count = {"type": ["integer", "null"], "maximum": 2**31 - 1}
    fields: Arguments = {
        "model": {"type": ["string", "null"], "description": "As GET /v1/models names it."},
        prompt: {"description": "Passed on unread, and so is every field that is not listed."},
        "stream": {"type": ["boolean", "null"]},
        "n": count,
        **dict.fromkeys(("max_tokens", "max_completion_tokens", "max_output_tokens"), count),
    }
    body = {
        "schema": {"type": "object", "properties": fields},
        "example": {"model": "tiny", prompt: example, "max_tokens": 16},
    }
    answers = {
        "application/json": {"schema": {"type": "object"}},
        "text/event-stream": {},
    }
    passed = {"description": "Of the backend, as it came.", "content": {"application/json": {}}}
    return {
        "response_model": None,
        "dependencies": [CLIENTS],
        "openapi_extra": {"requestBody": {"required": True, "content": {"application/json": body}}},
        "responses": {
            200: {"description": "The backend's answer.", "content": answers},
            **_problems(400, 401, 404, 408, 413, 429, 431, 501, 502, 503, 504),
            "4XX": passed,
            "5XX": passed,
        },
    }


def _problems(*codes: int) -> Arguments:
    return {code: {"model": ErrorModel, "description": _REASONS[code]} for code in codes}
