import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from proofserve.protocol.draws import (
    as_ordered,
    hash_keys,
    normal,
    seed_bits,
    uniform,
    unit_vectors,
)
from proofserve.protocol.errors import ProtocolError
from proofserve.protocol.network_schemes import (
    map_layer_output,
    normalise,
    normalise_reflect,
    pick,
    pick_by_score,
    reflect,
    rotate,
    sign_flips,
)

CPU = torch.device("cpu")
SEEDS = st.lists(st.integers(0, 2**32 - 1), min_size=1, max_size=5)
DIMS = st.integers(1, 60)


@given(SEEDS, DIMS)
def test_a_reflection_keeps_lengths_and_undoes_itself(seeds: list[int], dim: int) -> None:
    x, v = normal(seeds, dim, CPU), unit_vectors(seeds[::-1], dim, CPU)
    mirrored = reflect(x, v)
    torch.testing.assert_close(mirrored.norm(dim=1), x.norm(dim=1))
    torch.testing.assert_close(reflect(mirrored, v), x, rtol=0, atol=1e-5)
    torch.testing.assert_close(reflect(v, v), -v)


def test_a_reflection_takes_one_vector_for_all_tokens() -> None:
    x, v = normal([1, 2], 12, CPU).view(2, 3, 4), unit_vectors([3], 4, CPU)[0]
    assert torch.equal(reflect(x, v)[1, 2], reflect(x[1, 2], v))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_layer_transforms_stay_in_the_model_dtype(dtype: torch.dtype) -> None:
    x, v = normal([1], 16, CPU, dtype), unit_vectors([2], 16, CPU)[0].to(dtype)
    assert reflect(x, v).dtype == dtype
    assert normalise_reflect(x, v).dtype == dtype


def test_normalise_leaves_zeros_alone() -> None:
    assert normalise(torch.zeros(2, 5)).eq(0).all()


@given(SEEDS, DIMS)
def test_normalise_reflect_is_the_two_in_turn(seeds: list[int], dim: int) -> None:
    x, v = normal(seeds, dim, CPU), unit_vectors(seeds[:1], dim, CPU)[0]
    assert torch.equal(normalise_reflect(x, v), reflect(normalise(x), v))


@given(SEEDS, st.integers(1, 500))
def test_signs_are_those_of_the_uniform_around_one_half(seeds: list[int], dim: int) -> None:
    above = uniform(seeds, dim, CPU) > 0.5
    signs = sign_flips(seeds, dim, CPU)
    assert signs.dtype == torch.float32
    assert torch.equal(signs, torch.where(above, 1.0, -1.0))


def test_signs_at_the_bound() -> None:
    """Seeds whose first hash is the last that rounds to one half, and the next."""
    assert sign_flips([2335864586, 4204850996], 1, CPU).flatten().tolist() == [-1.0, 1.0]


@given(SEEDS, st.integers(1, 60), st.data())
def test_pick_takes_the_smallest_hashes(seeds: list[int], dim: int, data: st.DataObject) -> None:
    k = data.draw(st.integers(1, dim))
    hashes = as_ordered(hash_keys(seed_bits(seeds, CPU), torch.arange(dim, dtype=torch.int32)))
    by_score, cuda = pick_by_score(seeds, dim, k, CPU), pick(seeds, dim, k, CPU)
    for row, scores in enumerate(hashes.tolist()):
        smallest = sorted(range(dim), key=scores.__getitem__)[:k]
        assert by_score[row].tolist() == smallest
        assert cuda[row].tolist() == [*sorted(smallest[:-1]), smallest[-1]]


@pytest.mark.parametrize("k", [-1, 0, 9])
def test_pick_beyond_the_dimensions_is_refused(k: int) -> None:
    with pytest.raises(ProtocolError, match=r"^k_dim: "):
        pick([1], 8, k, CPU)


def test_rotate_is_one_reflection_after_the_other() -> None:
    x, steps = normal([1, 2], 4, CPU), unit_vectors(range(6), 4, CPU).view(2, 3, 4)
    expected = reflect(reflect(reflect(x, steps[:, 0]), steps[:, 1]), steps[:, 2])
    assert torch.equal(rotate(x, steps), expected)
    assert torch.equal(rotate(x, steps[:, :0]), x)


def test_layer_outputs_keep_their_form() -> None:
    hidden, residual, extra = torch.ones(2), torch.full((2,), 3.0), object()
    two = map_layer_output((hidden, residual), torch.neg)
    assert isinstance(two, tuple)
    assert [part.tolist() for part in two] == [[-1, -1], [-3, -3]]
    three = map_layer_output((hidden, residual, extra), torch.neg)
    assert isinstance(three, tuple)
    assert three[2] is extra
    one = map_layer_output((hidden,), torch.neg)
    assert isinstance(one, tuple)
    assert len(one) == 1
    bare = map_layer_output(hidden, torch.neg)
    assert isinstance(bare, torch.Tensor)
    assert bare.tolist() == [-1, -1]
