"""The bodies of the distance callbacks (protocol A.8), and what tells them from the others."""

from collections.abc import Callable
from typing import Annotated, Any, TypeVar

from pydantic import (
    AfterValidator,
    BaseModel,
    Discriminator,
    Field,
    FiniteFloat,
    Tag,
    ValidationInfo,
    field_validator,
)
from pydantic_core import PydanticCustomError

from proofserve.protocol.errors import ProtocolError
from proofserve.protocol.nonces import check_nonces
from proofserve.receiver.messages import Generated, Message, Nonce, Text, Validated, Whole

# What the error list of a body would name besides its fields.
ARTIFACT = "artifact protocol"
DISTANCE = "distance protocol"

T = TypeVar("T")


def _distinct(nonces: list[int]) -> list[int]:
    try:
        check_nonces("nonces", nonces)
    except ProtocolError as error:
        raise PydanticCustomError("repeated", "{why}", {"why": error.message}) from error
    return nonces


def _as_many(values: list[T], info: ValidationInfo) -> list[T]:
    """Refuse a list that is not as long as the nonces; those are checked before it."""
    # Absent when they have an error of their own: one complaint is enough.
    nonces = info.data.get("nonces")
    if nonces is not None and len(values) != len(nonces):
        raise PydanticCustomError(
            "length",
            "{values} values for {nonces} nonces",
            {"values": len(values), "nonces": len(nonces)},
        )
    return values


Nonces = Annotated[list[Nonce], AfterValidator(_distinct)]
# Points on a sphere of radius 1: no two are further apart than 2.
Distance = Annotated[FiniteFloat, Field(ge=0, le=2)]


class GeneratedWinners(Message):
    """The body of ``/generated`` in a distance round: ``nonces[i]`` has the distance ``dist[i]``.

    Every distance is a win, that is below ``r_target``.
    """

    public_key: Text
    block_hash: Text
    block_height: Whole
    node_id: Whole
    # Before the distances, which are compared with both.
    r_target: Annotated[FiniteFloat, Field(gt=0, le=2)]
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


class ValidatedDistances(Message):
    """The body of ``/validated`` in a distance round: the verdict on claims, in their order.

    A received distance may be any number, it is what somebody claimed; None stands for one that
    JSON lacks. Senders older than proofserve give neither ``n_invalid`` nor
    ``probability_honest``.
    """

    public_key: Text
    block_hash: Text
    block_height: Whole
    nonces: Nonces
    computed_distances: Annotated[list[Distance], AfterValidator(_as_many)]
    received_distances: Annotated[list[FiniteFloat | None], AfterValidator(_as_many)]
    valid: Annotated[list[bool], AfterValidator(_as_many)]
    fraud_detected: bool
    n_invalid: Whole | None = None
    probability_honest: Annotated[FiniteFloat, Field(ge=0, le=1)] | None = None


def _protocol(artifact: str, distance: str) -> Callable[[Any], str | None]:
    """Tell the protocols apart by a field that only one of them has, None for both or neither."""

    def protocol_of(body: Any) -> str | None:
        if isinstance(body, BaseModel):
            return ARTIFACT if isinstance(body, Generated | Validated) else DISTANCE
        if not isinstance(body, dict) or (artifact in body) is (distance in body):
            return None
        return ARTIFACT if artifact in body else DISTANCE

    return protocol_of


def _by(artifact: str, distance: str) -> Discriminator:
    return Discriminator(
        _protocol(artifact, distance),
        custom_error_type="protocol",
        custom_error_message=(
            f"exactly one of {artifact} ({ARTIFACT}) and {distance} ({DISTANCE}) is needed"
        ),
    )


AnyGenerated = Annotated[
    Annotated[Generated, Tag(ARTIFACT)] | Annotated[GeneratedWinners, Tag(DISTANCE)],
    _by("artifacts", "dist"),
]
AnyValidated = Annotated[
    Annotated[Validated, Tag(ARTIFACT)] | Annotated[ValidatedDistances, Tag(DISTANCE)],
    _by("n_mismatch", "computed_distances"),
]
