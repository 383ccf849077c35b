"""POST /generated and /validated in the distance protocol (A.8)."""

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
from proofserve.receiver.store import ReceiverStore
from proofserve.rounds.records import (
    DistanceClaims,
    DistanceVerdict,
    RoundSpec,
    Target,
    Winner,
    Workload,
)

from .support import distance, generated, judged, validated, won

NAN = float("nan")


def test_one_endpoint_takes_both_protocols(client: httpx.Client) -> None:
    headers = {"Idempotency-Key": "a", "X-Proofserve-Sequence": "1"}
    bodies = (won(3, 7, news="from later"), won(3, 7), generated(3))
    kinds = [client.post("/generated", json=bodies[0], headers=headers)]
    kinds += [client.post("/generated", json=bodies[1], headers=headers)]
    kinds += [client.post("/generated", json=bodies[2])]
    kinds += [client.post("/validated", json=body) for body in (judged(), validated())]
    assert [one.status_code for one in kinds] == [200] * 5
    assert [one.json()["status"] for one in kinds] == ["stored", "duplicate", *["stored"] * 3]
    (source,) = client.get("/summary").json()["sources"]
    assert source == {
        "public_key": "k3y",
        "block_hash": "b10c",
        "artifacts": 1,
        "winners": 2,
        "duplicates": 0,
        "validations": 2,
        "frauds": 2,
        "last_received": 1e9,
        "committed": 0,
    }


def _detail(client: httpx.Client, path: str, body: Any) -> list[dict[str, Any]]:
    """The complaints about a body that httpx itself may refuse to encode."""
    headers = {"Content-Type": "application/json"}
    answer = client.post(path, content=json.dumps(body), headers=headers)
    assert answer.status_code == 422
    assert client.get("/summary").json()["callbacks"] == 0
    detail: list[dict[str, Any]] = answer.json()["detail"]
    assert all(one.keys() == {"type", "loc", "msg"} for one in detail)
    return detail


def _problem(client: httpx.Client, path: str, body: Any) -> tuple[list[str | int], str]:
    """Where the only complaint points to, and what it says."""
    (problem,) = _detail(client, path, body)
    return problem["loc"], problem["msg"]


@pytest.mark.parametrize(
    ("changes", "field", "says"),
    [
        ({"public_key": None}, ["public_key"], "string"),
        ({"block_hash": "\ud800"}, ["block_hash"], ""),
        ({"node_id": -1}, ["node_id"], "greater"),
        ({"r_target": NAN}, ["r_target"], "finite"),
        ({"r_target": 0}, ["r_target"], "greater than 0"),
        ({"r_target": 2.5}, ["r_target"], "less than or equal to 2"),
        ({"nonces": [3, -7]}, ["nonces", 1], "greater than or equal to 0"),
        ({"nonces": [3, 2**63]}, ["nonces", 1], "less than or equal to 9223372036854775807"),
        ({"nonces": [3, 3]}, ["nonces"], "3 occurs twice"),
        ({"nonces": [3]}, ["dist"], "2 values for 1 nonces"),
        ({"dist": [1.25]}, ["dist"], "1 values for 2 nonces"),
        ({"dist": []}, ["dist"], "0 values for 2 nonces"),
        ({"dist": [1.25, NAN]}, ["dist", 1], "finite"),
        ({"dist": [float("-inf"), 1.25]}, ["dist", 0], "finite"),
        ({"dist": [1.25, -0.5]}, ["dist", 1], "greater than or equal to 0"),
        ({"dist": [1.25, 2.5]}, ["dist", 1], "less than or equal to 2"),
        ({"dist": [1.25, None]}, ["dist", 1], "number"),
        ({"dist": [1.25, 1.4]}, ["dist"], "1.4 at place 1 is not below r_target 1.4"),
    ],
)
def test_422_names_the_field_of_generated(
    client: httpx.Client, changes: dict[str, Any], field: list[str | int], says: str
) -> None:
    loc, message = _problem(client, "/generated", won(3, 7) | changes)
    assert loc == ["body", *field]
    assert says in message


