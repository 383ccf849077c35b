import numpy as np
import pytest

from proofserve.verifier.populations import widened

GROUPS = np.repeat(np.arange(200), 5)


def correlated(correlation: float, seed: int = 0) -> np.ndarray:
    draw = np.random.default_rng(seed)
    shared = np.repeat(draw.normal(size=200), 5)
    return np.sqrt(correlation) * shared + np.sqrt(1 - correlation) * draw.normal(size=1000)


@pytest.mark.parametrize("correlation", [0.0, 0.2, 0.6, 1.0])
def test_sums_of_a_group_spread_as_sums_of_wide_independent_values(correlation: float) -> None:
    values = correlated(correlation)
    of_sums = values.reshape(200, 5).sum(axis=1).std()
    wide = widened(values, GROUPS.tolist())
    assert wide.std() * np.sqrt(5) == pytest.approx(of_sums, rel=0.15)
    assert wide.mean() == pytest.approx(values.mean(), abs=1e-9)


def test_values_that_repel_each_other_are_not_narrowed() -> None:
    values = np.tile([1.0, -1.0, 0.5, -0.5, 0.0], 200)
    assert np.array_equal(widened(values, GROUPS.tolist()), values)


@pytest.mark.parametrize("groups", [[0] * 4, [0, 1, 2, 3]])
def test_one_group_or_one_value_each_says_nothing_of_likeness(groups: list[int]) -> None:
    values = np.array([1.0, 2.0, 3.0, 4.0])
    assert np.array_equal(widened(values, groups), values)


def test_groups_may_be_of_different_sizes() -> None:
    draw = np.random.default_rng(1)
    sizes = draw.integers(1, 9, size=300)
    groups = np.repeat(np.arange(300), sizes)
    values = draw.normal(size=300)[groups]
    # Equal values of a group: the largest groups count as one value each.
    assert widened(values, groups.tolist()).std() == pytest.approx(
        values.std() * np.sqrt(sizes.max()), rel=0.05
    )
