"""``POST /open`` and rounds that commit roots: a node over HTTP, with its outbox on disk."""

import base64
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from proofserve.api.response_models import OpeningsAnswer
from proofserve.api.schemas import MOST_OPENED
from proofserve.protocol.codec import encode
from proofserve.protocol.commitments import leaf, opens
from proofserve.protocol.nonces import NonceLane, draw
from proofserve.wire.records import OpeningRecord
from support.committed import (
    ORDER,
    FakeNode,
    Receiver,
    fake_node,
    receiver,
    recomputed,
    slow_engine,
)
from support.pace import wait_until

LANE = NonceLane(1, 3)
SOME = list(LANE.batch(10, 40))


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("committed")


@pytest.fixture(scope="module")
def received(folder: Path) -> Iterator[Receiver]:
    with receiver(folder) as made:
        yield made


@pytest.fixture(scope="module")
def node(folder: Path, received: Receiver) -> Iterator[FakeNode]:
    """A node whose committed round has ended."""
    with fake_node(folder) as made:
        computed = made.generate(received.url, 200)
        wait_until(lambda: received.committed() == computed)
        yield made


def test_vectors_open_under_the_roots_that_the_receiver_has(
    node: FakeNode, received: Receiver
) -> None:
    source = received.roots()
    answer = node.open(nonces=SOME).json()
    OpeningsAnswer.model_validate(answer)
    assert [each["nonce"] for each in answer["openings"]] == SOME
    assert answer["round_id"] == source.round_id
    assert answer["committed"] == sum(batch.count for batch in source.batches)
    ours = recomputed(SOME)
    for each in answer["openings"]:
        record = OpeningRecord.model_validate(each)
        batch, place = source.place_of(record.nonce)
        assert each["vector_b64"] == encode(ours[record.nonce][None])[0]
        assert each["index"] == LANE.index_of(record.nonce) == batch.first_index + place
        assert (each["first_index"], each["count"]) == (batch.first_index, batch.count)
        assert base64.b64decode(each["root"]) == batch.root
        hashed = leaf(record.nonce, base64.b64decode(record.vector_b64))
        assert opens(batch.root, batch.count, place, hashed, record.path)


def test_a_seed_draws_as_a_validator_does(node: FakeNode) -> None:
    answer = node.open(seed="9f2c", count=7).json()
    drawn = draw(LANE.batch(0, answer["committed"]), "9f2c", 7)
    assert [each["nonce"] for each in answer["openings"]] == list(drawn)


def test_the_callbacks_have_no_vectors_and_the_chain_is_whole(received: Receiver) -> None:
    source = received.roots()
    (summary,) = received.store.summary().sources
    assert (summary.artifacts, summary.duplicates) == (0, 0)
    assert source.broken_links() == {}
    assert (source.scheme, source.width, source.seq_len, source.lane) == (
        "artifact-v1",
        12,
        16,
        LANE,
    )
    firsts = [batch.first_index for batch in source.batches]
    assert firsts == list(range(0, 32 * len(firsts), 32))


@pytest.mark.parametrize(
    ("change", "status", "said"),
    [
        ({"nonces": [1, 2]}, 404, "nonce 2 is in no batch"),
        ({"nonces": [LANE.nonce(10**9)]}, 404, f"nonce {LANE.nonce(10**9)} is in no batch"),
        ({"nonces": [1], "block_hash": "other"}, 404, "no round of block other, key key"),
        ({"nonces": [1], "round_id": "other"}, 404, "no round of block block, key key, id other"),
        ({"nonces": [1, 1]}, 422, "1 occurs twice"),
        ({"nonces": []}, 422, "at least 1 item"),
        ({"nonces": list(range(MOST_OPENED + 1))}, 422, "at most 1000 items"),
        ({"seed": "a", "count": MOST_OPENED + 1}, 422, "less than or equal to 1000"),
        ({"seed": "a"}, 422, "give either nonces, or seed and count"),
        ({"count": 3}, 422, "give either nonces, or seed and count"),
        ({}, 422, "give either nonces, or seed and count"),
        ({"nonces": [1], "seed": "a", "count": 3}, 422, "give either nonces, or seed and count"),
        ({"nonces": [-1]}, 422, "greater than or equal to 0"),
        ({"nonces": [1], "more": 1}, 422, "not permitted"),
    ],
)
def test_what_cannot_be_opened_is_refused_by_name(
    node: FakeNode, change: dict[str, Any], status: int, said: str
) -> None:
    response = node.open(**change)
    assert response.status_code == status, response.text
    assert said in response.text


