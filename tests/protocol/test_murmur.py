from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.utils._python_dispatch import TorchDispatchMode

from proofserve.protocol.draws import as_float32, as_ordered, hash_keys, normal, seed_bits, uniform
from proofserve.protocol.network_schemes import pick, sign_flips

CPU = torch.device("cpu")
SEEDS = st.integers(0, 2**32 - 1)
KEYS = st.integers(-(2**31), 2**31 - 1)


def reference_hash(seed: int, key: int) -> int:
    """Protocol 0.3, word for word, in integers of any size."""

    def rotl(x: int, r: int) -> int:
        return (x << r | x >> (32 - r)) & 0xFFFFFFFF

    k = rotl((key & 0xFFFFFFFF) * 0xCC9E2D51 & 0xFFFFFFFF, 15) * 0x1B873593 & 0xFFFFFFFF
    h = (rotl(seed ^ k, 13) * 5 + 0xE6546B64) & 0xFFFFFFFF
    h = (h ^ h >> 16) * 0x85EBCA6B & 0xFFFFFFFF
    h = (h ^ h >> 13) * 0xC2B2AE35 & 0xFFFFFFFF
    return h ^ h >> 16


def unsigned(hashes: torch.Tensor) -> np.ndarray:
    return hashes.numpy().view(np.uint32)


@given(st.lists(SEEDS, min_size=1, max_size=5), st.lists(KEYS, min_size=1, max_size=40))
def test_hash_is_the_reference_for_every_pair(seeds: list[int], keys: list[int]) -> None:
    hashes = hash_keys(seed_bits(seeds, CPU), torch.tensor(keys, dtype=torch.int32))
    assert hashes.dtype == torch.int32
    assert unsigned(hashes).tolist() == [[reference_hash(s, k) for k in keys] for s in seeds]


def test_length_is_not_mixed_in() -> None:
    """The one known value that tells this hash from every library's murmur3 (protocol 0.3)."""
    key = torch.tensor([0x87654321 - 2**32], dtype=torch.int32)
    assert int(unsigned(hash_keys(seed_bits([0], CPU), key)).item()) == 0xCDC964B6


@given(SEEDS)
def test_hash_never_ties(seed: int) -> None:
    hashes = hash_keys(seed_bits([seed], CPU), torch.arange(5000, dtype=torch.int32))
    assert hashes.unique().numel() == 5000


def test_conversion_rounds_once_to_nearest_even() -> None:
    edges = [0, 1, 2**24, 2**24 + 1, 2**24 + 3, 0x7FFFFFFF, 0x80000000, 0x80000080, 0x80000081]
    edges += [0x80000180, 0x80000181, 0xFFFFFF7F, 0xFFFFFF80, 0xFFFFFFFF]
    drawn = np.random.default_rng(0).integers(0, 2**32, 100_000, dtype=np.uint32)
    values = np.concatenate((np.array(edges, dtype=np.uint32), drawn))
    converted = as_float32(torch.from_numpy(values.view(np.int32))).numpy()
    # From float64, which holds every uint32, there is only one rounding to make.
    assert np.array_equal(converted, values.astype(np.float64).astype(np.float32))


@given(st.lists(SEEDS, min_size=2, max_size=50))
def test_order_is_that_of_the_unsigned_values(values: list[int]) -> None:
    ordered = as_ordered(seed_bits(values, CPU))
    assert ordered.argsort(stable=True).tolist() == np.argsort(values, kind="stable").tolist()


@pytest.mark.parametrize("seed", [-1, 2**32])
def test_a_seed_beyond_32_bits_is_refused(seed: int) -> None:
    with pytest.raises(OverflowError):
        seed_bits([seed], CPU)


class WideTensors(TorchDispatchMode):
    """Records every operation whose result has 8-byte elements and at least ``size`` of them."""

    def __init__(self, size: int) -> None:
        super().__init__()
        self.size = size
        self.seen: list[str] = []
        self.operations = 0

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        self.operations += 1
        for out in result if isinstance(result, tuple) else (result,):
            wide = isinstance(out, torch.Tensor) and out.element_size() > 4
            if wide and out.numel() >= self.size:
                self.seen.append(f"{func} -> {out.dtype}")
        return result


N = 3000


@pytest.mark.parametrize(
    "draw",
    [
        lambda: hash_keys(seed_bits([1, 2], CPU), torch.arange(N, dtype=torch.int32)),
        lambda: uniform([1, 2], N, CPU),
        lambda: normal([1, 2], N, CPU),
        lambda: normal([1, 2], N, CPU, torch.bfloat16),
        lambda: sign_flips([1, 2], N, CPU),
        lambda: pick([1, 2], N, 12, CPU),
    ],
    ids=["hash", "uniform", "normal", "normal-bf16", "signs", "pick"],
)
def test_nothing_of_full_size_is_wider_than_four_bytes(draw: Any) -> None:
    with WideTensors(size=N // 2) as watch:
        draw()
    assert watch.operations > 10
    assert watch.seen == []


def test_the_watch_sees_wide_tensors() -> None:
    with WideTensors(size=N) as watch:
        torch.arange(N, dtype=torch.int32).to(torch.int64)
    assert len(watch.seen) == 1
