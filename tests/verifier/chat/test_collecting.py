"""Chats and receipts over real HTTP, with servers that are slow, broken or gone."""

import socket
from typing import Any

import pytest

from proofserve.reports import NodeError, Progress, ReportedError
from proofserve.verifier.chat import conversation as collecting
from proofserve.verifier.chat.conversation import CHAT, ReceiptClient
from support.provider import provider

REQUEST = {"model": "toy", "messages": [{"role": "user", "content": "x"}], "temperature": 0.5}


@pytest.fixture(autouse=True)
def soon(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(collecting, "POLL_S", 0.01)


def test_a_chat_comes_with_its_receipt() -> None:
    with provider() as (served, url), ReceiptClient(url + "/", "secret") as client:
        assert client.model() == "toy"
        chat = client.chat("name", {**REQUEST, "n": 2})
    assert served.bodies == [{**REQUEST, "n": 2, "return_token_ids": True}]
    assert chat.request == served.bodies[0]
    assert chat.name == "name"
    assert [each.receipt.choice for each in chat.receipts] == [0, 1]
    assert [each.token_ids for each in chat.choices] == [
        (*map(ord, text), 1) for text in ("answer to x", "answer to x!")
    ]
    assert served.paths == ["/v1/receipts/chatcmpl-0", "/api/v1/receipts/chatcmpl-0"]
    assert set(served.keys) == {"Bearer secret"}


@pytest.mark.parametrize("before", [[425, 425], [404, 425], [429, 404]])
def test_a_receipt_that_comes_later(before: list[int]) -> None:
    with provider(before=list(before)) as (served, url), ReceiptClient(url) as client:
        assert len(client.chat("name", REQUEST).receipts) == 1
    assert len(served.paths) == 6


@pytest.mark.parametrize("status", [410, 503, 500])
def test_a_receipt_that_does_not_come_is_not_waited_for(status: int) -> None:
    with provider(gone=status) as (served, url), ReceiptClient(url) as client:
        assert client.chat("name", REQUEST).without_receipt == 1
    assert len(served.paths) == 2


def test_a_receipt_is_waited_for_no_longer_than_said() -> None:
    with provider(gone=404) as (served, url), ReceiptClient(url) as client:
        assert client.receipts("chatcmpl-0", 0.0) == []
    assert len(served.paths) == 2


@pytest.mark.parametrize(
    ("raw", "named"),
    [
        (b"{", "is not JSON"),
        (b"[]", "is no object"),
        (b"{}", "receipts is no list"),
        (b'{"receipts": {}}', "receipts is no list"),
        (b'{"receipts": [5]}', "receipts.0: body: "),
        (b'{"receipts": [{"receipt": {}}]}', "receipts.0: receipt.scheme: "),
    ],
)
def test_broken_receipts_are_named(raw: bytes, named: str) -> None:
    with (
        provider(raw=raw) as (_, url),
        ReceiptClient(url) as client,
        pytest.raises(ReportedError, match=named),
    ):
        client.chat("name", REQUEST)


def test_a_server_that_refuses_says_why() -> None:
    with (
        provider(status=503) as (_, url),
        ReceiptClient(url) as client,
        pytest.raises(NodeError, match=r"503 .*broken") as error,
    ):
        client.chat("name", REQUEST)
    assert error.value.status == 503


def test_a_response_without_an_id_is_named_before_receipts_are_asked() -> None:
    with provider() as (served, url), ReceiptClient(url) as client:
        served.app.router.routes.clear()
        served.app.add_api_route(CHAT, lambda: {"choices": []}, methods=["POST"])
        with pytest.raises(ReportedError, match=r"name: response\.id: Field required"):
            client.chat("name", REQUEST)
        assert served.paths == []


@pytest.mark.parametrize("body", [{}, {"data": []}, {"data": [5]}, {"data": {}}])
def test_a_server_that_names_no_model(body: Any) -> None:
    with provider() as (served, url), ReceiptClient(url) as client:
        served.app.router.routes.clear()
        served.app.add_api_route("/v1/models", lambda: body)
        with pytest.raises(NodeError, match="it names no model"):
            client.model()


def test_a_refused_connection() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
    refused = f"POST http://127.0.0.1:{port}/v1/chat/completions: "
    with (
        ReceiptClient(f"http://127.0.0.1:{port}") as client,
        pytest.raises(NodeError, match=refused),
    ):
        client.chat("name", REQUEST)


def test_a_url_that_is_none() -> None:
    with pytest.raises(ReportedError, match="http://a:port: Invalid port"):
        ReceiptClient("http://a:port")


def test_a_url_without_a_scheme() -> None:
    with pytest.raises(ReportedError, match="is no URL of a server: give one like http://"):
        ReceiptClient("gateway")


def test_an_id_cannot_lead_to_another_path() -> None:
    with provider(response_id="../../v1/models?x=") as (served, url), ReceiptClient(url) as client:
        assert client.receipts("../../v1/models?x=", 0.0) == []
    assert served.paths == []


def test_chats_are_asked_at_once_and_come_in_order() -> None:
    asked = [{**REQUEST, "messages": [{"role": "user", "content": f"{n}"}]} for n in range(8)]
    with provider(together=4) as (served, url), ReceiptClient(url) as client:
        chats = client.chats(asked, 4, Progress())
    assert [chat.choices[0].text for chat in chats] == [f"answer to {n}" for n in range(8)]
    assert [chat.name for chat in chats] == [f"chat {n}" for n in range(8)]
    assert served.most_at_once == 4


def test_the_log_is_read_page_by_page(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(collecting, "ENTRIES_AT_ONCE", 3)
    with provider() as (served, url), ReceiptClient(url) as client:
        assert client.log() == []
        for number in range(7):
            served.node.chat(f"chat {number}")
        assert client.log() == served.node.log()
        assert client.log(after=3) == served.node.log()[4:]
        assert client.log(after=6) == []


def test_a_log_that_never_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(collecting, "ENTRIES_AT_ONCE", 3)
    with provider(ignores_after=True) as (served, url), ReceiptClient(url) as client:
        for number in range(3):
            served.node.chat(f"chat {number}")
        with pytest.raises(NodeError, match="log: it does not go on after entry 2"):
            client.log()


@pytest.mark.parametrize(
    ("body", "named"),
    [({}, "entries is no list"), ({"entries": [{}]}, "log: entry"), ([], "is no object")],
)
def test_a_broken_log_is_named(body: Any, named: str) -> None:
    with provider() as (served, url), ReceiptClient(url) as client:
        served.app.router.routes.clear()
        served.app.add_api_route("/api/v1/receipts/log", lambda: body)
        with pytest.raises(ReportedError, match=named):
            client.log()
