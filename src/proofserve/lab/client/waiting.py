"""Waiting for something to become true on a node, with an end to it."""

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from proofserve.lab.client.errors import TooSlowError
from proofserve.lab.client.node_client import NodeClient
from proofserve.lab.client.records import AnyWork

POLL_S = 0.1
FIRST_RESULT_S = 60.0


def wait_until(condition: Callable[[], bool], what: str, timeout_s: float) -> float:
    """Ask ``condition`` until it holds; the seconds that took.

    Raises:
        TooSlowError: it did not within ``timeout_s`` seconds. ``what`` names it.
    """
    began = time.monotonic()
    while not condition():
        if time.monotonic() - began > timeout_s:
            raise TooSlowError(f"{what}: not within {timeout_s:g} s")
        time.sleep(POLL_S)
    return time.monotonic() - began


@contextmanager
def computing_round(node: NodeClient, work: AnyWork) -> Iterator[None]:
    """A round that has results when the context begins, and ends with it."""
    with node.round(work):
        wait_until(lambda: node.status().processed > 0, "first result of a round", FIRST_RESULT_S)
        yield
