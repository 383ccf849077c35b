"""Records that occur in several messages."""

import json
from typing import Any

import pytest
from pydantic import BaseModel, TypeAdapter, ValidationError

from proofserve.rounds.records import StoredResult
from proofserve.wire.records import (
    ARTIFACT,
    ArtifactRecord,
    UnicodeText,
    VectorEncoding,
    artifact_record,
    by_field,
    encoding_of,
    problems,
    result_of,
    result_record,
)


def test_the_bases_read_what_the_functions_write() -> None:
    assert VectorEncoding.model_validate(encoding_of(12)).k_dim == 12
    assert ArtifactRecord.model_validate(artifact_record(7, "AAAA")).nonce == 7


@pytest.mark.parametrize("changes", [{"dtype": "f32"}, {"endian": "be"}, {"k_dim": 0}])
def test_another_encoding_is_refused(changes: dict[str, Any]) -> None:
    with pytest.raises(ValidationError):
        VectorEncoding.model_validate(encoding_of(12) | changes)


@pytest.mark.parametrize(
    "row",
    [
        StoredResult(1, "r", 7, value="AAAA"),
        StoredResult(2, "r", 8, distance=1.25),
        StoredResult(3, "r", 9, error="not finite"),
    ],
)
def test_a_row_survives_the_way_through_json(row: StoredResult) -> None:
    record = json.loads(json.dumps(result_record(row)))
    assert len(record) == 4
    assert result_of(record) == row


def test_half_a_surrogate_pair_is_no_text() -> None:
    with pytest.raises(ValidationError):
        TypeAdapter(UnicodeText).validate_python("\ud800")


class Circle(BaseModel):
    radius: int


class Square(BaseModel):
    side: int


def test_the_field_that_only_one_protocol_has_decides() -> None:
    discriminator = by_field("radius", "side")
    choose = discriminator.discriminator
    assert callable(choose)
    assert choose({"radius": 1}) == choose(Circle(radius=1)) == ARTIFACT
    assert choose({"side": 1}) == choose(Square(side=1)) != ARTIFACT
    for body in ({}, {"radius": 1, "side": 1}, [1], None):
        assert choose(body) is None


def test_problems_are_few_short_and_without_the_input() -> None:
    error = {"type": "x", "loc": ("body", ARTIFACT, "f" * 500), "msg": "m" * 500, "input": "secret"}
    shown = problems([error] * 500)
    assert len(shown) == 20
    assert shown[0] == {"type": "x", "loc": ["body", "f" * 200], "msg": "m" * 200}
