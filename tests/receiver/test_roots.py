"""Roots of batches: over HTTP, in the file, and as a validator reads them."""

import base64
from pathlib import Path
from typing import Any

import httpx
import pytest

from proofserve.protocol.commitments import CommittedBatch
from proofserve.protocol.nonces import NonceLane
from proofserve.receiver import reader

from .support import generated


def text(number: int) -> str:
    return base64.b64encode(bytes([number]) * 32).decode()


def batch(first: int, count: int = 32, **changes: Any) -> dict[str, Any]:
    previous = None if first == 0 else text(first // 32)
    known = {"first_index": first, "count": count, "root": text(first // 32 + 1)}
    return {**known, "previous_root": previous, **changes}


def posted(*firsts: int, **changes: Any) -> dict[str, Any]:
    return {
        "public_key": "k3y",
        "block_hash": "b10c",
        "block_height": 77,
        "node_id": 1,
        "node_count": 3,
        "group_id": 0,
        "n_groups": 1,
        "round_id": "c1",
        "scheme": "sketch-v1",
        "encoding": {"dtype": "f16", "k_dim": 128, "endian": "le"},
        "params": {"seq_len": 256},
        "roots": [batch(first) for first in firsts],
    } | changes


def test_roots_are_stored_once_and_counted(client: httpx.Client, path: Path) -> None:
    def post(key: str, body: dict[str, Any]) -> str:
        answer = client.post("/generated", json=body, headers={"Idempotency-Key": key})
        assert answer.status_code == 200, answer.text
        return str(answer.json()["status"])

    assert post("a", posted(0, 32)) == "stored"
    assert post("a", posted(0, 32)) == "duplicate"
    # The same roots under another key: an acknowledged callback that was sent by hand again.
    assert post("b", posted(32, 64)) == "stored"
    assert post("c", generated(3)) == "stored"
    (source,) = client.get("/summary").json()["sources"]
    assert (source["committed"], source["duplicates"], source["artifacts"]) == (96, 32, 1)
    with reader.reading(path) as received:
        (found,) = received.rounds()
        batches = received.batches(found.number)
    assert (found.block_hash, found.public_key, found.round_id) == ("b10c", "k3y", "c1")
    assert (found.lane, found.block_height) == (NonceLane(1, 3), 77)
    assert (found.scheme, found.width, found.seq_len) == ("sketch-v1", 128, 256)
    tops = [bytes([n]) * 32 for n in (1, 2, 3)]
    assert batches == [
        CommittedBatch(0, 32, tops[0], None),
        CommittedBatch(32, 32, tops[1], tops[0]),
        CommittedBatch(64, 32, tops[2], tops[1]),
    ]


def test_the_first_root_of_a_batch_stays(client: httpx.Client, path: Path) -> None:
    client.post("/generated", json=posted(0))
    other = posted(0, roots=[batch(0, root=text(9))])
    assert client.post("/generated", json=other).status_code == 200
    # Another round of the same block and key is another thing.
    assert client.post("/generated", json={**other, "round_id": "c2"}).status_code == 200
    with reader.reading(path) as received:
        roots = {one.round_id: received.batches(one.number)[0].root for one in received.rounds()}
    assert roots == {"c1": bytes([1]) * 32, "c2": bytes([9]) * 32}


@pytest.mark.parametrize(
    ("change", "where"),
    [
        ({"roots": [batch(0, root="AAAA")]}, "roots.0.root: 3 bytes where 32 are needed"),
        ({"roots": [batch(0, root="A")]}, "roots.0.root: is not base64"),
        ({"roots": [batch(0, root=1)]}, "roots.0.root: is not base64"),
        ({"roots": [batch(0, count=0)]}, "roots.0.count"),
        ({"roots": [batch(32, previous_root=None)]}, "previous_root is null for the batch at"),
        ({"roots": [batch(0, previous_root=text(1))]}, "previous_root is null for the batch at"),
        ({"roots": [batch(32, count=2**62)]}, "the lane ends before"),
        ({"node_id": 3}, "node_id: 3 is outside 0..2"),
        ({"artifacts": []}, "exactly one of artifacts (artifact protocol), dist"),
    ],
)
def test_roots_that_mean_nothing_are_refused(
    client: httpx.Client, change: dict[str, Any], where: str
) -> None:
    answer = client.post("/generated", json=posted(0) | change)
    assert answer.status_code == 422
    (detail,) = answer.json()["detail"]
    assert where in f"{'.'.join(map(str, detail['loc'][1:]))}: {detail['msg']}"
