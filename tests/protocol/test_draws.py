from collections.abc import Callable

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from proofserve.protocol import draws
from proofserve.protocol.draws import fill_normal, normal, uniform, unit_vectors
from proofserve.protocol.errors import ProtocolError

CPU = torch.device("cpu")
SEEDS = st.lists(st.integers(0, 2**32 - 1), min_size=1, max_size=9)
DTYPES = st.sampled_from([torch.float32, torch.float16, torch.bfloat16])


def reference_normal(seed: int, n: int) -> np.ndarray:
    """Protocol 0.5 with double-precision functions of the same float32 arguments."""
    pairs = (n + 1) // 2
    u = uniform([seed], 2 * pairs, CPU)[0].numpy()
    u1 = np.maximum(u[:pairs], np.float32(1e-10)).astype(np.float64)
    angle = (np.float32(2 * np.pi) * u[pairs:]).astype(np.float64)
    radius = np.sqrt(-2 * np.log(u1))
    return np.concatenate((radius * np.cos(angle), radius * np.sin(angle)))[:n]


@given(SEEDS, st.integers(0, 300))
def test_uniform_rows_do_not_depend_on_the_batch(seeds: list[int], n: int) -> None:
    batch = uniform(seeds, n, CPU)
    assert batch.shape == (len(seeds), n)
    assert ((batch >= 0) & (batch <= 1)).all()
    for row, seed in zip(batch, seeds, strict=True):
        assert torch.equal(row, uniform([seed], n, CPU)[0])


@given(SEEDS, st.integers(0, 300), DTYPES)
def test_normal_rows_do_not_depend_on_the_batch(
    seeds: list[int], n: int, dtype: torch.dtype
) -> None:
    batch = normal(seeds, n, CPU, dtype)
    assert batch.shape == (len(seeds), n)
    for row, seed in zip(batch, seeds, strict=True):
        assert torch.equal(row, normal([seed], n, CPU, dtype)[0])


@given(SEEDS, st.integers(1, 300), st.integers(1, 64))
def test_draws_do_not_depend_on_the_tiles(seeds: list[int], n: int, tile: int) -> None:
    expected = uniform(seeds, n, CPU), normal(seeds, n, CPU)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(draws, "_CPU_TILE", tile)
        assert torch.equal(uniform(seeds, n, CPU), expected[0])
        assert torch.equal(normal(seeds, n, CPU), expected[1])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_row_of_many_tiles_is_a_row_of_one(
    dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    n = 100_003
    expected = normal([5, 6], n, CPU, dtype)
    for tile in (2**10, 2**15 + 1, 2**24):
        monkeypatch.setattr(draws, "_CPU_TILE", tile)
        assert torch.equal(normal([6], n, CPU, dtype)[0], expected[1])


@given(st.integers(0, 2**32 - 1), st.integers(1, 2000))
def test_normal_is_box_muller(seed: int, n: int) -> None:
    drawn = normal([seed], n, CPU)[0].numpy()
    np.testing.assert_allclose(drawn, reference_normal(seed, n), rtol=0, atol=2e-6)


@given(SEEDS, st.integers(1, 101), DTYPES)
def test_other_dtypes_are_one_rounding_of_float32(
    seeds: list[int], n: int, dtype: torch.dtype
) -> None:
    assert torch.equal(normal(seeds, n, CPU, dtype), normal(seeds, n, CPU).to(dtype))


@given(SEEDS, st.integers(1, 50))
def test_fill_touches_its_own_columns_only(seeds: list[int], n: int) -> None:
    canvas = torch.full((len(seeds), n + 4), 9.0)
    fill_normal(canvas[:, 2:-2], seeds)
    assert torch.equal(canvas[:, 2:-2], normal(seeds, n, CPU))
    assert canvas[:, :2].eq(9).all()
    assert canvas[:, -2:].eq(9).all()


def test_extremes_of_the_uniform() -> None:
    """Seeds whose first hash is 0, the least that rounds to 1, and the greatest that does not."""
    assert uniform([2271226130], 1, CPU).item() == 0.0
    assert uniform([1520976789], 1, CPU).item() == 1.0
    assert uniform([3444677179], 1, CPU).item() == 1.0 - 2**-24
    assert normal([4003389761], 4, CPU)[0, 0].item() == 0.0
    assert normal([2271226130], 4, CPU).isfinite().all()


def test_moments_of_the_normal() -> None:
    values = normal([1, 2, 3], 200_000, CPU).double()
    assert abs(values.mean().item()) < 0.01
    assert abs(values.var().item() - 1) < 0.01
    assert values.abs().max().item() <= 6.7861


@pytest.mark.parametrize("draw", [uniform, normal])
def test_keys_beyond_int32_are_refused(draw: Callable[..., torch.Tensor]) -> None:
    # On the meta device nothing is allocated.
    with pytest.raises(ProtocolError, match=r"^n: "):
        draw([1], 2**31 + 2, torch.device("meta"))


@given(SEEDS, st.integers(1, 200))
def test_unit_vectors_have_length_one_whatever_the_batch(seeds: list[int], dim: int) -> None:
    vectors = unit_vectors(seeds, dim, CPU)
    assert torch.allclose(vectors.norm(dim=1), torch.ones(len(seeds)), atol=1e-6)
    for row, seed in zip(vectors, seeds, strict=True):
        assert torch.equal(row, unit_vectors([seed], dim, CPU)[0])


def test_unit_vectors_of_one_dimension_are_signs() -> None:
    assert unit_vectors(range(50), 1, CPU).abs().eq(1).all()


def test_no_seeds_no_rows() -> None:
    assert normal([], 5, CPU).shape == (0, 5)
    assert unit_vectors([], 5, CPU).shape == (0, 5)