def test_a_round_of_vectors_cannot_be_opened(tmp_path: Path) -> None:
    with receiver(tmp_path) as received, fake_node(tmp_path) as made:
        computed = made.generate(received.url, 32, commit="vectors")
        assert made.http.get("/status").json()["config"]["commit"] == "vectors"
        refused = made.open(nonces=[1])
        assert (refused.status_code, received.committed()) == (409, 0)
        assert "publishes vectors, not roots" in refused.text
        wait_until(lambda: received.store.summary().sources != ())
        wait_until(lambda: received.store.summary().sources[0].artifacts == computed)


def test_deleted_vectors_are_410_and_several_rounds_need_an_id(tmp_path: Path) -> None:
    with receiver(tmp_path) as received, fake_node(tmp_path) as made:
        made.generate(received.url, 64)
        made.change("DELETE FROM results WHERE nonce = ?", LANE.nonce(3))
        gone = made.open(nonces=[LANE.nonce(33), LANE.nonce(5)])
        assert gone.status_code == 410
        assert f"of the batch of nonce {LANE.nonce(5)} are deleted" in gone.text
        assert "POC_OUTBOX_KEEP_DAYS" in gone.text
        assert made.open(nonces=[LANE.nonce(33)]).status_code == 200
        first = made.open(nonces=[LANE.nonce(33)]).json()["round_id"]
        made.generate(received.url, 64)
        both = made.open(nonces=[LANE.nonce(33)])
        assert both.status_code == 409
        assert f"give round_id: {first}, " in both.text
        assert made.open(nonces=[LANE.nonce(33)], round_id=first).json()["round_id"] == first


@pytest.mark.parametrize(
    ("path", "body", "said"),
    [
        ("/init/generate", {**ORDER}, "url: a round that commits roots must have a url"),
        ("/init/generate", {**ORDER, "url": "http://127.0.0.1:9", "commit": "all"}, "'vectors' or"),
        ("/generate", {**ORDER, "nonces": [1]}, "commit"),
        ("/init/generate", {**ORDER, "params": None, "r_target": 1.4}, "commit"),
    ],
)
def test_roots_are_of_rounds_of_artifacts_with_a_url(
    node: FakeNode, path: str, body: dict[str, Any], said: str
) -> None:
    body = {name: value for name, value in body.items() if value is not None}
    response = node.post(path, body)
    assert response.status_code == 422, response.text
    assert said in response.text


def test_an_operators_key_is_needed(tmp_path: Path) -> None:
    with fake_node(tmp_path, key="op", api_key=("op",), viewer_key=("view",)) as made:
        assert made.open(nonces=[1]).status_code == 404
        for key, status in (("view", 403), ("other", 401)):
            headers = {"Authorization": f"Bearer {key}"}
            body = {"block_hash": "block", "public_key": "key", "nonces": [1]}
            assert made.http.post("/open", json=body, headers=headers).status_code == status


def test_a_failed_nonce_opens_without_a_vector(tmp_path: Path) -> None:
    engine = slow_engine()
    engine.not_finite = frozenset({LANE.nonce(3)})
    with receiver(tmp_path) as received, fake_node(tmp_path, engine) as made:
        computed = made.generate(received.url, 32)
        wait_until(lambda: received.committed() == computed)
        (opened,) = made.open(nonces=[LANE.nonce(3)]).json()["openings"]
        assert opened["vector_b64"] == ""
        record = OpeningRecord.model_validate(opened)
        batch, place = received.roots().place_of(record.nonce)
        assert opens(batch.root, batch.count, place, leaf(record.nonce, b""), record.path)
