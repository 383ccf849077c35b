"""A server that can be started more than once, for checks that restart it."""

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager

from proofserve.remote.node_client import NodeClient
from support.stub_node import Habits, stub_node


class Servers:
    """Starts a stub for each entering, and counts them."""

    def __init__(self, habits: Habits) -> None:
        self.starts = 0
        self._habits = habits

    def __call__(self) -> AbstractContextManager[NodeClient]:
        return self._running()

    @contextmanager
    def _running(self) -> Iterator[NodeClient]:
        self.starts += 1
        with stub_node(self._habits) as (_, url), NodeClient(url) as node:
            yield node
