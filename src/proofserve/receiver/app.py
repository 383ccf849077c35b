"""The HTTP side of the callback receiver."""

import sqlite3
from typing import Annotated

from fastapi import FastAPI, Header, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse

from proofserve.protocol.codec import decode
from proofserve.protocol.errors import MalformedVector
from proofserve.protocol.receipts.signature import SignedEntry, is_signed
from proofserve.receiver.callbacks import (
    AnyGenerated,
    AnyValidated,
    Generated,
    SignatureCheck,
    guarded,
)
from proofserve.receiver.store import ReceiverStore, Summary
from proofserve.wire.callbacks import KEY_HEADER, SEQUENCE_HEADER
from proofserve.wire.paths import LOGGED
from proofserve.wire.receipts import LoggedEntries
from proofserve.wire.records import Whole, problems

KeyHeader = Annotated[str | None, Header(alias=KEY_HEADER, min_length=1, max_length=200)]
SequenceHeader = Annotated[Whole | None, Header(alias=SEQUENCE_HEADER)]

# A million artifacts of k_dim 12, the most in one callback by default, have 70 MB.
MAX_BODY_BYTES = 256 * 1024 * 1024


def create_app(
    store: ReceiverStore, check: SignatureCheck | None = None, max_body_bytes: int = MAX_BODY_BYTES
) -> FastAPI:
    """The receiver: POST /generated, /validated and /logged, GET /summary and /health.

    A callback is on disk before the answer 200; one that came before is not stored again. 401
    refuses a callback that ``check`` does not accept, 413 a body above the limit; both before it is
    parsed. 422 names the wrong field, 503 asks for another attempt.
    """
    app = FastAPI(title="proofserve receive")
    app.router.route_class = guarded(check, max_body_bytes)
    app.add_exception_handler(sqlite3.Error, _try_again)
    app.add_exception_handler(RequestValidationError, _refuse)

    # Plain functions: FastAPI runs them in threads, because the store waits for the disk.
    @app.post("/generated")
    def generated(
        body: AnyGenerated, key: KeyHeader = None, sequence: SequenceHeader = None
    ) -> dict[str, str]:
        if isinstance(body, Generated):
            _check_vectors(body)
        return _answer(store.add_generated(body, key, sequence))

    @app.post("/validated")
    def validated(
        body: AnyValidated, key: KeyHeader = None, sequence: SequenceHeader = None
    ) -> dict[str, str]:
        return _answer(store.add_validated(body, key, sequence))

    # A fork gets 200 too: the sender cannot mend it, and would repeat it until it expires.
    @app.post(f"/{LOGGED}")
    def logged(
        body: LoggedEntries, key: KeyHeader = None, sequence: SequenceHeader = None
    ) -> dict[str, str]:
        return _answer(store.add_logged(body.public_key, _signed_entries(body), key, sequence))

    @app.get("/health")
    def health() -> dict[str, str]:
        return {"status": "ok"}

    @app.get("/summary")
    def summary() -> Summary:
        return store.summary()

    return app


def _answer(fresh: bool) -> dict[str, str]:
    return {"status": "stored" if fresh else "duplicate"}


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
