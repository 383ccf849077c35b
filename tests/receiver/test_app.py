import asyncio
import json
from contextlib import suppress
from pathlib import Path
from typing import Any

import httpx
import pytest

from proofserve.outbox.planning import CallbackPolicy
from proofserve.outbox.sender import CallbackSender
from proofserve.outbox.store import SqliteOutbox
from proofserve.protocol.identity import Block
from proofserve.protocol.nonces import NonceLane
from proofserve.protocol.schemes import scheme
from proofserve.protocol.verdict.comparison import Claim
from proofserve.receiver.store import ReceiverStore
from proofserve.rounds.records import RoundSpec, Workload

from .support import generated, validated, vector


def test_callbacks_are_taken_and_summed_up(client: httpx.Client) -> None:
    headers = {"Idempotency-Key": "a", "X-Proofserve-Sequence": "1"}
    first = client.post("/generated", json=generated(3, 7), headers=headers)
    again = client.post("/generated", json=generated(3, 7), headers=headers)
    verdict = client.post("/validated", json=validated())
    job = client.post("/generated", json=generated(11, request_id="job", news="from later"))
    assert [one.status_code for one in (first, again, verdict, job)] == [200] * 4
    assert (first.json(), again.json()) == ({"status": "stored"}, {"status": "duplicate"})
    assert client.get("/summary").json() == {
        "callbacks": 3,
        "repeats": 1,
        "last_received": 1e9,
        "sources": [
            {
                "public_key": "k3y",
                "block_hash": "b10c",
                "artifacts": 3,
                "winners": 0,
                "duplicates": 0,
                "validations": 1,
                "frauds": 1,
                "last_received": 1e9,
                "committed": 0,
            }
        ],
        "forks": 0,
    }


def test_it_says_that_it_serves(client: httpx.Client) -> None:
    assert client.get("/health").json() == {"status": "ok"}


def _post(client: httpx.Client, path: str, body: dict[str, Any]) -> httpx.Response:
    """POST what httpx itself would refuse to encode, NaN say."""
    headers = {"Content-Type": "application/json"}
    return client.post(path, content=json.dumps(body), headers=headers)


def _one(value: str) -> list[dict[str, Any]]:
    return [{"nonce": 3, "vector_b64": vector(3)}, {"nonce": 7, "vector_b64": value}]


VECTOR = ["body", "artifacts", 1, "vector_b64"]


@pytest.mark.parametrize(
    ("changes", "field"),
    [
        ({"public_key": None}, ["body", "public_key"]),
        ({"block_hash": "\ud800"}, ["body", "block_hash"]),
        ({"block_height": 2**63}, ["body", "block_height"]),
        ({"node_id": -1}, ["body", "node_id"]),
        ({"artifacts": [{"nonce": -1, "vector_b64": ""}]}, ["body", "artifacts", 0, "nonce"]),
        ({"artifacts": [{"nonce": 2**63, "vector_b64": ""}]}, ["body", "artifacts", 0, "nonce"]),
        ({"artifacts": [{"nonce": 3}]}, ["body", "artifacts", 0, "vector_b64"]),
        ({"artifacts": _one("")}, VECTOR),
        ({"artifacts": _one(vector(7)[:-1])}, VECTOR),
        ({"artifacts": _one(vector(7, 5))}, VECTOR),
        ({"artifacts": _one(vector(10**9))}, VECTOR),
        ({"encoding": {"dtype": "f32", "k_dim": 4, "endian": "le"}}, ["body", "encoding", "dtype"]),
    ],
)
def test_422_names_the_field_of_generated(
    client: httpx.Client, changes: dict[str, Any], field: list[str]
) -> None:
    answer = _post(client, "/generated", generated() | changes)
    assert answer.status_code == 422
    (problem,) = answer.json()["detail"]
    assert problem["loc"] == field
    assert problem["msg"]
    assert "input" not in problem
    assert client.get("/summary").json()["callbacks"] == 0


@pytest.mark.parametrize(
    ("field", "value"), [("p_value", float("nan")), ("p_value", 1.5), ("n_total", -1)]
)
def test_422_names_the_field_of_validated(client: httpx.Client, field: str, value: float) -> None:
    answer = _post(client, "/validated", validated(**{field: value}))
    assert answer.status_code == 422
    assert [one["loc"] for one in answer.json()["detail"]] == [["body", field]]


def test_a_body_of_complaints_is_answered_briefly(client: httpx.Client) -> None:
    broken = generated(artifacts=[{"nonce": -1}] * 1000)
    assert len(client.post("/generated", json=broken).json()["detail"]) == 20


def test_a_book_that_cannot_store_asks_for_another_try(
    client: httpx.Client, store: ReceiverStore
) -> None:
    store.close()
    answer = client.post("/generated", json=generated(3))
    assert answer.status_code == 503
    assert "not stored" in answer.json()["detail"]


def test_it_takes_what_the_outbox_sends(url: str, store: ReceiverStore, tmp_path: Path) -> None:
    asyncio.run(_send(url, tmp_path / "outbox.sqlite"))
    (source,) = store.summary().sources
    assert (source.artifacts, source.duplicates, source.validations) == (100, 0, 1)
    assert (source.public_key, source.block_hash) == ("k3y", "b10c")


async def _send(url: str, path: Path) -> None:
    work = Workload(scheme("artifact-v1", k_dim=4), Block("b10c", 77), "k3y", 256)
    spec = RoundSpec("r1", work, NonceLane(3, 4), 10, url)
    async with await SqliteOutbox.open(path) as store:
        sender = CallbackSender(store, CallbackPolicy(max_artifacts=30))
        running = asyncio.create_task(sender.run())
        await store.open_round(spec)
        for index in range(0, 100, 10):
            batch = [Claim(n, vector(n)) for n in spec.lane.batch(index, 10)]
            await store.record("r1", index + 10, batch, {})
        await store.enqueue("validated", url, validated())
        assert await sender.drain(5.0)
        gauges = await store.gauges()
        assert (gauges.delivered, gauges.expired) == (5, 0)
        running.cancel()
        with suppress(asyncio.CancelledError):
            await running


@pytest.mark.parametrize("max_body_bytes", [1000])
def test_a_body_above_the_limit_is_413_and_not_stored(client: httpx.Client) -> None:
    large = json.dumps(generated(*range(20))).encode()
    announced = client.post("/generated", content=large)
    unannounced = client.post("/generated", content=iter([large[:700], large[700:]]))
    for answer in (announced, unannounced):
        assert answer.status_code == 413
        assert "more than 1000 bytes" in answer.json()["detail"]
        assert "--max-body-bytes" in answer.json()["detail"]
    assert client.post("/validated", content=b"x" * 1001).status_code == 413
    assert client.get("/summary").json()["callbacks"] == 0
    assert client.post("/generated", json=generated(3)).status_code == 200
