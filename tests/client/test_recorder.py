"""Chats of an application with the official client, kept with their receipts."""

import json
from pathlib import Path
from typing import Any

import pytest
from openai import AsyncOpenAI

from proofserve.remote.recorder import Recorder
from support.provider import provider

from .support import ASK, client_of, honest, kept, raw_answer


def test_a_chat_is_kept_with_its_receipt(folder: Path) -> None:
    with provider(before=[425, 404]) as (served, url):
        with Recorder(folder) as recorder, client_of(recorder, url) as client:
            answer = client.chat.completions.create(**ASK)
        assert answer.choices[0].message.content == "answer to x"
    [chat] = kept(folder)
    assert chat.response_id == answer.id == "chatcmpl-0"
    assert chat.request == served.bodies[0] == {**ASK, "return_token_ids": True}
    assert chat.response == json.loads(served.sent[0])
    assert honest(chat) == 1
    assert set(served.keys) == {"Bearer secret"}
    assert served.paths[:2] == ["/v1/receipts/chatcmpl-0", "/api/v1/receipts/chatcmpl-0"]


@pytest.mark.parametrize("zipped", [False, True])
def test_a_stream_is_put_together(folder: Path, zipped: bool) -> None:
    """The official client stops reading at the last event, before the end of the body."""
    with (
        provider(zipped=zipped) as (_, url),
        Recorder(folder) as recorder,
        client_of(recorder, url) as client,
    ):
        events = client.chat.completions.create(**ASK, stream=True)
        text = "".join(event.choices[0].delta.content or "" for event in events)
    assert text == "answer to x"
    [chat] = kept(folder)
    assert chat.choices[0].text == text
    assert chat.response["choices"][0]["finish_reason"] == "stop"
    assert honest(chat) == 1


@pytest.mark.parametrize("stream", [False, True])
def test_two_choices(folder: Path, stream: bool) -> None:
    with provider() as (_, url), Recorder(folder) as recorder, client_of(recorder, url) as client:
        answer = client.chat.completions.create(**ASK, n=2, stream=stream)
        for _ in answer if stream else ():
            pass
    [chat] = kept(folder)
    assert [each.text for each in chat.choices] == ["answer to x", "answer to x!"]
    assert honest(chat) == 2


@pytest.mark.anyio
@pytest.mark.parametrize("stream", [False, True])
async def test_an_application_with_an_event_loop(folder: Path, stream: bool) -> None:
    with provider() as (_, url), Recorder(folder) as recorder:
        http = recorder.async_http_client()
        async with AsyncOpenAI(base_url=f"{url}/v1", api_key="secret", http_client=http) as client:
            answer = await client.chat.completions.create(**ASK, stream=stream)
            if stream:
                text = "".join([e.choices[0].delta.content or "" async for e in answer])
            else:
                text = answer.choices[0].message.content
    assert text == "answer to x"
    assert [honest(chat) for chat in kept(folder)] == [1]


@pytest.mark.parametrize("stream", [False, True])
def test_a_text_completion(folder: Path, stream: bool) -> None:
    with provider() as (_, url), Recorder(folder) as recorder, client_of(recorder, url) as client:
        answer = client.completions.create(model="toy", prompt="once", stream=stream)
        for _ in answer if stream else ():
            pass
    [chat] = kept(folder)
    assert (chat.choices[0].text, chat.receipts) == ("answer to text", ())


@pytest.mark.parametrize("body", [{}, {"stream": True}, {"n": 2, "stream": True}])
@pytest.mark.parametrize("zipped", [False, True])
def test_the_application_gets_the_servers_bytes(
    folder: Path, body: dict[str, Any], zipped: bool
) -> None:
    with (
        provider(zipped=zipped) as (served, url),
        Recorder(folder) as recorder,
        recorder.http_client() as http,
    ):
        assert raw_answer(http, url, **body) == served.sent[0]
    assert len(kept(folder)) == 1


def test_raw_bytes_of_a_packed_answer_pass_too(folder: Path) -> None:
    with (
        provider(zipped=True) as (served, url),
        Recorder(folder) as recorder,
        recorder.http_client() as http,
        http.stream("POST", f"{url}/v1/chat/completions", json=ASK) as answer,
    ):
        packed = b"".join(answer.iter_raw())
    assert len(packed) != len(served.sent[0])
    assert answer.headers["content-encoding"] == "gzip"
    assert [honest(chat) for chat in kept(folder)] == [1]


def test_a_share_of_zero_changes_nothing(folder: Path) -> None:
    with provider() as (served, url):
        with Recorder(folder, share=0.0) as recorder, client_of(recorder, url) as client:
            for _ in range(5):
                client.chat.completions.create(**ASK)
        assert served.bodies == [ASK] * 5
        assert served.paths == []
    assert kept(folder) == []


def test_a_share_is_kept(folder: Path) -> None:
    with (
        provider() as (_, url),
        Recorder(folder, share=0.5) as recorder,
        client_of(recorder, url) as client,
    ):
        for _ in range(60):
            client.chat.completions.create(**ASK)
    # Outside with a chance of 2e-6.
    assert 12 <= len(kept(folder)) <= 48


@pytest.mark.parametrize("share", [-0.1, 1.1, float("nan")])
def test_a_share_that_is_none(folder: Path, share: float) -> None:
    with pytest.raises(ValueError, match="share: "):
        Recorder(folder, share)


def test_other_requests_pass_untouched(folder: Path) -> None:
    with provider() as (served, url), Recorder(folder) as recorder, recorder.http_client() as http:
        assert http.get(f"{url}/v1/models").json() == {"data": [{"id": "toy"}]}
        body = b'{"input":  "x"}'
        assert http.post(f"{url}/v1/embeddings", content=body).content == body
    assert served.paths == []
    assert kept(folder) == []
