"""One promise of a node, and whether it was kept."""

from collections.abc import Callable
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Check:
    """``detail`` holds what was seen. ``passed`` is None for a check that could not be made."""

    name: str
    passed: bool | None
    detail: str


# Checks are told as they are made, and not yielded: a reader that is interrupted would leave a
# generator behind with a server in its hands.
Tell = Callable[[Check], None]
