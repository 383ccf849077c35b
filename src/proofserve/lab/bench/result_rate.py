"""How fast a round stores results, seen from outside at little cost to it."""

import time
from collections.abc import Sequence
from dataclasses import dataclass

from proofserve.lab.client.errors import LabError, TooSlowError
from proofserve.lab.client.node_client import NodeClient
from proofserve.rounds.records import StoredResult

# Each look costs the API process a millisecond or two of a core that the engine could use.
LOOK_S = 0.02
PATIENCE_S = 120.0


@dataclass(frozen=True, slots=True)
class Edge:
    """The instant, on the monotonic clock, at which the result ``seq`` was first seen stored."""

    at: float
    seq: int


class StoredResults:
    """Follows the results of the round that runs on ``node``.

    Results are stored a batch at a time. A window that begins and ends where a batch was stored
    holds whole batches only, so its rate carries no error of a batch either way. Results are
    looked at rather than ``/status``, whose answer waits for the end of a forward.
    """

    def __init__(self, node: NodeClient, after: int) -> None:
        self._node = node
        self._seq = after

    def warm_up(self, batches: int) -> Edge:
        """Wait for ``batches`` to be stored; the edge of the last."""
        edge = self._next()
        for _ in range(batches - 1):
            edge = self._next()
        return edge

    def rate(self, since: Edge, seconds: float) -> float:
        """Results per second over a window of at least ``seconds`` that begins at ``since``."""
        while (remaining := since.at + seconds - time.monotonic()) > 0:
            time.sleep(remaining)
        self._seq = self._node.last_seq(self._seq)
        end = self._next()
        return (end.seq - since.seq) / (end.at - since.at)

    def _next(self) -> Edge:
        deadline = time.monotonic() + PATIENCE_S
        while True:
            rows = self._node.results(self._seq)
            if rows:
                _refuse_failures(rows)
                self._seq = rows[-1].seq
                return Edge(time.monotonic(), self._seq)
            if time.monotonic() > deadline:
                raise TooSlowError(f"the round stored nothing for {PATIENCE_S:g} s")
            time.sleep(LOOK_S)


def _refuse_failures(rows: Sequence[StoredResult]) -> None:
    """A nonce that failed is a result as well, and would be counted as work done."""
    for row in rows:
        if row.error is not None:
            raise LabError(f"nonce {row.nonce} of the measured round failed: {row.error}")
