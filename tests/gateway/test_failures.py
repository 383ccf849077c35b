"""The gateway's error answers."""

import json
from typing import Any

import httptools
import httpx
import openai
import pytest

from proofserve.gateway import failures
from proofserve.gateway.failures import Failure

ALL = [each for each in vars(failures).values() if isinstance(each, Failure)]


class Answer:
    """An answer as a client's parser reads it."""

    def __init__(self, data: bytes) -> None:
        self.headers: dict[str, str] = {}
        self.body = b""
        self.chunks = self.completions = 0
        self.keep_alive = False
        self._parser = httptools.HttpResponseParser(self)
        self._parser.feed_data(data)
        self.status = self._parser.get_status_code()

    def on_header(self, name: bytes, value: bytes) -> None:
        assert name.decode() not in self.headers
        self.headers[name.decode()] = value.decode()

    def on_headers_complete(self) -> None:
        self.keep_alive = self._parser.should_keep_alive()

    def on_body(self, body: bytes) -> None:
        self.body += body

    def on_chunk_header(self) -> None:
        self.chunks += 1

    def on_message_complete(self) -> None:
        self.completions += 1


def ids(failure: Failure) -> str:
    return failure.code


@pytest.mark.parametrize("failure", ALL, ids=ids)
def test_every_failure_is_a_complete_answer_in_openais_shape(failure: Failure) -> None:
    answer = Answer(failure.answer(b"id-1", b"", keep_alive=True))
    assert answer.status == failure.status
    assert answer.completions == 1
    assert answer.headers["content-type"] == "application/json"
    assert int(answer.headers["content-length"]) == len(answer.body)
    assert answer.headers["x-request-id"] == "id-1"
    assert answer.keep_alive
    error: dict[str, Any] = json.loads(answer.body)["error"]
    assert list(error) == ["message", "type", "param", "code"]
    assert (error["message"], error["code"]) == (failure.message, failure.code)
    assert error["param"] == failure.param


def test_every_failure_has_its_own_code() -> None:
    assert len({failure.code for failure in ALL}) == len(ALL)


@pytest.mark.parametrize(
    ("status", "kind"),
    [
        (400, "invalid_request_error"),
        (401, "authentication_error"),
        (404, "invalid_request_error"),
        (429, "rate_limit_error"),
        (503, "server_error"),
    ],
)
def test_the_error_type_follows_from_the_status(status: int, kind: str) -> None:
    assert Failure(status, "code", "words").type == kind


@pytest.mark.parametrize(("seconds", "least"), [(0, 1), (0.2, 1), (1.5, 2), (60.0, 60)])
def test_retry_after_is_rounded_up(seconds: float, least: int) -> None:
    failure = failures.QUEUE_FULL.after(seconds)
    answer = Answer(failure.answer(b"id", b"", keep_alive=True))
    assert least <= int(answer.headers["retry-after"]) <= least + 1


def test_without_a_time_to_wait_there_is_no_retry_after() -> None:
    answer = Answer(failures.UNAUTHORIZED.answer(b"id", b"", keep_alive=True))
    assert "retry-after" not in answer.headers


def test_a_failure_can_add_headers_and_close_the_connection() -> None:
    answer = Answer(failures.SHUTTING_DOWN.answer(b"id", b"vary: Origin\r\n", keep_alive=False))
    assert answer.headers["vary"] == "Origin"
    assert answer.headers["connection"] == "close"
    assert not answer.keep_alive


def test_a_message_for_one_request_does_not_change_the_failure() -> None:
    said = failures.UNKNOWN_MODEL.saying("No “tiny”\r\nx: y")
    answer = Answer(said.answer(b"id", b"", keep_alive=True))
    assert json.loads(answer.body)["error"]["message"] == "No “tiny”\r\nx: y"
    assert int(answer.headers["content-length"]) == len(answer.body)
    assert (said.status, said.code) == (404, "model_not_found")
    assert failures.UNKNOWN_MODEL.message == "No backend serves this model."


@pytest.mark.parametrize("failure", ALL, ids=ids)
def test_a_stream_ends_with_one_event_and_its_last_chunk(failure: Failure) -> None:
    head = b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n"
    first = b"data: {}\n\n"
    before = b"%x\r\n%s\r\n" % (len(first), first)
    answer = Answer(head + before + failure.last_chunks())
    assert answer.completions == 1
    assert answer.chunks == 3
    events = answer.body.decode().split("\n\n")
    assert events[0] == "data: {}"
    assert events[2:] == [""]
    assert json.loads(events[1].removeprefix("data: "))["error"]["code"] == failure.code


def test_the_official_client_raises_an_error_for_a_broken_stream() -> None:
    def answer(_request: httpx.Request) -> httpx.Response:
        event = b"data: %s\n\n" % failures.STALL_TIMEOUT.body()
        return httpx.Response(200, headers={"content-type": "text/event-stream"}, content=event)

    with (
        openai.OpenAI(
            api_key="k",
            base_url="http://gateway/v1",
            http_client=httpx.Client(transport=httpx.MockTransport(answer)),
        ) as client,
        pytest.raises(openai.APIError, match="stopped in the middle"),
    ):
        list(client.completions.create(model="m", prompt="p", stream=True))


@pytest.mark.parametrize(
    ("failure", "error"),
    [
        (failures.UNAUTHORIZED, openai.AuthenticationError),
        (failures.UNKNOWN_MODEL, openai.NotFoundError),
        (failures.TOKEN_RATE, openai.RateLimitError),
        (failures.QUEUE_FULL, openai.InternalServerError),
    ],
    ids=str,
)
def test_the_official_client_raises_each_failure_as_its_own_error(
    failure: Failure, error: type[openai.APIStatusError]
) -> None:
    def answer(_request: httpx.Request) -> httpx.Response:
        return httpx.Response(failure.status, content=failure.body())

    with (
        openai.OpenAI(
            api_key="k",
            base_url="http://gateway/v1",
            max_retries=0,
            http_client=httpx.Client(transport=httpx.MockTransport(answer)),
        ) as client,
        pytest.raises(error) as caught,
    ):
        client.completions.create(model="m", prompt="p")
    assert (caught.value.code, caught.value.param) == (failure.code, failure.param)
