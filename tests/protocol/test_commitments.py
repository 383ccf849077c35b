import pytest
from hypothesis import given
from hypothesis import strategies as st

from proofserve.protocol.commitments import leaf, opens, paths, root

LEAVES = [leaf(nonce, bytes([nonce])) for nonce in range(40)]


@pytest.mark.parametrize("count", range(1, 41))
def test_every_leaf_opens_at_its_own_place_only(count: int) -> None:
    leaves = LEAVES[:count]
    top = root(leaves)
    for index, path in enumerate(paths(leaves, range(count))):
        assert opens(top, count, index, leaves[index], path)
        wrong = [other for other in range(count) if opens(top, count, other, leaves[index], path)]
        assert wrong == [index]


@given(st.integers(1, 40), st.data())
def test_nothing_else_opens(count: int, data: st.DataObject) -> None:
    leaves = LEAVES[:count]
    index = data.draw(st.integers(0, count - 1))
    (path,), top = paths(leaves, [index]), root(leaves)
    other = leaf(index, b"another vector")
    assert not opens(top, count, index, other, path)
    assert not opens(top, count, index, leaves[index], (*path, leaves[0]))
    assert not opens(top, count, count, leaves[index], path)
    assert not opens(top, count, -1, leaves[index], path)
    if path:
        assert not opens(top, count, index, leaves[index], path[:-1])
        assert not opens(top, count, index, leaves[index], (*path[:-1], b"\0" * 32))


def test_an_inner_node_is_no_leaf() -> None:
    """The first byte differs: else a prover could pass off two hashes as a vector."""
    top = root(LEAVES[:4])
    left = root(LEAVES[:2])
    right = root(LEAVES[2:4])
    assert opens(top, 2, 0, left, (right,))
    assert leaf(int.from_bytes(LEAVES[0][:8], "little"), LEAVES[0][8:] + LEAVES[1]) != left


def test_a_root_needs_a_leaf() -> None:
    with pytest.raises(ValueError, match="at least one leaf"):
        root([])
