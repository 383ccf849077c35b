"""Reading bearer keys."""

import pytest

from proofserve.web import bearer_key, digest, key_of


@pytest.mark.parametrize("scheme", [b"Bearer", b"bearer", b"BEARER", b"bEARER"])
def test_the_scheme_is_matched_without_regard_to_case(scheme: bytes) -> None:
    assert bearer_key([(b"authorization", scheme + b" key")]) == b"key"
    assert key_of(scheme + b" key") == b"key"


@pytest.mark.parametrize(
    "headers",
    [[], [b""], [b"Bearer"], [b"Bearer "], [b"key"], [b"Basic key"], [b"Bearer a", b"Bearer b"]],
)
def test_no_key_or_several_are_no_key(headers: list[bytes]) -> None:
    assert bearer_key([(b"authorization", value) for value in headers]) == b""


def test_a_key_is_read_in_the_bytes_that_came() -> None:
    headers = [(b"accept", b"*/*"), (b"authorization", b"bearer  k\xe9y ")]
    assert bearer_key(headers) == b"k\xe9y"


def test_digests_of_any_keys_are_equally_long() -> None:
    assert len(digest(b"")) == len(digest(b"k" * 500))
    assert digest(b"a") != digest(b"b")
