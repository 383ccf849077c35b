from dataclasses import replace
from typing import Any

import pytest

from proofserve.wire.callbacks import Envelope

ENVELOPE = Envelope("generated", "k3y", 7, 1_700_000_000)


def test_the_signature_is_one_that_others_can_make() -> None:
    # printf 'v1\n1700000000\ngenerated\nk3y\n7\n{}' | openssl dgst -sha256 -hmac secret
    assert ENVELOPE.sign(b"secret", b"{}") == (
        "v1=5671ec6dcad4f10649a53b339ca8f462b166b8926a843c81c818b73fc2f8512e"
    )


def test_it_matches_itself() -> None:
    assert ENVELOPE.matches(b"secret", b"{}", ENVELOPE.sign(b"secret", b"{}"))


@pytest.mark.parametrize(
    "change",
    [{"endpoint": "validated"}, {"key": "k3z"}, {"sequence": 8}, {"timestamp": 1_700_000_001}],
)
def test_everything_in_the_envelope_counts(change: dict[str, Any]) -> None:
    signature = ENVELOPE.sign(b"secret", b"{}")
    assert not replace(ENVELOPE, **change).matches(b"secret", b"{}", signature)


def test_secret_and_body_count() -> None:
    signature = ENVELOPE.sign(b"secret", b"{}")
    assert not ENVELOPE.matches(b"secreT", b"{}", signature)
    assert not ENVELOPE.matches(b"secret", b"{ }", signature)


@pytest.mark.parametrize("signature", ["", "v1=", "v2=00", "\xff", "v1=" + "0" * 64])
def test_what_is_no_signature_does_not_match(signature: str) -> None:
    assert not ENVELOPE.matches(b"secret", b"{}", signature)
