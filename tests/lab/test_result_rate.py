from types import SimpleNamespace

import pytest

from proofserve.remote.node_client import NodeClient
from proofserve.reports import TooSlowError
from proofserve_lab.bench import generation as result_rate
from proofserve_lab.bench.generation import StoredResults
from support.stub_node import stub_node

EARLIER = 200
BATCH = 10
FIRST_AT_S = 0.3


class BatchNode:
    """A node that stores a batch each second, and the clock that it shares with its client.

    A real clock would make the measured rate depend on what else the machine does.
    """

    def __init__(self) -> None:
        self.now = 0.0

    def monotonic(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        self.now += seconds

    def last_seq(self, after: int = 0) -> int:
        batches = int(self.now - FIRST_AT_S + 1)
        return max(after, EARLIER + BATCH * batches)

    def results(self, after: int = 0) -> list[SimpleNamespace]:
        return [SimpleNamespace(seq=n + 1, error=None) for n in range(after, self.last_seq())]


@pytest.fixture
def node(monkeypatch: pytest.MonkeyPatch) -> BatchNode:
    node = BatchNode()
    monkeypatch.setattr(result_rate, "time", node)
    return node


@pytest.mark.parametrize("seconds", [4.5, 5.0, 5.5])
def test_a_window_holds_whole_batches(node: BatchNode, seconds: float) -> None:
    # Counting by the clock alone would be off by up to a batch, a fifth of this window.
    results = StoredResults(node, node.last_seq())  # type: ignore[arg-type]
    results.warm_up(2)
    rate = results.rate(seconds)
    assert rate == pytest.approx(BATCH, rel=result_rate.POLL_S / seconds)


def test_results_of_earlier_rounds_are_no_batch_of_this_one(node: BatchNode) -> None:
    results = StoredResults(node, node.last_seq())  # type: ignore[arg-type]
    results.warm_up(1)
    assert results.seq == EARLIER + BATCH
    assert results.at == pytest.approx(FIRST_AT_S, abs=result_rate.POLL_S)


def test_a_round_that_stores_nothing_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(result_rate, "TIMEOUT_S", 0.1)
    with (
        stub_node() as (_, url),
        NodeClient(url) as node,
        pytest.raises(TooSlowError, match="stored nothing"),
    ):
        StoredResults(node, 0).warm_up(1)
