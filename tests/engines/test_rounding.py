"""Every rounding against a plain slow formula, written out value by value, or known values."""

import math
from collections.abc import Callable, Sequence

import pytest
import torch
from torch import Tensor

from proofserve.engines.reference import rounding as r

# The positive numbers of fp8 e4m3 below its largest, 448: 4 bits of exponent, 3 of fraction.
FP8 = sorted(
    {(1 + m / 8) * 2.0 ** (e - 7) for e in range(1, 16) for m in range(8)}
    | {m * 2.0**-9 for m in range(8)}
)
FP8 = [value for value in FP8 if value <= 448]
FP4 = [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0]


def normals(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(3)).to(dtype)


def nearest(value: float, allowed: Sequence[float]) -> float:
    return math.copysign(min(allowed, key=lambda each: abs(abs(value) - each)), value)


def slow_integers(bits: int) -> Callable[[list[float]], list[float]]:
    def rounded(group: list[float]) -> list[float]:
        step = max(map(abs, group)) / (2 ** (bits - 1) - 1)
        return [round(value / step) * step for value in group]

    return rounded


def slow_shifted(bits: int) -> Callable[[list[float]], list[float]]:
    def rounded(group: list[float]) -> list[float]:
        low, high, most = min(0.0, *group), max(0.0, *group), 2**bits - 1
        step = (high - low) / most
        zero = round(-low / step)
        integers = [min(most, max(0, round(value / step + zero))) for value in group]
        return [(integer - zero) * step for integer in integers]

    return rounded


def slow_fp8(group: list[float]) -> list[float]:
    scale = max(map(abs, group)) / 448
    return [nearest(value / scale, FP8) * scale for value in group]


def slow_nf4(group: list[float]) -> list[float]:
    # Rounded to two digits these are the values of the paper's table.
    levels = [-1, -0.6962, -0.5251, -0.3949, -0.2844, -0.1848, -0.0911, 0]
    levels += [0.0796, 0.1609, 0.2461, 0.3379, 0.4407, 0.5626, 0.7230, 1]
    largest = max(map(abs, group))
    return [min(levels, key=lambda each: abs(value / largest - each)) * largest for value in group]


def slow_mxfp4(group: list[float]) -> list[float]:
    scale = 2.0 ** (math.floor(math.log2(max(map(abs, group)))) - 2)
    return [nearest(value / scale, FP4) * scale for value in group]


SLOW = {
    "int8": (r.integers(8), slow_integers(8), 1e-6),
    "int3": (r.integers(3), slow_integers(3), 1e-6),
    "shifted int4": (r.shifted_integers(4), slow_shifted(4), 1e-6),
    "fp8": (r.fp8, slow_fp8, 1e-6),
    # The slow table has four digits.
    "nf4": (r.nf4, slow_nf4, 1e-3),
    "mxfp4": (r.mxfp4, slow_mxfp4, 1e-6),
}


@pytest.mark.parametrize("name", SLOW)
@pytest.mark.parametrize("size", [1.0, 1e-3, 300.0])
def test_each_rounding_is_its_plain_formula(name: str, size: float) -> None:
    fast, slow, tolerance = SLOW[name]
    values = size * normals(40, 32)
    expected = torch.tensor([slow(row) for row in values.tolist()])
    off = (fast(values) - expected).abs() > tolerance * values.abs().amax(1, keepdim=True)
    # A value halfway between two numbers may fall to either in float32.
    assert off.sum() <= 2, values[off]


def test_three_bits_by_hand() -> None:
    # The largest magnitude, 6, is the integer 3: steps of 2.
    values = torch.tensor([[6.0, -5.1, 2.9, 0.9, -1.1, 0.0]])
    assert r.integers(3)(values).tolist() == [[6.0, -6.0, 2.0, 0.0, -2.0, 0.0]]


def test_nvfp4_has_fp8_scales_of_groups_and_one_of_the_matrix() -> None:
    values = normals(8, 48)
    whole = float(values.abs().max()) / (448 * 6)
    expected = values.clone()
    for row in range(8):
        for start in range(0, 48, 16):
            group = values[row, start : start + 16].tolist()
            scale = nearest(max(map(abs, group)) / 6 / whole, FP8) * whole
            made = [nearest(max(-6.0, min(6.0, value / scale)), FP4) * scale for value in group]
            expected[row, start : start + 16] = torch.tensor(made)
    assert ((r.nvfp4(values) - expected).abs() > 1e-5).sum() <= 2


