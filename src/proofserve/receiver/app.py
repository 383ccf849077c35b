"""The HTTP side of the callback receiver."""

import sqlite3
from typing import Annotated

from fastapi import FastAPI, Header, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse

from proofserve.protocol.codec import decode
from proofserve.protocol.errors import MalformedVector
from proofserve.receiver.distance_messages import AnyGenerated, AnyValidated
from proofserve.receiver.messages import Generated, Stamp
from proofserve.receiver.signature_check import SignatureCheck, sealed
from proofserve.receiver.store import ReceiverStore, Summary
from proofserve.wire.protocols import problems
from proofserve.wire.records import Whole
from proofserve.wire.signature import KEY_HEADER, SEQUENCE_HEADER

KeyHeader = Annotated[str | None, Header(alias=KEY_HEADER, min_length=1, max_length=200)]
SequenceHeader = Annotated[Whole | None, Header(alias=SEQUENCE_HEADER)]


def create_app(book: ReceiverStore, seal: SignatureCheck | None = None) -> FastAPI:
    """The receiver: POST /generated and /validated of either protocol, GET /summary and /health.

    With a ``seal`` a callback that is not signed as it asks is answered with 401, and nothing of it
    is looked at.

    A callback is on disk before it is answered with 200; one that came before is answered so
    too, and not stored again. 422 names the field at fault, 503 asks for another try.
    """
    app = FastAPI(title="proofserve receive")
    if seal is not None:
        app.router.route_class = sealed(seal)
    app.add_exception_handler(sqlite3.Error, _try_again)
    app.add_exception_handler(RequestValidationError, _refuse)

    # Plain functions: FastAPI runs them on threads, since the book waits for the disk.
    @app.post("/generated")
    def generated(
        body: AnyGenerated, key: KeyHeader = None, sequence: SequenceHeader = None
    ) -> dict[str, str]:
        if isinstance(body, Generated):
            _check_vectors(body)
        return _answer(book.add_generated(body, Stamp(key=key, sequence=sequence)))

    @app.post("/validated")
    def validated(
        body: AnyValidated, key: KeyHeader = None, sequence: SequenceHeader = None
    ) -> dict[str, str]:
        return _answer(book.add_validated(body, Stamp(key=key, sequence=sequence)))

    @app.get("/health")
    def health() -> dict[str, str]:
        return {"status": "ok"}

    @app.get("/summary")
    def summary() -> Summary:
        return book.summary()

    return app


def _answer(fresh: bool) -> dict[str, str]:
    return {"status": "stored" if fresh else "duplicate"}


def _check_vectors(body: Generated) -> None:
    """Refuse a vector that is not exactly what ``encoding`` announces."""
    for place, artifact in enumerate(body.artifacts):
        try:
            decode(artifact.vector_b64, body.encoding.k_dim)
        except MalformedVector as error:
            problem = {
                "type": "malformed_vector",
                "loc": ("body", "artifacts", place, "vector_b64"),
                "msg": error.message,
            }
            raise RequestValidationError([problem]) from error


def _refuse(_request: Request, error: Exception) -> JSONResponse:
    """422 without the input, which FastAPI would echo: it may be all of a body, or NaN."""
    found = error.errors() if isinstance(error, RequestValidationError) else []
    return JSONResponse({"detail": problems(found)}, status_code=422)


def _try_again(_request: Request, error: Exception) -> JSONResponse:
    # The sender keeps the callback and comes back; a full disk may have room by then.
    return JSONResponse({"detail": f"not stored: {error}"}, status_code=503)
