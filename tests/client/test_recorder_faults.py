"""Whatever a server, a disk or an application does, a recorder changes no answer."""

import json
import logging
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import openai
import pytest
from fastapi import Response
from fastapi.responses import StreamingResponse

from proofserve.remote import recorder as receipts
from proofserve.remote.recorder import Recorder
from support.provider import provider

from .support import ASK, client_of, kept, raw_answer


@pytest.mark.parametrize("content", [b"{", b"[1]", b"\xff", b"[" * 100_000])
def test_a_request_that_is_no_json_object_gets_the_servers_own_answer(
    folder: Path, content: bytes
) -> None:
    with provider() as (_, url), Recorder(folder) as recorder, recorder.http_client() as http:
        assert http.post(f"{url}/v1/chat/completions", content=content).status_code >= 400
    assert kept(folder) == []


def test_a_body_in_chunks_with_odd_characters(folder: Path) -> None:
    """Half a surrogate pair is JSON, but no UTF-8."""

    def chunks() -> Iterator[bytes]:
        raw = json.dumps({**ASK, "user": "\ud800"}).encode()
        yield raw[:10]
        yield raw[10:]

    with provider() as (served, url), Recorder(folder) as recorder, recorder.http_client() as http:
        answer = http.post(
            f"{url}/v1/chat/completions",
            content=chunks(),
            headers={"content-type": "application/json"},
        )
    assert answer.content == served.sent[0]
    assert served.bodies[0]["user"] == "\ud800"
    assert len(list(folder.iterdir())) == 1


def test_a_server_that_refuses_token_ids_gets_the_clients_request(folder: Path) -> None:
    with (
        provider(refuses_fields=True) as (served, url),
        Recorder(folder) as recorder,
        client_of(recorder, url) as client,
    ):
        answer = client.chat.completions.create(**ASK)
    assert answer.choices[0].message.content == "answer to x"
    assert served.bodies[-1] == ASK
    assert kept(folder) == []


@pytest.mark.anyio
async def test_a_server_that_refuses_token_ids_and_an_event_loop(folder: Path) -> None:
    with provider(refuses_fields=True) as (served, url), Recorder(folder) as recorder:
        async with recorder.async_http_client() as http:
            answer = await http.post(f"{url}/v1/chat/completions", json=ASK)
    assert answer.content == served.sent[0]
    assert served.bodies[-1] == ASK


def test_a_server_that_fails(folder: Path) -> None:
    with (
        provider(status=500) as (_, url),
        Recorder(folder) as recorder,
        client_of(recorder, url) as client,
        pytest.raises(openai.InternalServerError, match="500"),
    ):
        client.chat.completions.create(**ASK)
    with (
        Recorder(folder) as recorder,
        client_of(recorder, url) as client,
        pytest.raises(openai.APIConnectionError),
    ):
        client.chat.completions.create(**ASK)
    assert kept(folder) == []


