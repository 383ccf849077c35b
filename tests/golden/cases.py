"""The golden cases: where they lie, how they are read, and how their numbers are compared."""

import json
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import ArrayLike, NDArray

GOLDEN_DIR = Path(os.environ.get("GOLDEN_DIR") or Path(__file__).parent / "data")
DEVICE = torch.device(os.environ.get("GOLDEN_DEVICE", "cpu"))

# Share of the float16 numbers of one case that may be off by their last bit ("rare elements").
_RARE = 0.1


@dataclass(frozen=True)
class Case:
    """One case of one file; ``args`` and ``expect`` are as the file has them."""

    file: str
    id: str
    args: dict[str, Any]
    expect: dict[str, Any]

    def __str__(self) -> str:
        return f"{self.file}:{self.id}"


def load(folder: Path) -> list[Case]:
    """Every case of every file in ``folder``, in the order of their names."""
    cases = []
    for path in sorted(folder.glob("*.json")):
        for case in json.loads(path.read_text(encoding="utf-8"))["cases"]:
            cases.append(Case(path.name, case["id"], case["args"], case["expect"]))
    return cases


def tensor(values: Any, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """Nested lists, in which "nan", "inf" and "-inf" are strings, as a tensor on the device."""
    return torch.from_numpy(_array(values)).to(DEVICE, dtype)


def assert_close(actual: Any, expected: Any, tolerance: float) -> None:
    """Equal shapes, NaN where NaN is expected, and within ``tolerance`` everywhere else."""
    wanted = _array(expected)
    got = _array(actual)
    assert got.shape == wanted.shape
    np.testing.assert_allclose(got, wanted, rtol=0, atol=tolerance, equal_nan=True)


def assert_f16_close(actual: NDArray[np.float16], expected: ArrayLike) -> None:
    """Within one float16 step everywhere, and off by it on rare elements only."""
    steps = np.abs(_f16_rank(actual) - _f16_rank(np.asarray(expected, dtype="<f2")))
    assert steps.max(initial=0) <= 1
    assert np.count_nonzero(steps) <= max(1, _RARE * steps.size)


def bits(values: torch.Tensor) -> list[str]:
    """float32 as their bits in hexadecimal, most significant first."""
    return [f"{word:08x}" for word in values.cpu().numpy().view(np.uint32).tolist()]


def _array(values: Any) -> NDArray[np.float64]:
    if isinstance(values, torch.Tensor):
        values = values.to("cpu", torch.float64)
    return np.asarray(values, dtype=np.float64)


def _f16_rank(values: NDArray[np.float16]) -> NDArray[np.int32]:
    """Integers that are one apart exactly where float16 values are neighbours; both zeros are 0."""
    magnitude = (values.view(np.uint16) & 0x7FFF).astype(np.int32)
    return np.where(np.signbit(values), -magnitude, magnitude)
