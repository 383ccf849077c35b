import pytest
import torch

from proofserve.engines.reference.precision import GROUP, redrawn, to_bits, to_fp8


def normals(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(3)).to(dtype)


def test_three_bits_by_hand() -> None:
    # The largest magnitude, 6, is the integer 3: steps of 2.
    weight = torch.tensor([[6.0, -5.1, 2.9, 0.9, -1.1, 0.0]])
    assert to_bits(weight, 3).tolist() == [[6.0, -6.0, 2.0, 0.0, -2.0, 0.0]]


@pytest.mark.parametrize("bits", [8, 6, 4])
@pytest.mark.parametrize("length", [3 * GROUP, 3 * GROUP + 5])
def test_a_group_has_a_scale_of_its_own(bits: int, length: int) -> None:
    weight = normals(4, length)
    weight[:, :GROUP] *= 100.0
    rounded = to_bits(weight, bits)
    assert rounded.shape == weight.shape
    for before, after in zip(weight.split(GROUP, 1), rounded.split(GROUP, 1), strict=True):
        step = before.abs().amax(1, keepdim=True) / (2 ** (bits - 1) - 1)
        assert ((before - after).abs() <= 0.5001 * step).all()
        assert torch.allclose(after / step, (after / step).round(), atol=1e-3)
        assert ((before - after).abs() > 0).any()


@pytest.mark.parametrize("change", [lambda w: to_bits(w, 4), to_fp8])
def test_zeros_stay_and_so_does_the_kind(change: object) -> None:
    assert callable(change)
    rounded = change(torch.zeros(2, 40, dtype=torch.bfloat16))
    assert rounded.dtype == torch.bfloat16
    assert not rounded.any()
    experts = change(normals(2, 3, 40))
    assert torch.equal(experts[1], change(normals(2, 3, 40)[1]))


def test_one_bit_holds_no_sign() -> None:
    with pytest.raises(ValueError, match="1 bits hold no signed integer"):
        to_bits(normals(2, 2), 1)


def test_fp8_keeps_four_significant_bits_of_each_row() -> None:
    weight = normals(8, 64) * torch.logspace(-3, 3, 8)[:, None]
    error = ((to_fp8(weight) - weight).abs() / weight.abs().clamp_min(1e-30))[weight.abs() > 0]
    large = (weight.abs() > 0.01 * weight.abs().amax(1, keepdim=True))[weight.abs() > 0]
    # Three bits after the point and the implied one: half a step is a sixteenth.
    assert 1 / 64 < error[large].max() <= 1 / 16


def test_redrawn_weights_share_nothing_but_mean_and_deviation() -> None:
    weight = 3.0 + 0.5 * normals(200, 200)
    drawn = redrawn(weight, torch.Generator().manual_seed(0))
    assert torch.equal(drawn, redrawn(weight, torch.Generator().manual_seed(0)))
    assert abs(float(drawn.mean()) - 3.0) < 0.02
    assert abs(float(drawn.std()) - 0.5) < 0.02
    assert abs(float(torch.corrcoef(torch.stack([drawn.ravel(), weight.ravel()]))[0, 1])) < 0.02
