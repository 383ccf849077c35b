"""How fast a round stores results, measured through the API at little cost to the round."""

import time
from dataclasses import dataclass

from proofserve.lab.client.errors import LabError, TooSlowError
from proofserve.lab.client.node_client import NodeClient

# A poll takes milliseconds of a core from the engine: polls 20 ms apart slow a forward by some 5 %.
POLL_S = 0.05
TIMEOUT_S = 120.0


@dataclass(frozen=True, slots=True)
class Edge:
    """When (monotonic clock) the result ``seq`` was first seen, the last of its batch."""

    at: float
    seq: int


class StoredResults:
    """Follows the results of the round that runs on ``node``.

    A node stores results batch by batch. A window that begins and ends when a batch is stored holds
    whole batches only, so its rate has no error of up to one batch. This polls ``/results`` and not
    ``/status``, which answers only at the end of a forward.
    """

    def __init__(self, node: NodeClient, after: int) -> None:
        self._node = node
        self._seq = after

    def warm_up(self, batches: int) -> Edge:
        """Wait until ``batches`` are stored; return the edge of the last."""
        edge = self._next()
        for _ in range(batches - 1):
            edge = self._next()
        return edge

    def rate(self, since: Edge, seconds: float) -> float:
        while (remaining := since.at + seconds - time.monotonic()) > 0:
            time.sleep(remaining)
        self._seq = self._node.last_seq(self._seq)
        end = self._next()
        return (end.seq - since.seq) / (end.at - since.at)

    def _next(self) -> Edge:
        deadline = time.monotonic() + TIMEOUT_S
        while True:
            rows = self._node.results(self._seq)
            if rows:
                # A failed nonce is a result too, and would count as work done.
                for row in rows:
                    if row.error is not None:
                        raise LabError(f"nonce {row.nonce} of the round failed: {row.error}")
                self._seq = rows[-1].seq
                return Edge(time.monotonic(), self._seq)
            if time.monotonic() > deadline:
                raise TooSlowError(f"the round stored nothing for {TIMEOUT_S:g} s")
            time.sleep(POLL_S)
