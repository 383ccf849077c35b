import pytest

from proofserve.remote.node_client import NodeClient, computing_round
from proofserve.remote.records import DistanceWork, NodeStatus, Work, work_of_scheme
from proofserve.reports import NodeError
from proofserve.rounds.records import Winner
from support.stub_node import Habits, StubNode, stub_node

WORK = Work("stub")


def test_an_order_carries_everything_that_the_protocol_asks_for() -> None:
    work = Work("m", "block", "key", seq_len=64, k_dim=8, batch_size=16)
    assert work.body == {
        "block_hash": "block",
        "block_height": 1,
        "public_key": "key",
        "node_id": 0,
        "node_count": 1,
        "batch_size": 16,
        "params": {"model": "m", "seq_len": 64, "k_dim": 8},
    }


def test_a_node_that_never_had_a_round_has_counted_nothing() -> None:
    status = NodeStatus.read({"status": "IDLE", "config": None, "stats": None, "engine": None})
    assert (status.state, status.processed, status.found) == ("IDLE", 0, 0)
    assert status.engine is None


def test_what_a_newer_node_shows_besides_is_ignored() -> None:
    with stub_node(Habits(gauges={"temperature": 41})) as (_, url), NodeClient(url) as node:
        assert node.engine().resume_ms == (7.0, 8.0, 9.0)


def test_a_node_need_not_say_on_what_it_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    said = {"vllm_version": "0", "kernels": {"ranks": 2, "dtype": "bfloat16"}}
    monkeypatch.setattr(StubNode, "versions", lambda _self: said)
    with stub_node() as (_, url), NodeClient(url) as node:
        assert node.kernels() == {"dtype": "bfloat16"}


@pytest.mark.parametrize(("old_looks", "age_s"), [(3, 0.0), (10**9, 0.7)])
def test_old_counters_are_taken_if_a_few_looks_find_no_new_ones(
    old_looks: int, age_s: float
) -> None:
    habits = Habits(looks_with_old_gauges=old_looks)
    with stub_node(habits) as (_, url), NodeClient(url) as node:
        assert node.engine().age_s == age_s


def test_a_busy_engine_is_asked_again_and_a_dead_one_is_an_error() -> None:
    with stub_node(Habits(looks_without_gauges=3)) as (_, url), NodeClient(url) as node:
        assert node.engine().resume_ms == (7.0, 8.0, 9.0)
    dead = Habits(looks_without_gauges=10**9)
    with (
        stub_node(dead) as (_, url),
        NodeClient(url) as node,
        pytest.raises(NodeError, match="is its engine alive"),
    ):
        node.engine()


def test_a_round_ends_with_its_context_whatever_happens() -> None:
    def interrupted(node: NodeClient) -> None:
        with computing_round(node, WORK):
            raise KeyError

    with stub_node() as (stub, url), NodeClient(url) as node:
        with pytest.raises(KeyError):
            interrupted(node)
        assert stub.state == "STOPPED"


def test_a_refusal_keeps_the_nodes_own_words() -> None:
    with stub_node() as (_, url), NodeClient(url) as node:
        node.start_round(WORK)
        with pytest.raises(NodeError, match=r"409 .*Already generating"):
            node.start_round(WORK)


def test_a_node_may_ask_for_a_key() -> None:
    with stub_node(Habits(api_key="s3cret")) as (_, url):
        with NodeClient(url, "s3cret") as node:
            assert node.status().state == "IDLE"
        for wrong in (None, "s3cre"):
            with NodeClient(url, wrong) as node, pytest.raises(NodeError, match="401 ") as caught:
                node.status()
            assert "s3cre" not in str(caught.value)


def test_a_node_that_is_not_there_is_named() -> None:
    named = r"GET http://127\.0\.0\.1:9/v1/models"
    with NodeClient("http://127.0.0.1:9") as node, pytest.raises(NodeError, match=named):
        node.models()


def test_results_are_read_to_the_end() -> None:
    with stub_node() as (stub, url), NodeClient(url) as node:
        assert node.last_seq() == 0
        with computing_round(node, WORK):
            pass
        assert node.last_seq() == len(stub.rows)
        assert [row.nonce for row in node.results(after=5, limit=3)] == [5, 6, 7]


def test_a_nonce_without_a_vector_is_not_passed_over() -> None:
    with (
        stub_node(Habits(failing_nonce=4)) as (_, url),
        NodeClient(url) as node,
        pytest.raises(NodeError, match="'nonce': 4"),
    ):
        node.artifacts(WORK, range(8))


def test_a_verdict_comes_back_whole() -> None:
    with stub_node() as (_, url), NodeClient(url) as node:
        claims = node.artifacts(WORK, range(4))
        assert not node.validate(WORK, claims).fraud_detected
        verdict = node.validate(Work("stub", public_key="other"), claims)
    assert verdict.fraud_detected
    assert verdict.mismatch_nonces == (0, 1, 2, 3)
    assert (verdict.n_total, verdict.n_mismatch, verdict.p_value) == (4, 4, 0.0)


def test_the_bare_speed_is_asked_for_the_same_work() -> None:
    with stub_node() as (stub, url), NodeClient(url) as node:
        speed = node.measure(WORK, 7)
    assert (speed.nonces_per_second, speed.sequences) == (1000.0, 8)
    (order,) = stub.measured
    assert order["forwards"] == 7
    assert order["params"] == WORK.params
    assert "seq_len" not in order


def test_the_bare_speed_is_that_of_the_orders_scheme() -> None:
    with stub_node() as (stub, url), NodeClient(url) as node:
        node.measure(work_of_scheme("sketch-v1", "stub", 256), 7)
    (order,) = stub.measured
    assert order["scheme"] == "sketch-v1"
    assert order["params"] == {"model": "stub", "seq_len": 256, "k_dim": 64}


def test_the_bare_speed_of_distances_is_asked_for_by_their_length() -> None:
    with stub_node() as (stub, url), NodeClient(url) as node:
        node.measure(DistanceWork("stub", seq_len=64), 7)
    (order,) = stub.measured
    assert order["seq_len"] == 64
    assert "params" not in order


def test_an_order_of_distances_carries_everything_that_the_protocol_asks_for() -> None:
    work = DistanceWork("m", "block", "key", seq_len=64, batch_size=16, r_target=1.4)
    assert work.body == {
        "block_hash": "block",
        "block_height": 1,
        "public_key": "key",
        "node_id": 0,
        "node_count": 1,
        "batch_size": 16,
        "seq_len": 64,
        "r_target": 1.4,
        "use_sign_flips": True,
        "use_layer_hooks": False,
    }


def test_a_round_that_judges_ends_with_its_context_whatever_happens() -> None:
    def interrupted(node: NodeClient, stub: StubNode) -> None:
        with node.judging(DistanceWork("stub")):
            assert stub.state == "VALIDATING"
            raise KeyError

    with stub_node() as (stub, url), NodeClient(url) as node:
        with pytest.raises(KeyError):
            interrupted(node, stub)
        assert stub.state == "STOPPED"


def test_a_judgement_comes_back_whole() -> None:
    work = DistanceWork("stub", r_target=1.41)
    with stub_node() as (stub, url), NodeClient(url) as node, node.judging(work):
        claims = [Winner(nonce, 1.4) for nonce in range(20)]
        judgement = node.judge(work, claims)
        ours = tuple(stub.distance(nonce, work.body) for nonce in range(20))
    assert judgement.computed_distances == ours
    assert judgement.n_invalid == sum(distance > 1.41 for distance in ours) > 0
    assert judgement.fraud_detected
    assert judgement.probability_honest == 0.0
