"""What a benchmark measured: named numbers, some with a limit that they must keep."""

import itertools
import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Limit:
    """A bound that a figure must reach, or with ``at_most`` must not exceed."""

    bound: float
    at_most: bool = False

    def holds(self, value: float) -> bool:
        """Whether ``value`` keeps the limit; NaN never does."""
        return value <= self.bound if self.at_most else value >= self.bound

    def __str__(self) -> str:
        return f"{'<=' if self.at_most else '>='} {self.bound:g}"


@dataclass(frozen=True, slots=True)
class Figure:
    """One number and what it means. ``value`` is None when nothing could be measured."""

    name: str
    value: float | None
    meaning: str
    limit: Limit | None = None

    @property
    def passed(self) -> bool | None:
        """Whether the limit holds; None without a limit, False if nothing was measured."""
        if self.limit is None:
            return None
        return self.value is not None and self.limit.holds(self.value)


def median(values: Sequence[float]) -> float | None:
    return statistics.median(values) if values else None


def quantile(values: Sequence[float], share: float) -> float | None:
    """The smallest of ``values`` that at least ``share`` (0 to 1) of them do not exceed."""
    if not values:
        return None
    return sorted(values)[max(0, math.ceil(share * len(values)) - 1)]


def ratios_to_neighbours(values: Sequence[float], reference: Sequence[float]) -> list[float]:
    """Each value over the mean of the references that were measured before and after it.

    Measured in turns (r v r v ... r), so that a machine that slows down evenly changes no ratio.
    """
    pairs = zip(values, itertools.pairwise(reference), strict=True)
    return [value / ((before + after) / 2) for value, (before, after) in pairs]
