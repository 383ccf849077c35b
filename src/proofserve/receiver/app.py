"""The HTTP side of the callback receiver."""

import sqlite3
from typing import Annotated, Any, Final

from fastapi import FastAPI, Header, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse
from pydantic import BaseModel

from proofserve import __version__
from proofserve.protocol.codec import decode
from proofserve.protocol.errors import MalformedVector
from proofserve.protocol.receipts.record import SignedEntry, is_signed
from proofserve.receiver.callbacks import (
    AnyGenerated,
    AnyValidated,
    Generated,
    SignatureCheck,
    StoredAnswer,
    guarded,
)
from proofserve.receiver.store import ReceiverStore, Summary
from proofserve.wire import LOGGED
from proofserve.wire.callbacks import (
    KEY_HEADER,
    SEQUENCE_HEADER,
    SIGNATURE_HEADER,
    TIMESTAMP_HEADER,
)
from proofserve.wire.records import Whole, problems
from proofserve.wire.signed import LoggedEntries

KeyHeader = Annotated[str | None, Header(alias=KEY_HEADER, min_length=1, max_length=200)]
SequenceHeader = Annotated[Whole | None, Header(alias=SEQUENCE_HEADER)]

# A million artifacts of k_dim 12, the most in one callback by default, have 70 MB.
MAX_BODY_BYTES = 256 * 1024 * 1024


class CallbackRefusal(BaseModel):
    """Why a callback is not stored."""

    detail: str


_REFUSALS: Final = {
    400: "the body is no text",
    401: "the signature is missing, late, or of another secret or callback",
    413: "the body is larger than this receiver reads",
    503: "the disk is full or broken: send it again later",
}
# The guard reads these headers before FastAPI looks at the request.
_DOCUMENTED: Final[dict[str, Any]] = {
    "responses": {
        code: {"model": CallbackRefusal, "description": why} for code, why in _REFUSALS.items()
    },
    "openapi_extra": {
        "parameters": [
            {"name": name, "in": "header", "schema": {"type": "string"}}
            for name in (TIMESTAMP_HEADER, SIGNATURE_HEADER)
        ]
    },
}


def create_app(
    store: ReceiverStore, check: SignatureCheck | None = None, max_body_bytes: int = MAX_BODY_BYTES
) -> FastAPI:
    """The receiver: POST /generated, /validated and /logged, GET /summary and /health.

    A callback is on disk before the answer 200; one that came before is not stored again. 401
    refuses a callback that ``check`` does not accept, 413 a body above the limit; both before it is
    parsed. 422 names the wrong field, 503 asks for another attempt.
    """
    app = FastAPI(title="proofserve receive", version=__version__)
    app.router.route_class = guarded(check, max_body_bytes)
    app.add_exception_handler(sqlite3.Error, _try_again)
    app.add_exception_handler(RequestValidationError, _refuse)

    # Plain functions: FastAPI runs them in threads, because the store waits for the disk.
    @app.post("/generated", **_DOCUMENTED)
    def generated(
        body: AnyGenerated, key: KeyHeader = None, sequence: SequenceHeader = None
    ) -> StoredAnswer:
        if isinstance(body, Generated):
            _check_vectors(body)
        return _answer(store.add_generated(body, key, sequence))

    @app.post("/validated", **_DOCUMENTED)
    def validated(
        body: AnyValidated, key: KeyHeader = None, sequence: SequenceHeader = None
    ) -> StoredAnswer:
        return _answer(store.add_validated(body, key, sequence))

    # A fork gets 200 too: the sender cannot mend it, and would repeat it until it expires.
    @app.post(f"/{LOGGED}", **_DOCUMENTED)
    def logged(
        body: LoggedEntries, key: KeyHeader = None, sequence: SequenceHeader = None
    ) -> StoredAnswer:
        return _answer(store.add_logged(body.public_key, _signed_entries(body), key, sequence))

    @app.get("/health")
    def health() -> dict[str, str]:
        return {"status": "ok"}

    @app.get("/summary")
    def summary() -> Summary:
        return store.summary()

    return app


def _answer(fresh: bool) -> StoredAnswer:
    return StoredAnswer(status="stored" if fresh else "duplicate")


def _check_vectors(body: Generated) -> None:
    """Refuse a vector that does not have the announced encoding."""
    for place, artifact in enumerate(body.artifacts):
        try:
            decode(artifact.vector_b64, body.encoding.k_dim)
        except MalformedVector as error:
            loc = ("body", "artifacts", place, "vector_b64")
            problem = {"type": "malformed_vector", "loc": loc, "msg": error.message}
            raise RequestValidationError([problem]) from error


def _signed_entries(body: LoggedEntries) -> list[SignedEntry]:
    """Refuse an entry that is not signed by the stated key."""
    entries = [each.to_signed_entry() for each in body.entries]
    for place, each in enumerate(entries):
        if not is_signed(each.entry.hash, each.signature, body.public_key):
            loc = ("body", "entries", place, "entry_signature")
            text = "is not of this entry of the log and this public key"
            raise RequestValidationError([{"type": "signature", "loc": loc, "msg": text}])
    return entries


def _refuse(_request: Request, error: Exception) -> JSONResponse:
    """422 without the input that FastAPI would repeat: it may be huge, or NaN."""
    found = error.errors() if isinstance(error, RequestValidationError) else []
    return JSONResponse({"detail": problems(found)}, status_code=422)


def _try_again(_request: Request, error: Exception) -> JSONResponse:
    # The sender tries again later, when a full disk may have room.
    return JSONResponse({"detail": f"not stored: {error}"}, status_code=503)
