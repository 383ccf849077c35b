"""Callbacks as they come in: the bodies of both protocols (A.8, B.6, B.7), headers, and the guard.

The guard refuses an unsigned or too large callback before its body is parsed.
"""

import asyncio
import logging
import time
from collections.abc import Callable
from typing import Annotated, Any, Literal

from fastapi import HTTPException, Request, Response
from fastapi.responses import JSONResponse
from fastapi.routing import APIRoute
from pydantic import (
    AfterValidator,
    BaseModel,
    Field,
    FiniteFloat,
    Tag,
    ValidationInfo,
    field_validator,
)
from pydantic_core import PydanticCustomError

from proofserve.protocol.errors import ProtocolError
from proofserve.protocol.nonces import check_nonces
from proofserve.web import Handle, route_class, with_body
from proofserve.wire.callbacks import (
    KEY_HEADER,
    SEQUENCE_HEADER,
    SIGNATURE_HEADER,
    TIMESTAMP_HEADER,
    Envelope,
)
from proofserve.wire.records import (
    ARTIFACT,
    DISTANCE,
    ROOTS,
    ArtifactRecord,
    CommittedRoots,
    FailedNonce,
    UnicodeText,
    VectorEncoding,
    Whole,
    WorkRecord,
    by_field,
)

_log = logging.getLogger(__name__)
# Limit of the clocks' difference plus the time to send a large body. Seconds.
MAX_AGE_S = 300.0

# Unknown keys of all bodies are ignored: newer nodes may send more.


class Generated(WorkRecord, frozen=True):
    """The body of ``/generated``; only jobs have a ``request_id``, and nonces that ``failed``."""

    request_id: UnicodeText | None = None
    node_id: Whole
    artifacts: list[ArtifactRecord]
    encoding: VectorEncoding
    failed: list[FailedNonce] | None = None


class Validated(WorkRecord, frozen=True):
    """The body of ``/validated``: the verdict of one job."""

    request_id: UnicodeText
    node_id: Whole
    n_total: Whole
    n_mismatch: Whole
    mismatch_nonces: list[Whole]
    p_value: float = Field(ge=0.0, le=1.0)
    fraud_detected: bool


def _distinct(nonces: list[int]) -> list[int]:
    try:
        check_nonces("nonces", nonces)
    except ProtocolError as error:
        raise PydanticCustomError("repeated", "{why}", {"why": error.message}) from error
    return nonces


def _as_many(values: list[Any], info: ValidationInfo) -> list[Any]:
    """Refuse a list that is not as long as the list of nonces, which is checked before it."""
    # Missing if the nonces have an error: then that error is enough.
    nonces = info.data.get("nonces")
    if nonces is not None and len(values) != len(nonces):
        text = f"{len(values)} values for {len(nonces)} nonces"
        raise PydanticCustomError("length", "{why}", {"why": text})
    return values


Nonces = Annotated[list[Whole], AfterValidator(_distinct)]
# Points on a sphere of radius 1: no two are further apart than 2.
Distance = Annotated[FiniteFloat, Field(ge=0, le=2)]
RTarget = Annotated[FiniteFloat, Field(gt=0, le=2)]
Probability = Annotated[FiniteFloat, Field(ge=0, le=1)]


class GeneratedWinners(WorkRecord, frozen=True):
    """The body of ``/generated`` in a distance round: ``nonces[i]`` has the distance ``dist[i]``.

    Every distance is below ``r_target``.
    """

    node_id: Whole
    # ``r_target`` and ``nonces`` before ``dist``, which is compared with both.
    r_target: RTarget
    nonces: Nonces
    dist: Annotated[list[Distance], AfterValidator(_as_many)]

    @field_validator("dist")
    @classmethod
    def _all_win(cls, dist: list[float], info: ValidationInfo) -> list[float]:
        r_target = info.data.get("r_target")
        if r_target is None:
            return dist
        for place, distance in enumerate(dist):
            if distance >= r_target:
                raise PydanticCustomError(
                    "no_win",
                    "{distance} at place {place} is not below r_target {r_target}",
                    {"distance": distance, "place": place, "r_target": r_target},
                )
        return dist


