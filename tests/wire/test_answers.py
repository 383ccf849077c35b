"""What a node signs of an answer, and what a header in another form is."""

from dataclasses import replace

import pytest

from proofserve.protocol.errors import ProtocolError
from proofserve.protocol.receipts.record import SigningKey
from proofserve.wire.signed import answer_header, answer_with

KEY = SigningKey.new()
ABOUT = ("POST", "/api/v1/pow/generate?x=1", b'{"nonces": [1]}', b'{"artifacts": []}')


def test_an_answer_is_signed_with_what_was_asked_and_when() -> None:
    signed = answer_with(answer_header(KEY, *ABOUT), *ABOUT)
    assert signed.is_signed
    assert signed.public_key == KEY.public_key
    others = {
        "method": "GET",
        "target": "/api/v1/pow/generate",
        "request": b"",
        "body": b"{}",
        "time_ms": signed.time_ms + 1,
        "public_key": SigningKey.new().public_key,
    }
    for name, value in others.items():
        assert not replace(signed, **{name: value}).is_signed, name


def test_bytes_cannot_move_from_one_field_to_the_next() -> None:
    signed = answer_with(answer_header(KEY, "GET", "/a", b"bc", b"d"), "GET", "/a", b"bc", b"d")
    assert not replace(signed, target="/ab", request=b"c").is_signed
    assert not replace(signed, request=b"b", body=b"cd").is_signed


@pytest.mark.parametrize(
    "header", ["", "t=1, key=00, signature=AA==", "t=x, key=" + "0" * 64 + ", signature=", "a" * 99]
)
def test_a_header_in_another_form_is_named(header: str) -> None:
    with pytest.raises(ProtocolError, match="X-Proofserve-Answer is not t=, key=, signature="):
        answer_with(header, *ABOUT)
