"""A receiver with a secret: what it takes, and from whom."""

import asyncio
import json
from contextlib import suppress
from pathlib import Path
from typing import Any

import httpx
import pytest

from proofserve.outbox.planning import CallbackPolicy
from proofserve.outbox.sender import CallbackSender, Outward
from proofserve.outbox.store import SqliteOutbox
from proofserve.receiver.callbacks import SignatureCheck
from proofserve.receiver.store import ReceiverStore
from proofserve.wire.callbacks import Envelope

from .support import generated, validated

pytestmark = pytest.mark.anyio

SECRET = b"shared-secret"
NOW = 1_700_000_000


@pytest.fixture
def check() -> SignatureCheck:
    """Of a receiver in which it is ``NOW``."""
    return SignatureCheck(SECRET, lambda: NOW)


def headers(body: bytes, endpoint: str = "generated", **changes: Any) -> dict[str, str]:
    """As a node signs, with some headers changed afterwards; None leaves one out."""
    timestamp = changes.pop("signed_at", NOW)
    secret = changes.pop("secret", SECRET)
    signed = {
        "Content-Type": "application/json",
        "Idempotency-Key": "k3y",
        "X-Proofserve-Sequence": "7",
        "X-Proofserve-Timestamp": str(timestamp),
        "X-Proofserve-Signature": Envelope(endpoint, "k3y", 7, timestamp).sign(secret, body),
    }
    changed = signed | {name.replace("_", "-"): value for name, value in changes.items()}
    return {name: value for name, value in changed.items() if value is not None}


BODY = json.dumps(generated(3)).encode()


def test_a_signed_callback_is_taken(client: httpx.Client) -> None:
    response = client.post("/generated", content=BODY, headers=headers(BODY))
    assert response.json() == {"status": "stored"}
    again = client.post("/generated", content=BODY, headers=headers(BODY))
    assert again.json() == {"status": "duplicate"}
    verdict = json.dumps(validated()).encode()
    signed = headers(verdict, "validated", Idempotency_Key="k3y")
    assert client.post("/validated", content=verdict, headers=signed).status_code == 200


@pytest.mark.parametrize(
    ("changes", "complaint"),
    [
        ({"X_Proofserve_Signature": None}, "signed callbacks only"),
        ({"X_Proofserve_Timestamp": None}, "signed callbacks only"),
        ({"Idempotency_Key": None}, "signed callbacks only"),
        ({"X_Proofserve_Sequence": "-7"}, "signed callbacks only"),
        ({"X_Proofserve_Timestamp": "9" * 5000}, "signed callbacks only"),
        ({"secret": b"shared-secreT"}, "another secret"),
        ({"Idempotency_Key": "k3z"}, "another secret or for another callback"),
        ({"X_Proofserve_Sequence": "8"}, "another secret or for another callback"),
        ({"X_Proofserve_Timestamp": str(NOW + 1)}, "another secret or for another callback"),
        ({"endpoint": "validated"}, "another secret or for another callback"),
        ({"X_Proofserve_Signature": "v1=00"}, "another secret or for another callback"),
        ({"signed_at": NOW - 301}, "signed 301 s ago"),
        ({"signed_at": NOW + 301}, "signed -301 s ago"),
    ],
)
def test_any_other_is_401_and_leaves_nothing(
    client: httpx.Client, changes: dict[str, Any], complaint: str
) -> None:
    response = client.post("/generated", content=BODY, headers=headers(BODY, **changes))
    assert response.status_code == 401
    assert complaint in response.json()["detail"]
    assert client.get("/summary").json()["callbacks"] == 0


def test_a_changed_body_is_401(client: httpx.Client) -> None:
    changed = BODY.replace(b"b10c", b"b11c")
    response = client.post("/generated", content=changed, headers=headers(BODY))
    assert response.status_code == 401
    # The answer says nothing else about a body without a valid signature.
    assert client.post("/generated", content=b"{", headers=headers(BODY)).status_code == 401


@pytest.mark.parametrize("signed_at", [NOW - 300, NOW + 300])
def test_clocks_may_differ_a_little(client: httpx.Client, signed_at: int) -> None:
    signed = headers(BODY, signed_at=signed_at)
    assert client.post("/generated", content=BODY, headers=signed).status_code == 200


async def test_a_node_and_its_receiver_understand_each_other(
    url: str, store: ReceiverStore, tmp_path: Path
) -> None:
    body = generated(3, request_id="job")
    for secret, delivered in ((b"another-secret", 0), (SECRET, 1)):
        outward = Outward(secret=secret, clock=lambda: NOW + 0.5)
        path = tmp_path / f"{delivered}.sqlite"
        async with await SqliteOutbox.open(path) as outbox:
            await outbox.enqueue("generated", f"{url}/", body)
            sender = CallbackSender(outbox, CallbackPolicy(max_retries=1), outward=outward)
            sending = asyncio.create_task(sender.run())
            assert await sender.drain(5.0)
            sending.cancel()
            with suppress(asyncio.CancelledError):
                await sending
            gauges = await outbox.gauges()
            assert (gauges.delivered, gauges.expired) == (delivered, 1 - delivered)
            if not delivered:
                assert "401" in str(gauges.last_error)
                assert "another-secret" not in f"{outward} {gauges}"
    assert store.summary().callbacks == 1
