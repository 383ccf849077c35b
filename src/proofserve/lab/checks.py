"""One promise of a node, and whether it was kept."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Check:
    """``detail`` holds what was seen. ``passed`` is None for a check that could not be made."""

    name: str
    passed: bool | None
    detail: str
