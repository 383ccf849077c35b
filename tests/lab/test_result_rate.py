import pytest

from lab.stub_node import Habits, stub_node
from proofserve.lab.bench import result_rate
from proofserve.lab.bench.result_rate import StoredResults
from proofserve.lab.client.errors import TooSlowError
from proofserve.lab.client.node_client import NodeClient
from proofserve.lab.client.records import Work


def test_the_rate_of_a_round_that_stores_in_batches() -> None:
    # Ten at a time, every 0.1 s: counting by the clock alone would be off by a batch either way.
    with stub_node(Habits(round=100.0)) as (_, url), NodeClient(url) as node:
        results = StoredResults(node, node.last_seq())
        with node.round(Work("stub")):
            rate = results.rate(results.warm_up(2), 0.5)
    assert 60.0 < rate < 105.0


def test_earlier_rounds_are_not_counted() -> None:
    with stub_node(Habits(round=2000.0)) as (_, url), NodeClient(url) as node:
        for _ in range(2):
            results = StoredResults(node, node.last_seq())
            with node.round(Work("stub")):
                edge = results.warm_up(1)
                assert results.rate(edge, 0.2) < 2500


def test_a_round_that_stores_nothing_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(result_rate, "TIMEOUT_S", 0.1)
    with (
        stub_node() as (_, url),
        NodeClient(url) as node,
        pytest.raises(TooSlowError, match="stored nothing"),
    ):
        StoredResults(node, 0).warm_up(1)
