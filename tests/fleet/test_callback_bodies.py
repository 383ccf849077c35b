import json
from typing import Any

import numpy as np
import pytest

from proofserve.fleet import callback_bodies
from proofserve.fleet.callback_bodies import read
from proofserve.fleet.records import BatchKind, FleetRound, Lane
from proofserve.protocol.codec import encode
from proofserve.protocol.errors import MalformedVector, ProtocolError
from proofserve.protocol.nonces import MAX_NONCE, NonceLane

from .sql.support import (
    a_distance_spec,
    a_spec,
    artifacts_body,
    head_of,
    roots_body,
    texts_of,
    vectors_of,
)

VECTORS = FleetRound(1, a_spec(), 4, 0.0, None)
ROOTS = FleetRound(1, a_spec(roots=True), 4, 0.0, None)
WINNERS = FleetRound(1, a_distance_spec(), 4, 0.0, None)
LANE = Lane("r1", 2, "m", 0.0)
NONCES = VECTORS.nonces_of(2).batch(0, 5)


def winners_body() -> dict[str, Any]:
    nonces = list(WINNERS.nonces_of(2).batch(0, 3))
    return {
        **head_of(WINNERS.spec),
        "r_target": 1.4,
        "nonces": nonces,
        "dist": [0.5, 1.399999976158142, 0],
    }


def refusal(round_: FleetRound, body: object) -> ProtocolError:
    raw = body if isinstance(body, bytes) else json.dumps(body).encode()
    with pytest.raises(ProtocolError) as caught:
        read(raw, round_, 2)
    return caught.value


def test_what_a_member_found_is_read_as_it_was_sent() -> None:
    found = read(json.dumps(artifacts_body(VECTORS.spec, NONCES)).encode(), VECTORS, 2)
    assert found.kind is BatchKind.VECTORS
    assert found.nonces.tolist() == list(NONCES)
    assert (found.values == vectors_of(NONCES).values).all()
    won = read(json.dumps(winners_body()).encode(), WINNERS, 2)
    assert won.kind is BatchKind.WINNERS
    assert won.values[:, 0].tolist() == [0.5, 1.399999976158142, 0.0]
    body = roots_body(ROOTS, LANE, 32, [32, 10])
    rooted = read(json.dumps(body).encode(), ROOTS, 2)
    assert rooted.kind is BatchKind.ROOTS
    assert rooted.nonces.tolist() == [ROOTS.nonces_of(2).nonce(32), ROOTS.nonces_of(2).nonce(64)]
    assert rooted.roots is not None
    assert ([each.count for each in rooted.roots.roots], rooted.body) == ([32, 10], body)


@pytest.mark.parametrize(
    ("change", "field"),
    [
        ({"block_hash": "other"}, "block_hash"),
        ({"block_height": 78}, "block_height"),
        ({"public_key": "other"}, "public_key"),
        ({"node_id": 4}, "node_id"),
        ({"node_id": "3"}, "node_id"),
        ({"encoding": {"dtype": "f16", "k_dim": 13, "endian": "le"}}, "encoding"),
        ({"encoding": {"dtype": "f32", "k_dim": 12, "endian": "le"}}, "encoding"),
        ({"artifacts": None}, "artifacts"),
    ],
)
def test_a_wrong_field_is_named(change: dict[str, object], field: str) -> None:
    assert refusal(VECTORS, artifacts_body(VECTORS.spec, NONCES) | change).field == field


GOOD = texts_of(NONCES[:1])[0]


