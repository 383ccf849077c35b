"""The two proof protocols share endpoints: a field of the body shows its protocol."""

from collections.abc import Iterable, Mapping
from typing import Any

from pydantic import BaseModel, Discriminator

# Tags of a discriminated union. Pydantic puts the tag into the location of an error.
ARTIFACT = "artifact protocol"
DISTANCE = "distance protocol"

# A body may have a hundred thousand faults, or one of a megabyte: the answer is cut to this.
_MAX_PROBLEMS = 20
_MAX_TEXT = 200


def by_field(artifact: str, distance: str) -> Discriminator:
    """Choose the protocol by the field that only one of them has.

    A body with both fields or with neither is refused, and the error names both.
    """

    def protocol_of(body: Any) -> str | None:
        if isinstance(body, BaseModel):
            body = type(body).model_fields
        if not isinstance(body, dict) or (artifact in body) is (distance in body):
            return None
        return ARTIFACT if artifact in body else DISTANCE

    return Discriminator(
        protocol_of,
        custom_error_type="protocol",
        custom_error_message=(
            f"exactly one of {artifact} ({ARTIFACT}) and {distance} ({DISTANCE}) is needed"
        ),
    )


def problems(errors: Iterable[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Validation errors in FastAPI's form, without the input, which may be huge or not JSON."""
    return [
        {
            "type": error["type"],
            "loc": [
                part[:_MAX_TEXT] if isinstance(part, str) else part
                for part in error["loc"]
                if part not in (ARTIFACT, DISTANCE)
            ],
            "msg": _message(error)[:_MAX_TEXT],
        }
        for error in list(errors)[:_MAX_PROBLEMS]
    ]


def _message(error: Mapping[str, Any]) -> str:
    # For a body that is not JSON, FastAPI has the reason beside the message.
    if error["type"] == "json_invalid":
        return f"{error['msg']}: {error['ctx']['error']}"
    if error["type"] == "missing" and tuple(error["loc"]) == ("body",):
        return "The request body is empty."
    return str(error["msg"])
