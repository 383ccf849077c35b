"""The bodies and headers of callbacks, for both protocols (A.8, B.6, B.7)."""

from typing import Annotated, TypeVar

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
from proofserve.wire.commitments import CommittedWork
from proofserve.wire.protocols import ARTIFACT, DISTANCE, ROOTS, by_field
from proofserve.wire.records import ArtifactRecord, UnicodeText, VectorEncoding, Whole, WorkRecord

T = TypeVar("T")


class Stamp(BaseModel, frozen=True):
    """The headers of a callback; senders older than proofserve have none."""

    key: str | None = None
    sequence: Whole | None = None


class Callback(WorkRecord, frozen=True):
    """The fields of every callback. Unknown keys are ignored: newer nodes may send more."""


class Generated(Callback):
    """The body of ``/generated``; only jobs have a ``request_id``."""

    request_id: UnicodeText | None = None
    node_id: Whole
    artifacts: list[ArtifactRecord]
    encoding: VectorEncoding


class GeneratedRoots(Callback, CommittedWork):
    """The body of ``/generated`` in a round that publishes roots."""


class Validated(Callback):
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


def _as_many(values: list[T], info: ValidationInfo) -> list[T]:
    """Refuse a list that is not as long as the list of nonces, which is checked before it."""
    # Missing if the nonces have an error: then that error is enough.
    nonces = info.data.get("nonces")
    if nonces is not None and len(values) != len(nonces):
        raise PydanticCustomError(
            "length",
            "{values} values for {nonces} nonces",
            {"values": len(values), "nonces": len(nonces)},
        )
    return values


Nonces = Annotated[list[Whole], AfterValidator(_distinct)]
# Points on a sphere of radius 1: no two are further apart than 2.
Distance = Annotated[FiniteFloat, Field(ge=0, le=2)]
RTarget = Annotated[FiniteFloat, Field(gt=0, le=2)]
Probability = Annotated[FiniteFloat, Field(ge=0, le=1)]


class GeneratedWinners(Callback):
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


class ValidatedDistances(Callback):
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
    | Annotated[GeneratedRoots, Tag(ROOTS)],
    by_field("artifacts", "dist", "roots"),
]
AnyValidated = Annotated[
    Annotated[Validated, Tag(ARTIFACT)] | Annotated[ValidatedDistances, Tag(DISTANCE)],
    by_field("n_mismatch", "computed_distances"),
]
