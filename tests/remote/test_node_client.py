import pytest

from proofserve.remote.node_client import NodeClient
from proofserve.remote.records import DistanceWork, Work
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


def test_a_node_need_not_say_on_what_it_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    said = {"vllm_version": "0", "kernels": {"ranks": 2, "dtype": "bfloat16"}}
    monkeypatch.setattr(StubNode, "versions", lambda _self: said)
    with stub_node() as (_, url), NodeClient(url) as node:
        assert node.kernels() == {"dtype": "bfloat16"}


def test_a_refusal_keeps_the_nodes_own_words() -> None:
    with stub_node() as (_, url), NodeClient(url) as node:
        node.start_round(WORK)
        with pytest.raises(NodeError, match=r"409 .*Already generating"):
            node.start_round(WORK)


def test_a_node_may_ask_for_a_key() -> None:
    with stub_node(Habits(api_key="s3cret")) as (_, url):
        with NodeClient(url, "s3cret") as node:
            assert node.describe()["status"] == "IDLE"
        for wrong in (None, "s3cre"):
            with NodeClient(url, wrong) as node, pytest.raises(NodeError, match="401 ") as caught:
                node.describe()
            assert "s3cre" not in str(caught.value)


def test_a_node_that_is_not_there_is_named() -> None:
    named = r"GET http://127\.0\.0\.1:9/v1/models"
    with NodeClient("http://127.0.0.1:9") as node, pytest.raises(NodeError, match=named):
        node.models()


def test_a_nonce_without_a_vector_is_not_passed_over() -> None:
    with (
        stub_node(Habits(failing_nonce=4)) as (_, url),
        NodeClient(url) as node,
        pytest.raises(NodeError, match="'nonce': 4"),
    ):
        node.artifacts(WORK, range(8))


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
