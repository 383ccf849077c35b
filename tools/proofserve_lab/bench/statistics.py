"""Middles and quantiles of what was measured; None where nothing was."""

import math
import statistics
from collections.abc import Sequence


def median(values: Sequence[float]) -> float | None:
    return statistics.median(values) if values else None


def quantile(values: Sequence[float], share: float) -> float | None:
    """The smallest of ``values`` that at least ``share`` (0 to 1) of them do not exceed."""
    if not values:
        return None
    return sorted(values)[max(0, math.ceil(share * len(values)) - 1)]
