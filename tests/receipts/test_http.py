"""Receipts and their log over real HTTP, from a node with a real outbox file."""

from pathlib import Path

import pytest
from pydantic import SecretStr

from proofserve.api.response_models import LogPage, ReceiptsAnswer, Versions
from proofserve.outbox.receipts import signing_key
from proofserve.protocol.receipts.record import is_signed, require_chain
from proofserve.wire.signed import signed_entry, signed_receipt
from proofserve.wire.status import NodeStatusResponse

from .nodes import Served, served
from .support import an_answer, check_receipt, logged

pytestmark = pytest.mark.anyio


async def answered(node: Served, *response_ids: str) -> None:
    """Answers end one after the other, each with an entry of its own."""
    assert node.node.receipts is not None
    before = (await node.node.receipts.gauges()).stored
    for n, response_id in enumerate(response_ids):
        node.engine.answers.put_nowait(an_answer(response_id))
        await logged(node.node.receipts, before + n + 1)


async def test_a_client_without_a_key_gets_its_receipt(tmp_path: Path) -> None:
    async with served(tmp_path, api_key=(SecretStr("operators"),)) as node:
        await answered(node, "chatcmpl-1")
        response = await node.receipts("chatcmpl-1")
        assert response.status_code == 200
        ReceiptsAnswer.model_validate(response.json())
        (body,) = response.json()["receipts"]
        signed = signed_receipt(body)
        check_receipt(signed)
        assert signed.receipt.response_id == "chatcmpl-1"
        assert (await node.client.get("/api/v1/pow/status")).status_code == 401
        key = {"Authorization": "Bearer operators"}
        versions = (await node.client.get("/api/v1/pow/versions", headers=key)).json()
        Versions.model_validate(versions)
        assert versions["receipts"] == {
            "public_key": body["public_key"],
            "sketch_key": signed.receipt.sketch_key,
            "k_dim": signed.receipt.k_dim,
        }
        assert versions["weights_digest"] == signed.receipt.weights_digest


async def test_ids_that_a_client_chose_are_found_however_they_are_written(tmp_path: Path) -> None:
    async with served(tmp_path) as node:
        await answered(node, "chatcmpl-a/b c?")
        response = await node.receipts("chatcmpl-a/b%20c%3F")
        assert response.json()["receipts"][0]["receipt"]["response_id"] == "chatcmpl-a/b c?"
        assert (await node.receipts("x" * 600)).status_code == 422


async def test_an_unknown_id_is_404(tmp_path: Path) -> None:
    async with served(tmp_path) as node:
        response = await node.receipts("chatcmpl-none")
        assert response.status_code == 404
        assert "no answer with this id has a receipt" in response.json()["detail"]
        assert node.node.refusals == {(404, "unknown_receipt"): 1}


async def test_a_receipt_outside_the_log_is_425_and_says_when_to_come_again(tmp_path: Path) -> None:
    async with served(tmp_path) as node:
        service = node.node.receipts
        assert service is not None
        async with service._logging:
            node.engine.answers.put_nowait(an_answer("chatcmpl-1"))
            service.wait_s = 60.0
            response = await node.receipts("chatcmpl-1")
            assert response.status_code == 425
            assert response.headers["retry-after"] == "1"
        await logged(service, 1)
        assert (await node.receipts("chatcmpl-1")).status_code == 200


async def test_a_deleted_receipt_is_410(tmp_path: Path) -> None:
    async with served(tmp_path) as node:
        await answered(node, "chatcmpl-1")
        await node.node.outbox.receipts.prune(0.0, 3600.0)  # type: ignore[attr-defined]
        response = await node.receipts("chatcmpl-1")
        assert response.status_code == 410
        assert "time to live" in response.json()["detail"]


async def test_receipts_are_deleted_after_the_days_of_the_settings(tmp_path: Path) -> None:
    async with served(tmp_path) as node:
        await answered(node, "chatcmpl-1")
    # A thousandth of a second; the deletion runs every quarter of it.
    async with served(tmp_path, receipts_keep_days=0.001 / 86_400) as node:
        assert node.node.receipts is not None
        kept = 1
        while kept:
            kept = (await node.node.receipts.gauges()).kept
        assert (await node.receipts("chatcmpl-1")).status_code == 410