@pytest.mark.parametrize(
    ("changes", "field", "says"),
    [
        ({"block_height": -1}, ["block_height"], "greater"),
        ({"nonces": [3, 7, 3]}, ["nonces"], "3 occurs twice"),
        ({"computed_distances": [1.25]}, ["computed_distances"], "1 values for 3 nonces"),
        ({"computed_distances": [1.25, None, 1.3]}, ["computed_distances", 1], "number"),
        ({"computed_distances": [1.25, 2.5, 1.3]}, ["computed_distances", 1], "equal to 2"),
        ({"received_distances": [1.25]}, ["received_distances"], "1 values for 3 nonces"),
        ({"received_distances": [1.25, NAN, 1.3]}, ["received_distances", 1], "finite"),
        ({"valid": [True]}, ["valid"], "1 values for 3 nonces"),
        ({"valid": [True, None, True]}, ["valid", 1], "boolean"),
        ({"n_invalid": -1}, ["n_invalid"], "greater"),
        ({"probability_honest": NAN}, ["probability_honest"], "finite"),
        ({"probability_honest": 1.5}, ["probability_honest"], "less"),
    ],
)
def test_422_names_the_field_of_validated(
    client: httpx.Client, changes: dict[str, Any], field: list[str | int], says: str
) -> None:
    loc, message = _problem(client, "/validated", judged(**changes))
    assert loc == ["body", *field]
    assert says in message


@pytest.mark.parametrize("field", ["nonces", "r_target", "node_id"])
def test_a_field_that_lacks_is_named(client: httpx.Client, field: str) -> None:
    body = won(3)
    del body[field]
    assert _problem(client, "/generated", body) == (["body", field], "Field required")


@pytest.mark.parametrize(
    ("path", "marks", "bodies"),
    [
        ("/generated", ("artifacts", "dist"), (generated(3), won(3))),
        ("/validated", ("n_mismatch", "computed_distances"), (validated(), judged())),
    ],
)
def test_a_body_of_both_protocols_or_of_neither_is_told_what_decides(
    client: httpx.Client, path: str, marks: tuple[str, str], bodies: tuple[Any, Any]
) -> None:
    for body in (bodies[0] | bodies[1], {"public_key": "k3y"}, [3]):
        loc, message = _problem(client, path, body)
        assert loc == ["body"]
        assert all(mark in message for mark in marks)


def test_a_verdict_of_an_older_sender_is_taken(client: httpx.Client) -> None:
    body = judged()
    del body["n_invalid"], body["probability_honest"]
    assert client.post("/validated", json=body).status_code == 200


def test_it_takes_what_the_outbox_sends(url: str, store: ReceiverStore, tmp_path: Path) -> None:
    asyncio.run(_send(url, tmp_path / "outbox.sqlite"))
    (source,) = store.summary().sources
    assert (source.artifacts, source.winners, source.duplicates) == (0, 50, 0)
    assert (source.validations, source.frauds) == (1, 1)
    assert (source.public_key, source.block_hash) == ("k3y", "b10c")


async def _send(url: str, path: Path) -> None:
    work = Workload(scheme("distance-v1"), Block("b10c", 77), "k3y", 256)
    target = Target(1.4)
    spec = RoundSpec("r1", work, NonceLane(3, 4), 10, url, target)
    claims = DistanceClaims(Block("b10c", 77), "k3y", 3, (3, 7, 11), (1.25, NAN, -7.5))
    verdict = DistanceVerdict(
        claims, Target(1.4), (1.25, 1.5, 1.3), (True, False, True), 0.0015, True
    )
    async with await SqliteOutbox.open(path) as store:
        sender = CallbackSender(store, CallbackPolicy(max_artifacts=30))
        running = asyncio.create_task(sender.run())
        await store.open_round(spec)
        for index in range(0, 100, 10):
            # Half of the nonces win.
            batch = [Winner(n, distance(n)) for n in spec.lane.batch(index, 10)[::2]]
            await store.record("r1", index + 10, batch, {})
        await store.push(url, verdict)
        assert await sender.drain(5.0)
        gauges = await store.gauges()
        assert (gauges.pending, gauges.expired) == (0, 0)
        running.cancel()
        with suppress(asyncio.CancelledError):
            await running
