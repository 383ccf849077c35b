"""A bounded history of one number, for a sparkline beside the number's usual value."""

from collections import deque
from statistics import median

from proofserve.dashboard.records import Trend

# Seconds between two values, and how many are kept: an hour of them.
STEP_S = 5.0
KEPT = 720
# The newest values, a minute of them, are what an operator compares with the usual value.
_NEWEST = 12
# Without so many older values there is no usual value.
_ENOUGH = 24
# Values between two computations of the usual value, which sorts the whole history.
_EVERY = 12
_DIGITS = 4


class History:
    """The newest values of one number, one for each step; None where nothing was measured."""

    def __init__(self, kept: int = KEPT) -> None:
        self._values: deque[float | None] = deque(maxlen=kept)
        self._added = 0
        self._baseline: float | None = None

    def add(self, value: float | None) -> None:
        self._values.append(None if value is None else rounded(value))
        self._added += 1
        if self._added % _EVERY == 0:
            older = [each for each in list(self._values)[:-_NEWEST] if each]
            self._baseline = rounded(median(older)) if len(older) >= _ENOUGH else None

    def trend(self, last: int = 60) -> Trend:
        """The ``last`` values. The baseline is the median before the newest minute, without 0."""
        skipped = max(0, len(self._values) - last)
        values = tuple(self._values)[skipped:]
        return Trend(step_s=STEP_S, values=values, baseline=self._baseline)


def rounded(value: float) -> float:
    """``value`` with four digits that count: a page with many histories stays small."""
    return float(f"{value:.{_DIGITS}g}")
