"""A clock and a backend that the unit tests of the gateway share."""

from typing import Any, cast

from proofserve.gateway.backends import Backend
from proofserve.gateway.connections import ConnectionPool, WriteBatch
from proofserve.gateway.records import BackendSpec


class Clock:
    """A clock that a test moves."""

    def __init__(self, now: float = 1000.0) -> None:
        self.now = now

    def __call__(self) -> float:
        return self.now


def backend(name: str = "a", weight: float = 1.0, clock: Clock | None = None) -> Backend:
    """A backend without a connection."""
    url = f"http://{name}"
    no_loop = cast("Any", None)
    pool = ConnectionPool(url, 1.0, no_loop, WriteBatch(no_loop))
    return Backend(BackendSpec(url, weight), pool, clock or Clock())
