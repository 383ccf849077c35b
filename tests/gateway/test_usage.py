"""Token counts that the gateway reads from the end of an answer."""

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from proofserve.gateway.answer import TAIL_BYTES, BackendResponse, read_usage, tail_of
from proofserve.gateway.gateway import Usage
from proofserve.gateway.metrics import Series

COUNTS = {"prompt_tokens": 12, "total_tokens": 17, "completion_tokens": 5}


def tokens_of(answer: bytes) -> tuple[int, int] | None:
    found = read_usage(answer)
    return found and (found.prompt, found.completion)


def plain(**more: Any) -> bytes:
    choice = {"index": 0, "message": {"role": "assistant", "content": more.pop("text", "Hi")}}
    answer = {"id": "x", "object": "chat.completion", "choices": [choice], "usage": COUNTS}
    return json.dumps({**answer, **more}).encode()


def event(body: object) -> bytes:
    data = b"data: %s\n\n" % json.dumps(body, separators=(",", ":")).encode()
    return b"%x\r\n%s\r\n" % (len(data), data)


def test_usage_of_a_plain_answer() -> None:
    assert tokens_of(plain()) == (12, 5)
    assert tokens_of(plain(prompt_logprobs=None, kv_transfer_params=None)) == (12, 5)


@pytest.mark.parametrize("separators", [(",", ":"), (", ", ": "), (",", ":\n  ")])
def test_usage_with_any_spaces(separators: tuple[str, str]) -> None:
    body = json.dumps({"usage": COUNTS}, separators=separators).encode()
    assert tokens_of(body) == (12, 5)


def test_usage_in_the_last_event_of_a_stream() -> None:
    stream = (
        event({"choices": [{"delta": {"content": "Hi"}}], "usage": None})
        + event({"choices": [], "usage": COUNTS})
        + b"e\r\ndata: [DONE]\n\n\r\n0\r\n\r\n"
    )
    assert tokens_of(stream) == (12, 5)


def test_the_last_of_several_counts_is_read() -> None:
    counts = [{"prompt_tokens": 12, "completion_tokens": n} for n in range(6)]
    stream = b"".join(event({"choices": [], "usage": each}) for each in counts)
    assert tokens_of(stream) == (12, 5)


def test_a_stream_without_usage_gives_no_usage() -> None:
    stream = event({"choices": [{"delta": {"content": "Hi"}}]}) + b"e\r\ndata: [DONE]\n\n\r\n"
    assert tokens_of(stream) is None
    assert tokens_of(event({"choices": [], "usage": None})) is None


def test_usage_with_the_names_of_the_responses_api() -> None:
    usage = {
        "input_tokens": 9,
        "input_tokens_details": {"cached_tokens": 0},
        "output_tokens": 4,
        "total_tokens": 13,
    }
    response = {"response": {"output": [], "usage": usage, "user": None}, "type": "completed"}
    assert tokens_of(event(response)) == (9, 4)


def test_embeddings_have_no_completion_tokens() -> None:
    body = {"data": [], "usage": {"prompt_tokens": 8, "total_tokens": 8}}
    assert tokens_of(json.dumps(body).encode()) == (8, 0)
    body = {"usage": {"prompt_tokens": 8, "completion_tokens": None}}  # type: ignore[dict-item]
    assert tokens_of(json.dumps(body).encode()) == (8, 0)


@pytest.mark.parametrize(
    "text",
    [
        '"usage":{"prompt_tokens":1000000}',
        'Say "usage": {"prompt_tokens": 1, "completion_tokens": 1}',
        r"\"usage\":{\"prompt_tokens\":1}",
        'ends with "usage":',
    ],
)
def test_a_usage_object_inside_the_models_text_is_not_counted(text: str) -> None:
    said = event({"choices": [{"delta": {"content": text}}]})
    assert tokens_of(said) is None
    assert tokens_of(event({"usage": COUNTS}) + said) == (12, 5)
    assert tokens_of(plain(text=text)) == (12, 5)


@given(st.text())
def test_no_text_of_the_model_is_read_as_usage(text: str) -> None:
    assert tokens_of(event({"choices": [{"delta": {"content": '"usage":' + text}}]})) is None


@pytest.mark.parametrize("cut", range(1, len(plain())))
def test_a_truncated_tail_gives_the_whole_usage_or_none(cut: int) -> None:
    assert tokens_of(plain()[cut:]) in {(12, 5), None}
    assert tokens_of(plain()[:-cut]) in {(12, 5), None}


@pytest.mark.parametrize(
    "value",
    [
        "null",
        "7",
        "[]",
        '"much"',
        "{}",
        '{"prompt_tokens":"7"}',
        '{"prompt_tokens":1.5}',
        '{"prompt_tokens":true}',
        '{"prompt_tokens":-5}',
        '{"completion_tokens":7}',
        '{"prompt_tokens":7',
        "",
        "[" * TAIL_BYTES,
        '{"x":' + "[" * TAIL_BYTES + "}",
        '{"a":' * (TAIL_BYTES // 5),
    ],
)
def test_garbage_gives_no_usage(value: str) -> None:
    assert tokens_of(b'"usage":' + value.encode()) is None


@given(st.binary(max_size=200), st.binary(max_size=200))
def test_no_bytes_raise(before: bytes, after: bytes) -> None:
    tokens_of(after)
    tokens_of(before + b'"usage":' + after)
    tokens_of(before + b'"usage":{"prompt_tokens":' + after)


@given(st.lists(st.binary(max_size=3 * TAIL_BYTES), max_size=8))
def test_the_tail_is_the_end_of_all_pieces(parts: list[bytes]) -> None:
    tail = b""
    for part in parts:
        tail = tail_of(tail, part)
    assert tail == b"".join(parts)[-TAIL_BYTES:]


def test_a_usage_object_in_pieces_is_whole_in_the_tail() -> None:
    tail = b""
    for byte in b"x" * 5000 + plain():
        tail = tail_of(tail, bytes([byte]))
    assert len(tail) == TAIL_BYTES
    assert tokens_of(tail) == (12, 5)


@pytest.mark.parametrize(
    ("status", "body", "tokens"), [(200, plain(), 17), (200, b"{}", None), (400, b"{}", 0)]
)
def test_prompt_and_completion_tokens_count_and_a_refusal_costs_nothing(
    status: int, body: bytes, tokens: int | None
) -> None:
    assert BackendResponse(status, b"", body, Series(), 0.0, Usage.LAST).end(1.0) == tokens
