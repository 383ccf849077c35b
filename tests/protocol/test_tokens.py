from collections.abc import Collection

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from proofserve.protocol.errors import ProtocolError
from proofserve.protocol.scheme import AllowedTokens, allowed_tokens


@given(st.sets(st.integers(0, 300), min_size=2))
def test_a_place_is_the_index_in_rising_order(ids: Collection[int]) -> None:
    allowed = allowed_tokens(ids)
    assert len(allowed) == len(ids)
    assert allowed.ids(np.arange(len(ids))).tolist() == sorted(ids)


def test_neighbours_make_one_range() -> None:
    assert allowed_tokens([7, 5, 6, 9, 1]).ranges == ((1, 2), (5, 8), (9, 10))


def test_places_keep_their_shape() -> None:
    allowed = AllowedTokens(((3, 5), (9, 10)))
    assert allowed.ids(np.array([[0, 2], [1, 1]])).tolist() == [[3, 9], [4, 4]]


@pytest.mark.parametrize("ids", [[], [4]])
def test_a_twin_needs_another_token(ids: list[int]) -> None:
    with pytest.raises(ProtocolError, match="tokenizer"):
        allowed_tokens(ids)
