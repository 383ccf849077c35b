"""Waiting for a condition, with a timeout."""

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from proofserve.lab.client.errors import TooSlowError
from proofserve.lab.client.node_client import NodeClient
from proofserve.lab.client.records import AnyWork

POLL_S = 0.1
FIRST_RESULT_S = 60.0


def wait_until(condition: Callable[[], bool], what: str, timeout_s: float) -> float:
    """Poll ``condition`` until it holds; return the seconds that this took.

    Raises:
        TooSlowError: it did not hold within ``timeout_s`` seconds. ``what`` names it in the text.
    """
    began = time.monotonic()
    while not condition():
        if time.monotonic() - began > timeout_s:
            raise TooSlowError(f"{what}: not within {timeout_s:g} s")
        time.sleep(POLL_S)
    return time.monotonic() - began


@contextmanager
def computing_round(node: NodeClient, work: AnyWork) -> Iterator[None]:
    """A round that has stored a result when the context begins, and that ends with it."""
    with node.round(work):
        wait_until(lambda: node.status().processed > 0, "first result of a round", FIRST_RESULT_S)
        yield
