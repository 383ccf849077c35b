from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from proofserve.protocol.errors import ProtocolError
from proofserve.protocol.nonces import MAX_NONCE, NonceLane, check_nonces, draw, fresh_seed, pad


@given(st.integers(1, 6), st.integers(1, 5), st.integers(0, 12))
def test_lanes_are_disjoint_and_complete(node_count: int, n_groups: int, rounds: int) -> None:
    drawn = [
        nonce
        for node_id in range(node_count)
        for group_id in range(n_groups)
        for nonce in NonceLane(node_id, node_count, group_id, n_groups).batch(0, rounds)
    ]
    assert sorted(drawn) == list(range(node_count * n_groups * rounds))


@given(*[st.integers(1, 4)] * 3, st.data())
def test_a_part_of_a_lane_has_only_nonces_of_it(
    node_count: int, n_groups: int, parts: int, data: st.DataObject
) -> None:
    node_id, group_id, part, other = (
        data.draw(st.integers(0, most - 1)) for most in (node_count, n_groups, parts, n_groups)
    )
    lane = NonceLane(node_id, node_count, group_id, n_groups)
    divided = NonceLane(node_id, node_count, other + n_groups * part, n_groups * parts)
    nonces = set(lane.batch(0, 40 * parts))
    assert divided.is_part_of(lane) is (set(divided.batch(0, 20)) <= nonces)
    assert not NonceLane(node_id, node_count + 1, group_id, n_groups).is_part_of(lane)
    assert not replace(lane, n_groups=n_groups * parts + 1).is_part_of(lane) or n_groups == 1


@given(st.integers(0, 10**6), st.integers(0, 40), st.integers(0, 40))
def test_batches_join_without_a_seam(start: int, first: int, second: int) -> None:
    lane = NonceLane(2, 5, 1, 3)
    joined = lane.batch(start, first) + lane.batch(start + first, second)
    assert joined == lane.batch(start, first + second)
    assert joined == tuple(lane.nonce(start + x) for x in range(first + second))


@pytest.mark.parametrize(
    ("field", "share"),
    [
        ("node_count", {"node_id": 0, "node_count": 0}),
        ("node_id", {"node_id": 3, "node_count": 3}),
        ("node_id", {"node_id": -1, "node_count": 3}),
        ("n_groups", {"node_id": 0, "node_count": 1, "n_groups": 0}),
        ("group_id", {"node_id": 0, "node_count": 1, "group_id": 2, "n_groups": 2}),
        ("group_id", {"node_id": 0, "node_count": 1, "group_id": -1}),
    ],
)
def test_a_share_out_of_range_is_named(field: str, share: dict[str, int]) -> None:
    with pytest.raises(ProtocolError) as caught:
        NonceLane(**share)
    assert caught.value.field == field


def test_a_lane_ends_with_the_largest_nonce() -> None:
    lane = NonceLane(0, 1)
    assert lane.batch(MAX_NONCE - 1, 2) == (MAX_NONCE - 1, MAX_NONCE)
    assert lane.batch(MAX_NONCE + 1, 0) == ()
    with pytest.raises(ProtocolError, match=r"^start: "):
        lane.batch(MAX_NONCE, 2)


def test_a_batch_counts_forward() -> None:
    with pytest.raises(ProtocolError, match=r"^start: "):
        NonceLane(0, 1).batch(-1, 2)
    with pytest.raises(ProtocolError, match=r"^size: "):
        NonceLane(0, 1).batch(0, -2)


def test_proper_nonces_pass() -> None:
    check_nonces("nonces", [0, MAX_NONCE, 5])
    check_nonces("nonces", [])


@pytest.mark.parametrize("nonces", [[-1], [MAX_NONCE + 1], [1, 2, 1]])
def test_improper_nonces_name_the_field(nonces: list[int]) -> None:
    with pytest.raises(ProtocolError, match=r"^sample: "):
        check_nonces("sample", nonces)
    with pytest.raises(ProtocolError, match=r"^nonces: "):
        pad(nonces, 8)


@given(st.lists(st.integers(0, MAX_NONCE), unique=True, max_size=12), st.integers(0, 12))
def test_padding_adds_distinct_dummies_at_the_end(nonces: list[int], size: int) -> None:
    padded = pad(nonces, size)
    assert len(padded) == max(size, len(nonces))
    assert list(padded[: len(nonces)]) == nonces
    assert padded[len(nonces) :] == tuple(-1 - i for i in range(len(padded) - len(nonces)))


def test_a_seed_draws_the_same_sample_again_and_another_seed_another() -> None:
    seeds = [fresh_seed() for _ in range(3)]
    assert len(set(seeds)) == 3
    first, other, third = (draw(range(1000), seed, 50) for seed in seeds)
    assert draw(range(1000), seeds[0], 50) == first
    assert len({first, other, third}) == 3
