"""Figures of several blocks of one conversation, which are more alike than those of others."""

import math
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]


def widened(values: Floats, groups: Sequence[int]) -> Floats:
    """``values`` [n] as far from their mean as sums over groups need: float64 [n].

    Tests multiply the evidence of values as if they were independent. A sum of m values of a group
    that correlate by r has 1 + (m - 1) r times the variance of independent ones (L. Kish, Survey
    Sampling, 1965, section 5.4), so each deviation grows by the square root of it. r is that of a
    one-way analysis of variance; values that repel each other stay as they are.
    """
    numbers = np.unique(np.array(groups), return_inverse=True)[1]
    sizes = np.bincount(numbers).astype(np.float64)
    count, of_groups = len(values), len(sizes)
    if of_groups < 2 or count == of_groups or np.ptp(values) == 0.0:
        return values
    means = np.bincount(numbers, weights=values) / sizes
    overall = float(values.mean())
    between = float((sizes * (means - overall) ** 2).sum()) / (of_groups - 1)
    within = float(((values - means[numbers]) ** 2).sum()) / (count - of_groups)
    # The size that unequal groups count for.
    size = (count - float((sizes**2).sum()) / count) / (of_groups - 1)
    correlation = (between - within) / (between + (size - 1.0) * within)
    largest = float(sizes.max())
    factor = math.sqrt(max(1.0, 1.0 + (largest - 1.0) * correlation))
    made: Floats = overall + factor * (values - overall)
    return made