@pytest.mark.parametrize(
    ("nonce", "text", "field"),
    [
        (NONCES[0] + 1, GOOD, "artifacts"),
        (-1, GOOD, "artifacts"),
        (2**63, GOOD, "artifacts"),
        (2**64, GOOD, "artifacts"),
        (NONCES[1], GOOD, "artifacts"),
        (1.5, GOOD, "artifacts[1].nonce"),
        (NONCES[0], 5, "artifacts[1].vector_b64"),
        (NONCES[0], GOOD[:-4], "artifacts.1.vector_b64"),
        (NONCES[0], GOOD[:-1] + "=", "artifacts.1.vector_b64"),
        (NONCES[0], GOOD[:-1] + "\n", "artifacts.1.vector_b64"),
        (NONCES[0], GOOD[:-1] + "\xe9", "artifacts.1.vector_b64"),
        (NONCES[0], encode(np.full((1, 12), np.inf, np.float32))[0], "artifacts.1.vector_b64"),
    ],
)
def test_a_wrong_artifact_is_named(nonce: object, text: object, field: str) -> None:
    body = artifacts_body(VECTORS.spec, NONCES[1:3])
    body["artifacts"].insert(1, {"nonce": nonce, "vector_b64": text})
    assert refusal(VECTORS, body).field == field


@pytest.mark.parametrize("raw", [b"", b"[]", b"{", b"null", b'{"artifacts": []}', b"\xff"])
def test_what_is_no_callback_is_refused(raw: bytes) -> None:
    for round_ in (VECTORS, WINNERS, ROOTS):
        assert refusal(round_, raw).field


@pytest.mark.parametrize(
    ("change", "field"),
    [
        ({"r_target": 1.5}, "r_target"),
        ({"dist": [0.5, 0.5]}, "dist"),
        ({"dist": [0.5, 1.4, 0.5]}, "dist.1"),
        ({"dist": [0.5, 0.5, -0.1]}, "dist.2"),
        ({"dist": [0.5, 0.5, None]}, "dist[2]"),
        ({"nonces": [3, 4, 5]}, "nonces"),
    ],
)
def test_wrong_winners_are_named(change: dict[str, object], field: str) -> None:
    assert refusal(WINNERS, winners_body() | change).field == field
    endless = json.dumps(winners_body()).replace("0.5", "1e999").encode()
    assert refusal(WINNERS, endless).field.startswith("dist")


@pytest.mark.parametrize(
    ("change", "field"),
    [
        ({"group_id": 3}, "group_id"),
        ({"scheme": "artifact-v1-layers"}, "scheme"),
        ({"params": {"seq_len": 255}}, "params.seq_len"),
        ({"public_key": "other"}, "public_key"),
        ({"round_id": 5}, "round_id"),
    ],
)
def test_wrong_roots_are_named(change: dict[str, object], field: str) -> None:
    assert refusal(ROOTS, roots_body(ROOTS, LANE, 0, [32]) | change).field == field


def test_roots_that_overlap_are_refused() -> None:
    body = roots_body(ROOTS, LANE, 32, [32, 32])
    body["roots"][1]["first_index"] = 50
    assert refusal(ROOTS, body).field == "roots.1.first_index"


@pytest.mark.parametrize("width", [1, 2, 3, 5, 12, 24, 64])
def test_many_texts_are_those_of_the_codec(width: int) -> None:
    vectors = np.random.default_rng(1).normal(size=(50, width)).astype("<f2")
    texts = encode(vectors.astype(np.float32))
    assert callback_bodies.encode_all(vectors) == texts
    assert (callback_bodies.decode_all(texts, width) == vectors).all()
    assert callback_bodies.encode_all(vectors[:0]) == []
    assert callback_bodies.decode_all([], width).shape == (0, width)


def test_unused_bits_are_refused() -> None:
    text = encode(np.zeros((1, 1), np.float32))[0]
    assert text == "AAA="
    with pytest.raises(MalformedVector, match="canonical"):
        callback_bodies.decode_all([text, "AAB="], 1)


@pytest.mark.parametrize(
    "lane",
    [NonceLane(3, 4, 5, 8), NonceLane(0, 1), NonceLane(2, 2**40, 0, 2**40), NonceLane(0, 2**63)],
)
def test_indices_of_many_nonces_are_those_of_each(lane: NonceLane) -> None:
    known = [lane.nonce(x) for x in range(3) if lane._first + x * lane._stride <= MAX_NONCE]
    nonces = [*known, -1, 0, 1, 3, MAX_NONCE, -MAX_NONCE]
    expected = [lane.index_of(nonce) for nonce in nonces]
    found = lane.indices_of(np.array(nonces, np.int64)).tolist()
    assert found == [-1 if index is None else index for index in expected]
