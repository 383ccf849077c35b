"""When ratios to the validator's own rounding are worth a test."""

from collections.abc import Sequence

import numpy as np
import pytest
from numpy.typing import NDArray

from proofserve.lab.calibrate.checkpoint_figures import HonestRun, checkpoint_figures
from proofserve.lab.client.progress import NoProgress
from proofserve.lab.verify.judges import Vectors

NONCES, WIDTH = range(300), 16
SENSITIVITY = 0.01 * np.exp(0.5 * np.random.default_rng(0).normal(size=300))


def rows(seed: int, lengths: NDArray[np.float64]) -> dict[int, NDArray[np.float32]]:
    """Vectors of these lengths in random directions."""
    drawn = np.random.default_rng(seed).normal(size=(len(lengths), WIDTH))
    made = lengths[:, np.newaxis] * drawn / np.linalg.norm(drawn, axis=1, keepdims=True)
    return dict(enumerate(made.astype(np.float32)))


TRUTH = {n: np.zeros(WIDTH, np.float32) for n in NONCES}


class Validator:
    """Has what is asked of it where no suspect is measured."""

    names = ()

    def __init__(self, rounds_as_deployed: bool = False) -> None:
        self.rounds_as_deployed = rounds_as_deployed
        self._own = rows(1, SENSITIVITY)

    def deployed(self, nonces: Sequence[int]) -> Vectors:
        return {nonce: self._own[nonce] for nonce in nonces}


def ratios(validator: Validator, spread: float, *, other_kernels: bool = True) -> object:
    kernel = np.exp(spread * np.random.default_rng(2).normal(size=300))
    honest = HonestRun(rows(3, 1.1 * SENSITIVITY * kernel), TRUTH, other_kernels)
    return checkpoint_figures(validator, honest, 0, NoProgress()).ratios  # type: ignore[arg-type]


def test_ratios_of_another_kernel_are_its_distances_over_our_own() -> None:
    found = ratios(Validator(), 0.1)
    assert isinstance(found, np.ndarray)
    assert np.exp(np.log(found).mean()) == pytest.approx(1.1, abs=0.03)
    assert np.log(found).std() == pytest.approx(0.1, abs=0.02)


def test_ratios_that_spread_as_distances_do_are_left_out() -> None:
    assert ratios(Validator(), 0.5) is None


def test_our_own_kernels_say_nothing_of_another_s() -> None:
    assert ratios(Validator(), 0.1, other_kernels=False) is None
    assert ratios(Validator(rounds_as_deployed=True), 0.1) is None