@pytest.mark.parametrize(
    "habits",
    [{"gone": 404}, {"gone": 503}, {"gone": 410}, {"raw": b"{"}, {"raw": b"[]"}, {"raw": b"{}"}],
)
def test_a_server_without_receipts(
    folder: Path, habits: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A chat without a receipt is kept: how many there are matters."""
    monkeypatch.setattr(receipts, "RECEIPT_S", 0.1)
    with (
        provider(**habits) as (_, url),
        Recorder(folder) as recorder,
        client_of(recorder, url) as client,
    ):
        client.chat.completions.create(**ASK)
    [chat] = kept(folder)
    assert (chat.receipts, chat.without_receipt) == ((), 1)


def test_a_server_that_is_gone_after_its_answer(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(receipts, "RECEIPT_S", 1.0)
    recorder = Recorder(folder)
    with provider() as (served, url), recorder.http_client() as http:
        served.habits.before = [425] * 10_000
        raw_answer(http, url)
    recorder.close()
    assert [chat.receipts for chat in kept(folder)] == [()]


@pytest.mark.parametrize("zipped", [False, True])
def test_a_client_that_stops_reading_early_keeps_nothing(folder: Path, zipped: bool) -> None:
    with (
        provider(zipped=zipped, text="data: [DONE]") as (_, url),
        Recorder(folder) as recorder,
        recorder.http_client() as http,
    ):
        for body in ({**ASK, "stream": True}, ASK):
            path = f"{url}/v1/chat/completions"
            with http.stream("POST", path, json=body) as answer:
                next(answer.iter_raw(16))
    assert kept(folder) == []


@pytest.mark.parametrize(
    "habits", [{"cut": 1, "finish": None}, {"error": True}, {"cut": 4}, {"finish": None}]
)
def test_a_stream_that_the_server_did_not_end_is_not_kept(
    folder: Path, habits: dict[str, Any], caplog: pytest.LogCaptureFixture
) -> None:
    with (
        provider(**habits) as (served, url),
        Recorder(folder) as recorder,
        recorder.http_client() as http,
        caplog.at_level(logging.WARNING),
    ):
        assert raw_answer(http, url, stream=True) == served.sent[0]
        recorder.close()
    assert kept(folder) == []
    assert "a chat was not kept: its answer has no id, or no end" in caplog.text


def test_two_answers_with_the_same_id_are_both_kept(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A server must not make an application forget a chat."""
    monkeypatch.setattr(receipts, "RECEIPT_S", 0.1)
    with (
        provider(response_id="../same") as (_, url),
        Recorder(folder) as recorder,
        client_of(recorder, url) as client,
    ):
        for text in ("x", "y"):
            message = {"role": "user", "content": text}
            client.chat.completions.create(**{**ASK, "messages": [message]})
    assert {chat.request["messages"][0]["content"] for chat in kept(folder)} == {"x", "y"}
    assert {path.parent for path in folder.rglob("*.json")} == {folder}


def test_a_client_that_outlives_the_recorder(folder: Path, caplog: Any) -> None:
    with provider() as (served, url):
        recorder = Recorder(folder)
        with client_of(recorder, url) as client, caplog.at_level(logging.WARNING):
            recorder.close()
            answer = client.chat.completions.create(**ASK)
    assert answer.choices[0].message.content == "answer to x"
    assert kept(folder) == []
    assert "the recorder is closed" in caplog.text
    assert len(served.bodies) == 1


def test_a_full_disk_or_a_lost_folder_changes_no_answer(folder: Path, caplog: Any) -> None:
    with (
        provider() as (_, url),
        caplog.at_level(logging.WARNING),
        Recorder(folder) as recorder,
        client_of(recorder, url) as client,
    ):
        folder.rmdir()
        answer = client.chat.completions.create(**ASK)
    assert answer.choices[0].message.content == "answer to x"
    assert "a chat was not kept" in caplog.text


def test_chats_beyond_those_that_may_wait_are_left_out(
    folder: Path, monkeypatch: pytest.MonkeyPatch, caplog: Any
) -> None:
    monkeypatch.setattr(receipts, "MOST_WAITING", 2)
    with (
        provider(before=[425] * 100_000) as (served, url),
        caplog.at_level(logging.WARNING),
        Recorder(folder) as recorder,
        client_of(recorder, url) as client,
    ):
        for _ in range(5):
            client.chat.completions.create(**ASK)
        served.habits.before.clear()
    assert len(kept(folder)) == 2
    assert caplog.text.count("2 wait for their receipts") == 3


def test_a_file_appears_only_complete(folder: Path) -> None:
    """Whoever looks while chats end sees whole files."""
    with provider() as (_, url), Recorder(folder) as recorder, client_of(recorder, url) as client:
        for _ in range(40):
            client.chat.completions.create(**ASK)
            for path in folder.glob("*.json"):
                assert json.loads(path.read_text())["receipts"]
    assert len(kept(folder)) == 40


def test_reasoning_and_calls_of_tools_are_kept_apart(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(receipts, "RECEIPT_S", 0.1)
    deltas: list[dict[str, Any]] = [
        {"role": "assistant", "content": ""},
        {"reasoning": "hm"},
        {"reasoning": "m"},
        {"tool_calls": [{"index": 0, "function": {"name": "f"}}]},
        {"content": "hi"},
    ]
    events = [{"id": "a", "choices": [{"index": 0, "delta": each}]} for each in deltas]
    events[-1]["choices"][0]["finish_reason"] = "stop"  # type: ignore[index]
    raw = "".join(f"data: {json.dumps(each)}\r\n\r\n" for each in events).encode()
    with provider() as (served, url), Recorder(folder) as recorder:
        served.app.router.routes.clear()
        served.app.add_api_route(
            "/v1/chat/completions",
            lambda: Response(raw, media_type="text/event-stream"),
            methods=["POST"],
        )
        with recorder.http_client() as http:
            raw_answer(http, url, stream=True)
    [chat] = kept(folder)
    assert chat.response["choices"][0]["message"]["reasoning"] == "hmm"
    assert (chat.choices[0].text, chat.choices[0].split) == ("hi", True)


def test_a_client_that_leaves_before_the_second_choice_keeps_nothing(folder: Path) -> None:
    """The first choice has ended, and its text looks like the end of a stream."""
    left = threading.Event()
    choice = {"index": 0, "delta": {"content": "data: [DONE]"}, "finish_reason": "stop"}

    def events() -> Iterator[bytes]:
        yield b"data: " + json.dumps({"id": "a", "choices": [choice]}).encode() + b"\n\n"
        left.wait(60)
        second = {"id": "a", "choices": [{**choice, "index": 1}]}
        yield b"data: " + json.dumps(second).encode() + b"\n\ndata: [DONE]\n\n"

    with provider() as (served, url), Recorder(folder) as recorder, recorder.http_client() as http:
        served.app.router.routes.clear()
        served.app.add_api_route(
            "/v1/chat/completions", lambda: StreamingResponse(events()), methods=["POST"]
        )
        body = {**ASK, "n": 2, "stream": True}
        with http.stream("POST", f"{url}/v1/chat/completions", json=body) as answer:
            assert "[DONE]" in next(answer.iter_lines())
        left.set()
    assert kept(folder) == []
