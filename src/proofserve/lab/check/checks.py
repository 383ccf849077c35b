"""The result of one check of a node."""

from collections.abc import Callable
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Check:
    """``detail`` says what was measured. ``passed`` is None for a check that was skipped."""

    name: str
    passed: bool | None
    detail: str


# Gets each check as it is made. Generators would not do: an interrupted caller would leave a
# suspended generator behind that still holds a running server.
Reporter = Callable[[Check], None]