async def test_the_log_is_read_in_pages(tmp_path: Path) -> None:
    async with served(tmp_path) as node:
        await answered(node, "chatcmpl-1", "chatcmpl-2", "chatcmpl-3")
        after, entries = -1, []
        for count in (2, 1, 0):
            response = await node.client.get(f"/api/v1/receipts/log?after={after}&limit=2")
            page = LogPage.model_validate(response.json())
            assert len(page.entries) == count
            entries += [signed_entry(each) for each in response.json()["entries"]]
            after = page.next_after
        assert after == 2
        require_chain([each.entry for each in entries])
        key = bytes.fromhex(page.public_key)
        assert all(is_signed(each.entry.hash, each.signature, key) for each in entries)


@pytest.mark.parametrize(
    "query", ["after=-2", "after=x", "limit=0", "limit=10001", f"after={2**63}"]
)
async def test_a_wrong_page_of_the_log_is_422(tmp_path: Path, query: str) -> None:
    async with served(tmp_path) as node:
        response = await node.client.get(f"/api/v1/receipts/log?{query}")
        assert response.status_code == 422
        (detail,) = response.json()["detail"]
        assert detail["loc"] == ["query", query.partition("=")[0]]


async def test_a_node_without_receipts_says_so(tmp_path: Path) -> None:
    async with served(tmp_path, with_receipts=False) as node:
        for path in ("log", "chatcmpl-1"):
            response = await node.receipts(path)
            assert response.status_code == 503
            assert response.json() == {"detail": "this server makes no receipts"}
        assert (await node.client.get("/api/v1/pow/versions")).json()["receipts"] is None
        status = (await node.client.get("/api/v1/pow/status")).json()
        assert (status["receipts"], status["receipts_error"]) == (None, None)
        said = (await node.client.get("/api/v1/pow/versions")).json()
        # The key signs what the node answers, too.
        assert said["public_key"] == signing_key(tmp_path / "outbox.receipts.pem").public_key.hex()


async def test_clients_of_receipts_have_a_limit_of_their_own(tmp_path: Path) -> None:
    async with served(tmp_path, requests_per_minute=2) as node:
        statuses = [(await node.receipts("log")).status_code for _ in range(3)]
        assert statuses == [200, 200, 429]
        assert (await node.client.get("/api/v1/pow/versions")).status_code == 200


async def test_status_counts_receipts_and_answers_without_one(tmp_path: Path) -> None:
    async with served(tmp_path) as node:
        node.engine.answers.put_nowait(an_answer("chatcmpl-none", sketches=None))
        await answered(node, "chatcmpl-1")
        status = (await node.client.get("/api/v1/pow/status")).json()
        NodeStatusResponse.model_validate(status)
        assert status["receipts"] == {
            "stored": 1,
            "kept": 1,
            "log_entries": 1,
            "unlogged": 0,
            "without": {"no_sketches": 1},
            "waiting": 0,
        }


async def test_the_openapi_page_has_the_fields_of_a_receipt(tmp_path: Path) -> None:
    async with served(tmp_path) as node:
        page = (await node.client.get("/openapi.json")).json()
    operation = page["paths"]["/api/v1/receipts/{response_id}"]["get"]
    assert {"200", "404", "410", "425", "429"} <= operation["responses"].keys()
    assert "security" not in operation
    receipt = page["components"]["schemas"]["ReceiptRecord"]["properties"]
    assert receipt["prompt_sha256"]["pattern"] == "^[0-9a-f]{64}$"
    assert receipt["sketches"]["contentEncoding"] == "base64"


@pytest.mark.parametrize("url", ["http://10.1.2.3/x", "ftp://127.0.0.1/", "nonsense"])
async def test_a_callback_url_that_is_not_allowed_stops_the_start(tmp_path: Path, url: str) -> None:
    with pytest.raises(ValueError, match="POC_RECEIPTS_CALLBACK: "):
        async with served(tmp_path, receipts_callback=url):
            pass


async def test_a_key_that_others_can_read_stops_the_start(tmp_path: Path) -> None:
    async with served(tmp_path) as node:
        await answered(node, "chatcmpl-1")
    key = tmp_path / "outbox.receipts.pem"
    key.chmod(0o644)
    with pytest.raises(ValueError, match=f"chmod 600 {key}"):
        async with served(tmp_path):
            pass
    own = tmp_path / "own.pem"
    async with served(tmp_path, receipts_key_file=own) as node:
        assert (await node.receipts("chatcmpl-1")).status_code == 200
        assert own.exists()