class ValidatedDistances(WorkRecord, frozen=True):
    """The body of ``/validated`` in a distance round: the verdict on claims, in their order.

    A received distance is the prover's claim and may be any number; None stands for a number that
    JSON cannot write. The fields with a default are missing in callbacks of other senders.
    """

    nonces: Nonces
    computed_distances: Annotated[list[Distance], AfterValidator(_as_many)]
    received_distances: Annotated[list[FiniteFloat | None], AfterValidator(_as_many)]
    valid: Annotated[list[bool], AfterValidator(_as_many)]
    fraud_detected: bool
    n_invalid: Whole | None = None
    probability_honest: Probability | None = None
    r_target: RTarget | None = None
    fraud_threshold: Probability | None = None
    node_id: Whole | None = None


AnyGenerated = Annotated[
    Annotated[Generated, Tag(ARTIFACT)]
    | Annotated[GeneratedWinners, Tag(DISTANCE)]
    | Annotated[CommittedRoots, Tag(ROOTS)],
    by_field("artifacts", "dist", "roots"),
]
AnyValidated = Annotated[
    Annotated[Validated, Tag(ARTIFACT)] | Annotated[ValidatedDistances, Tag(DISTANCE)],
    by_field("n_mismatch", "computed_distances"),
]


class StoredAnswer(BaseModel, extra="forbid"):
    """``duplicate``: a callback with this key was stored before."""

    status: Literal["stored", "duplicate"]


class SignatureCheck:
    """Checks that callbacks are signed with the shared secret, and that signatures are fresh.

    ``clock`` gives wall-clock seconds. The methods raise HTTPException.
    """

    def __init__(self, secret: bytes, clock: Callable[[], float] = time.time) -> None:
        self._secret = secret
        self._clock = clock

    def headers(self, request: Request) -> tuple[Envelope, str]:
        """What was signed, and the signature; the body is not read yet."""
        headers = request.headers
        signature = headers.get(SIGNATURE_HEADER)
        key = headers.get(KEY_HEADER)
        timestamp = _whole(headers.get(TIMESTAMP_HEADER))
        sequence = _whole(headers.get(SEQUENCE_HEADER))
        if signature is None or key is None or timestamp is None or sequence is None:
            how = "set POC_CALLBACK_SECRET on the node"
            raise HTTPException(401, f"this receiver accepts signed callbacks only: {how}")
        age = self._clock() - timestamp
        if abs(age) > MAX_AGE_S:
            late = f"signed {age:.0f} s ago, the limit is {MAX_AGE_S:.0f} s"
            raise HTTPException(401, f"{late}: compare the clocks of node and receiver")
        endpoint = request.url.path.rsplit("/", 1)[-1]
        return Envelope(endpoint, key, sequence, timestamp), signature

    async def body(self, envelope: Envelope, signature: str, body: bytes) -> None:
        """Refuse unless the signature is that of ``body`` under the secret."""
        if not await asyncio.to_thread(envelope.matches, self._secret, body, signature):
            text = "the signature was made with another secret or for another callback"
            raise HTTPException(401, text)


def _whole(text: str | None) -> int | None:
    # At most the digits of a 64-bit number: int() is slow for a long text.
    return int(text) if text is not None and text.isdecimal() and len(text) <= 19 else None


def guarded(check: SignatureCheck | None, max_body_bytes: int) -> type[APIRoute]:
    """A route class for callbacks: 401 for a bad signature, 413 for a body above the limit."""

    def around(route: APIRoute, handle: Handle) -> Handle:
        async def answer(request: Request) -> Response:
            too_large = HTTPException(
                413,
                f"the body has more than {max_body_bytes} bytes: give the receiver a"
                " larger --max-body-bytes or the node a smaller POC_CALLBACK_MAX_ARTIFACTS",
            )
            try:
                # The headers first: the body of a refused callback need not be read.
                signed = None if check is None else check.headers(request)
                request = await with_body(request, max_body_bytes, too_large)
                if check is not None and signed is not None:
                    await check.body(*signed, await request.body())
            except HTTPException as error:
                _log.warning("refused a callback: %s", error.detail)
                return JSONResponse({"detail": error.detail}, error.status_code)
            return await handle(request)

        return answer if "POST" in route.methods else handle

    return route_class(around)
