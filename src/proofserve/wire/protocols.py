"""The two proof protocols share endpoints: a field of the body shows its protocol."""

from collections.abc import Iterable, Mapping
from typing import Any

from pydantic import BaseModel, Discriminator

# Tags of a discriminated union. Pydantic puts the tag into the location of an error.
ARTIFACT = "artifact protocol"
DISTANCE = "distance protocol"
ROOTS = "artifact protocol, committed"

# A body may have a hundred thousand faults, or one of a megabyte: the answer is cut to this.
_MAX_PROBLEMS = 20
_MAX_TEXT = 200


def by_field(artifact: str, distance: str, roots: str | None = None) -> Discriminator:
    """Choose the protocol by the field that only one of them has.

    A body with several of the fields or with none is refused, and the error names all.
    """
    tags = {artifact: ARTIFACT, distance: DISTANCE} | ({roots: ROOTS} if roots else {})

    def protocol_of(body: Any) -> str | None:
        if isinstance(body, BaseModel):
            body = type(body).model_fields
        found = [name for name in tags if name in body] if isinstance(body, dict) else []
        return tags[found[0]] if len(found) == 1 else None

    *others, last = (f"{name} ({tag})" for name, tag in tags.items())
    return Discriminator(
        protocol_of,
        custom_error_type="protocol",
        custom_error_message=f"exactly one of {', '.join(others)} and {last} is needed",
    )


def problems(errors: Iterable[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Validation errors in FastAPI's form, without the input, which may be huge or not JSON."""
    return [
        {
            "type": error["type"],
            "loc": [
                part[:_MAX_TEXT] if isinstance(part, str) else part
                for part in error["loc"]
                if part not in (ARTIFACT, DISTANCE, ROOTS)
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
