"""All errors of the gateway itself, and their HTTP responses.

The body has the shape of OpenAI's errors, or of Anthropic's for clients of that API. ``code`` is
stable and also names the outcome in the metrics. The gateway passes errors of a backend on
unchanged.
"""

import enum
import json
import math
from dataclasses import dataclass, replace
from http import HTTPStatus


class ErrorShape(enum.Enum):
    """Whose errors a client expects: their fields, and the event that ends a stream."""

    OPENAI = enum.auto()
    ANTHROPIC = enum.auto()


# By status; others below 500 are invalid_request_error.
ANTHROPIC_TYPES = {
    401: "authentication_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    502: "api_error",
    503: "overloaded_error",
    504: "timeout_error",
}


@dataclass(frozen=True, slots=True)
class Failure:
    """An error: status, code, and a message that says what to do; ``retry_after`` in seconds."""

    status: int
    code: str
    message: str
    retry_after: int | None = None
    param: str | None = None

    @property
    def type(self) -> str:
        usual = "server_error" if self.status >= 500 else "invalid_request_error"
        return {401: "authentication_error", 429: "rate_limit_error"}.get(self.status, usual)

    def saying(self, message: str) -> "Failure":
        return replace(self, message=message)

    def after(self, seconds: float) -> "Failure":
        """The same failure with a ``retry_after``, rounded up to whole seconds, at least one."""
        return replace(self, retry_after=max(1, math.ceil(seconds)))

    def body(self, shape: ErrorShape = ErrorShape.OPENAI) -> bytes:
        shown = {"message": self.message, "type": self.type, "param": self.param, "code": self.code}
        whole: dict[str, object] = {"error": shown}
        if shape is ErrorShape.ANTHROPIC:
            shown["type"] = ANTHROPIC_TYPES.get(self.status, "invalid_request_error")
            whole = {"type": "error", **whole}
        return json.dumps(whole).encode()

    def answer(
        self,
        request_id: bytes,
        extra: bytes,
        keep_alive: bool,
        shape: ErrorShape = ErrorShape.OPENAI,
    ) -> bytes:
        """The whole HTTP/1.1 response. ``extra`` are header lines, each ending with CRLF."""
        body = self.body(shape)
        wait = b"retry-after: %d\r\n" % self.retry_after if self.retry_after else b""
        close = b"" if keep_alive else b"connection: close\r\n"
        status = b"%d %s" % (self.status, HTTPStatus(self.status).phrase.encode())
        return (
            b"HTTP/1.1 %s\r\ncontent-type: application/json\r\ncontent-length: %d\r\n"
            b"x-request-id: %s\r\n%s%s%s\r\n%s"
        ) % (status, len(body), request_id, wait, extra, close, body)

    def last_chunks(self, shape: ErrorShape = ErrorShape.OPENAI) -> bytes:
        """The error as an event of a chunked stream, and the stream's end."""
        name = b"event: error\n" if shape is ErrorShape.ANTHROPIC else b""
        event = b"%sdata: %s\n\n" % (name, self.body(shape))
        return b"%x\r\n%s\r\n0\r\n\r\n" % (len(event), event)


class RefusedByGateway(Exception):
    def __init__(self, failure: Failure) -> None:
        super().__init__(failure.message)
        self.failure = failure


INVALID_HTTP = Failure(400, "invalid_http", "The request is not valid HTTP/1.1.")
INVALID_BODY = Failure(400, "invalid_body", "The request body is not a JSON object.")
BEYOND_BUDGET = Failure(
    400, "beyond_token_budget", "This request may cost more tokens than this key has per minute."
)
UNAUTHORIZED = Failure(
    401,
    "invalid_api_key",
    "No client has this key. Send it as 'Authorization: Bearer KEY' or 'X-Api-Key: KEY'.",
)
UNKNOWN_MODEL = Failure(404, "model_not_found", "No backend serves this model.", param="model")
UNKNOWN_RECEIPT = Failure(
    404, "unknown_receipt", "This key got no answer with this id, or it is too long ago."
)
RECEIVE_TIMEOUT = Failure(408, "receive_timeout", "The request did not arrive completely in time.")
BODY_TOO_LARGE = Failure(413, "body_too_large", "The request body is too large.")
HEADERS_TOO_LARGE = Failure(
    431, "headers_too_large", "The request has over 128 headers, or over 64 KiB of them."
)
TOO_MANY_AT_ONCE = Failure(
    429, "concurrency_limit", "This key has its maximum of requests in flight.", 1
)
REQUEST_RATE = Failure(429, "request_rate_limit", "This key has no requests left in this minute.")
TOKEN_RATE = Failure(
    429, "token_rate_limit", "This key has too few tokens left in this minute for this request."
)
NOT_IMPLEMENTED = Failure(501, "not_implemented", "The gateway does not support this method.")
BACKEND_BROKE = Failure(502, "backend_broke", "The backend closed before its answer was complete.")
BACKEND_GARBLED = Failure(502, "backend_garbled", "The backend's answer is not valid HTTP/1.1.")
UNREACHABLE = Failure(502, "backend_unreachable", "The backend refuses connections.", 1)
QUEUE_FULL = Failure(503, "queue_full", "The queue is full. Try again later.")
QUEUE_TIMEOUT = Failure(
    503, "queue_timeout", "The wait for a permit was too long. Try again later."
)
NO_BACKEND = Failure(503, "no_backend", "No backend takes requests for this model now.", 5)
SHUTTING_DOWN = Failure(503, "shutting_down", "This gateway is shutting down. Use another.", 1)
CONNECT_TIMEOUT = Failure(
    504, "connect_timeout", "The backend did not accept a connection in time."
)
FIRST_BYTE_TIMEOUT = Failure(504, "first_byte_timeout", "The backend began no answer in time.")
STALL_TIMEOUT = Failure(504, "stall_timeout", "The backend stopped in the middle of its answer.")
TOTAL_TIMEOUT = Failure(504, "total_timeout", "The request took longer than is allowed.")
