"""When callbacks are cut, tried, tried again and given up."""

from dataclasses import dataclass

# Far beyond the longest pause already; keeps the power of two a float for ever.
_LAST_DOUBLING = 32


@dataclass(frozen=True, slots=True)
class CallbackPolicy:
    """The sender's numbers. Times in seconds.

    A round's first delivery is cut ``interval_s`` after its first result and at most one each
    ``interval_s`` from then on, of at most ``max_artifacts``. A delivery that failed
    ``max_retries`` times expires; 0 keeps trying for ever. ``timeout_s`` is what a target has to
    answer. The pause after a failure doubles from ``backoff_first_s`` to ``backoff_longest_s``.
    Every ``look_again_s`` at the latest the file is read anew: another process may have made
    something due.

    Raises ValueError for a number outside its range.
    """

    interval_s: float = 5.0
    max_artifacts: int = 1_000_000
    max_retries: int = 10
    max_concurrent: int = 10
    timeout_s: float = 10.0
    backoff_first_s: float = 1.0
    backoff_longest_s: float = 30.0
    look_again_s: float = 5.0

    def __post_init__(self) -> None:
        for field in ("interval_s", "max_retries"):
            if getattr(self, field) < 0:
                raise ValueError(f"{field} is negative")
        for field in ("timeout_s", "backoff_first_s", "backoff_longest_s", "look_again_s"):
            if not getattr(self, field) > 0:
                raise ValueError(f"{field} is not above 0")
        for field in ("max_artifacts", "max_concurrent"):
            if getattr(self, field) < 1:
                raise ValueError(f"{field} is below 1")

    def pause_s(self, failures: int) -> float:
        """The pause after failure number ``failures`` = 1, 2, ... in a row."""
        doublings = min(failures - 1, _LAST_DOUBLING)
        return min(self.backoff_first_s * 2.0**doublings, self.backoff_longest_s)

    def expires(self, failures: int) -> bool:
        """Whether a delivery that failed ``failures`` times is given up."""
        return 0 < self.max_retries <= failures
