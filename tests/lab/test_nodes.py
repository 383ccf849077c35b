import numpy as np
import pytest

from proofserve.protocol.codec import encode
from proofserve.protocol.verdict.comparison import Claim
from proofserve.remote.node_client import NodeClient
from proofserve.remote.records import DistanceWork, Work, vectors_of
from proofserve.reports import NodeError
from proofserve_lab.nodes import (
    NodeStatus,
    bare_speed,
    computing_round,
    distances,
    gauges_of,
    last_seq,
    tampered,
    validated,
)
from proofserve_lab.orders import work_of_scheme
from support.stub_node import Habits, stub_node

WORK = Work("stub")


def test_a_node_that_never_had_a_round_has_counted_nothing() -> None:
    status = NodeStatus.read({"status": "IDLE", "config": None, "stats": None, "engine": None})
    assert (status.state, status.processed, status.found) == ("IDLE", 0, 0)
    assert status.engine is None


def test_what_a_newer_node_shows_besides_is_ignored() -> None:
    with stub_node(Habits(gauges={"temperature": 41})) as (_, url), NodeClient(url) as node:
        assert gauges_of(node).resume_ms == (7.0, 8.0, 9.0)


@pytest.mark.parametrize(("old_looks", "age_s"), [(3, 0.0), (10**9, 0.7)])
def test_old_counters_are_taken_if_a_few_looks_find_no_new_ones(
    old_looks: int, age_s: float
) -> None:
    habits = Habits(looks_with_old_gauges=old_looks)
    with stub_node(habits) as (_, url), NodeClient(url) as node:
        assert gauges_of(node).age_s == age_s


def test_a_busy_engine_is_asked_again_and_a_dead_one_is_an_error() -> None:
    with stub_node(Habits(looks_without_gauges=3)) as (_, url), NodeClient(url) as node:
        assert gauges_of(node).resume_ms == (7.0, 8.0, 9.0)
    dead = Habits(looks_without_gauges=10**9)
    with (
        stub_node(dead) as (_, url),
        NodeClient(url) as node,
        pytest.raises(NodeError, match="is its engine alive"),
    ):
        gauges_of(node)


def test_a_round_ends_with_its_context_whatever_happens() -> None:
    def interrupted(node: NodeClient) -> None:
        with computing_round(node, WORK):
            raise KeyError

    with stub_node() as (stub, url), NodeClient(url) as node:
        with pytest.raises(KeyError):
            interrupted(node)
        assert stub.state == "STOPPED"


def test_results_are_read_to_the_end() -> None:
    with stub_node() as (stub, url), NodeClient(url) as node:
        assert last_seq(node) == 0
        with computing_round(node, WORK):
            pass
        assert last_seq(node) == len(stub.rows)
        assert [row.nonce for row in node.results(after=5, limit=3)] == [5, 6, 7]


def test_a_verdict_comes_back_whole() -> None:
    with stub_node() as (_, url), NodeClient(url) as node:
        claims = node.artifacts(WORK, range(4))
        assert not validated(node, WORK, claims).fraud_detected
        verdict = validated(node, Work("stub", public_key="other"), claims)
    assert verdict.fraud_detected
    assert verdict.mismatch_nonces == (0, 1, 2, 3)
    assert (verdict.n_total, verdict.n_mismatch, verdict.p_value) == (4, 4, 0.0)


def test_the_bare_speed_is_asked_for_the_same_work() -> None:
    with stub_node() as (stub, url), NodeClient(url) as node:
        speed = bare_speed(node, WORK, 7)
    assert (speed.nonces_per_second, speed.sequences) == (1000.0, 8)
    (order,) = stub.measured
    assert order["forwards"] == 7
    assert order["params"] == WORK.params
    assert "seq_len" not in order


def test_the_bare_speed_is_that_of_the_orders_scheme() -> None:
    with stub_node() as (stub, url), NodeClient(url) as node:
        bare_speed(node, work_of_scheme("sketch-v1", "stub", 256), 7)
    (order,) = stub.measured
    assert order["scheme"] == "sketch-v1"
    assert order["params"] == {"model": "stub", "seq_len": 256, "k_dim": 64}


def test_the_bare_speed_of_distances_is_asked_for_by_their_length() -> None:
    with stub_node() as (stub, url), NodeClient(url) as node:
        bare_speed(node, DistanceWork("stub", seq_len=64), 7)
    (order,) = stub.measured
    assert order["seq_len"] == 64
    assert "params" not in order


@pytest.fixture
def claims() -> list[Claim]:
    rows = np.random.default_rng(1).normal(size=(16, 12))
    rows /= np.linalg.norm(rows, axis=1, keepdims=True)
    return [Claim(n, text) for n, text in enumerate(encode(rows.astype(np.float32)))]


def test_a_forgery_differs_where_it_should_and_nowhere_else(claims: list[Claim]) -> None:
    forged = tampered(claims, 12, every=4)
    changed = [a.nonce for a, b in zip(claims, forged, strict=True) if a != b]
    assert changed == [0, 4, 8, 12]


def test_a_forged_vector_still_looks_like_one(claims: list[Claim]) -> None:
    for vector in vectors_of(tampered(claims, 12, every=1), 12).values():
        assert float(np.linalg.norm(vector)) == pytest.approx(1.0, abs=1e-3)


def test_distances_are_taken_nonce_by_nonce(claims: list[Claim]) -> None:
    assert distances(claims, list(reversed(claims)), 12) == [0.0] * 16
