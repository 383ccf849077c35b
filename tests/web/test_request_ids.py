"""Request ids."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from proofserve.web import request_id_of


def test_a_request_without_an_id_gets_one_of_its_own() -> None:
    made = [request_id_of(None) for _ in range(100)]
    assert len(set(made)) == 100
    assert all(len(bytes.fromhex(each.decode())) == 16 for each in made)
    # No part of it can be known from another one.
    assert len({each[:8] for each in made}) > 90
    assert len({each[-8:] for each in made}) > 90


@pytest.mark.parametrize("given", [b"abc-123", b"a" * 128, b"trace:00-4bf9/1+2=.x_y"])
def test_an_id_that_is_fit_for_a_log_is_kept(given: bytes) -> None:
    assert request_id_of(given) == given


@pytest.mark.parametrize(
    "given",
    [
        b"",
        b"a" * 129,
        b"a b",
        b"a\r\nset-cookie: x",
        b"a\n",
        b"a\x00",
        b'a"b',
        b"\x1b[31mred",
        b"<script>",
        "ä".encode(),
    ],
)
def test_an_id_that_might_do_harm_is_replaced(given: bytes) -> None:
    made = request_id_of(given)
    assert made != given
    assert request_id_of(made) == made


@given(st.binary(max_size=200))
def test_every_id_is_one_line_of_visible_letters(given: bytes) -> None:
    made = request_id_of(given)
    assert made.isascii()
    assert made.decode().isprintable()
    assert b" " not in made