def test_a_cache_has_no_scale() -> None:
    values = torch.tensor([0.3, -17.0, 500.0, -1e6, 0.0])
    assert r.fp8_unscaled(values).tolist() == [0.3125, -16.0, 448.0, -448.0, 0.0]


@pytest.mark.parametrize("length", [96, 101])
def test_a_group_has_a_scale_of_its_own(length: int) -> None:
    values = normals(4, length)
    values[:, :32] *= 100.0
    rounded = r.in_groups(r.integers(8), 32)(values)
    assert rounded.shape == values.shape
    parts = zip(values.split(32, 1), rounded.split(32, 1), strict=True)
    for before, after in parts:
        assert torch.allclose(after, r.integers(8)(before), atol=1e-6)


def test_a_matrix_has_one_scale() -> None:
    values = normals(2, 4, 24)
    values[0, 0, 0] = 50.0
    rounded = r.of_whole_matrix(r.integers(8))(values)
    for before, after in zip(values, rounded, strict=True):
        expected = r.integers(8)(before.reshape(1, -1)).view(4, 24)
        assert torch.allclose(after, expected, atol=1e-6)


def test_a_block_has_one_scale() -> None:
    values = normals(2, 20, 28)
    values[:, :16, :16] *= 40.0
    rounded = r.in_blocks(r.fp8, 16)(values)
    assert rounded.shape == values.shape
    for rows in (slice(0, 16), slice(16, 20)):
        for columns in (slice(0, 16), slice(16, 28)):
            block = values[1, rows, columns]
            expected = r.fp8(block.reshape(1, -1)).view(block.shape)
            assert torch.allclose(rounded[1, rows, columns], expected, atol=1e-6)


def test_chance_rounds_to_one_of_two_neighbours_and_is_right_on_average() -> None:
    values = normals(4, 32)
    step = values.abs().amax(1, keepdim=True) / 127
    generator = torch.Generator().manual_seed(0)
    made = torch.stack([r.stochastic(8, generator)(values) for _ in range(400)])
    assert ((made - values).abs() <= step * 1.001).all()
    assert torch.allclose(made / step, (made / step).round(), atol=1e-3)
    assert (made.std(dim=0) > 0).any()
    # The deviation of one rounding is at most half a step.
    assert ((made.mean(0) - values).abs() < 5 * 0.5 * step / math.sqrt(400)).all()
    assert ((made.mean(0) - values).abs().mean() < 0.03 * step.mean()).all()


@pytest.mark.parametrize("name", SLOW)
def test_zeros_stay(name: str) -> None:
    assert not SLOW[name][0](torch.zeros(2, 40)).any()
    assert not r.nvfp4(torch.zeros(2, 40)).any()


def test_redrawn_weights_share_nothing_but_mean_and_deviation() -> None:
    values = 3.0 + 0.5 * normals(200, 200)
    drawn = r.redrawn(values, torch.Generator().manual_seed(0))
    assert torch.equal(drawn, r.redrawn(values, torch.Generator().manual_seed(0)))
    assert abs(float(drawn.mean()) - 3.0) < 0.02
    assert abs(float(drawn.std()) - 0.5) < 0.02
    assert abs(float(torch.corrcoef(torch.stack([drawn.ravel(), values.ravel()]))[0, 1])) < 0.02


def test_rows_are_rounded_in_a_rotation_of_their_own() -> None:
    values = normals(40, 24)
    nothing = r.rotated(lambda turned: turned, 1)
    assert torch.allclose(nothing(values), values, atol=1e-5)
    ways = (r.integers(8), r.rotated(r.integers(8), 1), r.rotated(r.integers(8), 2))
    errors = [(way(values) - values).flatten() for way in ways]
    for first, second in ((0, 1), (0, 2), (1, 2)):
        assert abs(torch.cosine_similarity(errors[first], errors[second], dim=0)) < 0.15
    assert 0.5 < errors[1].norm() / errors[0].norm() < 2
