"""The fields that the gateway reads of a request body."""

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from proofserve.gateway.limits import USUAL_ANSWER, RequestFields, read_body

HELLO = [{"role": "user", "content": "hello"}]


def read(**body: Any) -> RequestFields:
    return read_body(json.dumps(body).encode())


@pytest.mark.parametrize(
    ("body", "answer"),
    [
        ({"messages": HELLO, "max_tokens": 7, "stream": True}, 7),
        ({"messages": HELLO, "max_completion_tokens": 8}, 8),
        ({"messages": HELLO}, USUAL_ANSWER),
        ({"prompt": "hello", "max_tokens": 9}, 9),
        ({"input": ["one", "two"], "encoding_format": "float"}, USUAL_ANSWER),
        ({"input": "hello", "max_output_tokens": 10, "instructions": "Be kind."}, 10),
    ],
)
def test_the_gateway_reads_the_bodies_of_all_endpoints(body: dict[str, Any], answer: int) -> None:
    order = read(model="tiny", **body)
    assert order.model == "tiny"
    assert order.most_tokens(1000) == 1000 + answer
    assert order.stream is body.get("stream", False)


def test_no_field_is_required() -> None:
    order = read()
    assert (order.model, order.most_tokens(2), order.beginning(10)) == (None, 2 + USUAL_ANSWER, b"")


def test_null_counts_as_a_missing_field() -> None:
    order = read(model=None, stream=None, max_tokens=None, max_completion_tokens=None, n=None)
    assert (order.model, order.most_tokens(0)) == (None, USUAL_ANSWER)


@pytest.mark.parametrize("which", ["max_tokens", "max_completion_tokens", "max_output_tokens"])
def test_the_largest_token_limit_counts(which: str) -> None:
    limits = {"max_tokens": 5, "max_completion_tokens": 0, "max_output_tokens": 6, which: 700}
    assert read(**limits).most_tokens(0) == 700


def test_an_answer_of_no_tokens_costs_no_completion_tokens() -> None:
    assert read(max_tokens=0).most_tokens(3) == 3


@pytest.mark.parametrize(("n", "answers"), [(3, 3), (1, 1), (None, 1), (0, 1), (-3, 1)])
def test_the_cost_counts_every_answer(n: int | None, answers: int) -> None:
    assert read(max_tokens=10, n=n).most_tokens(0) == 10 * answers
    assert read(n=n).most_tokens(0) == USUAL_ANSWER * answers


@pytest.mark.parametrize(
    ("prompt", "prompts"),
    [
        ("hello", 1),
        (["hello"], 1),
        (["hello", "you", "there"], 3),
        ([1, 2, 3], 1),
        ([[1, 2], [3]], 2),
        ([], 1),
        (None, 1),
    ],
)
def test_the_cost_counts_every_prompt(prompt: Any, prompts: int) -> None:
    for indent in (None, 2):
        body = json.dumps({"prompt": prompt, "max_tokens": 10, "n": 2}, indent=indent)
        assert read_body(body.encode()).most_tokens(0) == 20 * prompts


@given(
    prompts=st.lists(st.text('"\\[],:a\né')) | st.lists(st.lists(st.integers(0, 9))),
    indent=st.sampled_from([None, 1]),
    ascii_only=st.booleans(),
)
def test_prompts_of_any_type_are_counted(
    prompts: list[Any], indent: int | None, ascii_only: bool
) -> None:
    body = json.dumps({"prompt": prompts, "max_tokens": 1}, indent=indent, ensure_ascii=ascii_only)
    assert read_body(body.encode()).most_tokens(0) == max(1, len(prompts))


@pytest.mark.parametrize("which", ["max_tokens", "max_completion_tokens", "max_output_tokens"])
def test_a_negative_length_costs_nothing(which: str) -> None:
    assert read(**{which: -1000}, n=5).most_tokens(7) == 7


def test_the_gateway_ignores_unknown_fields() -> None:
    assert read(model="tiny", tools=[{"deep": [1, {"x": None}]}], seed="odd").model == "tiny"


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("model", 3),
        ("model", ["tiny"]),
        ("stream", "yes"),
        ("max_tokens", "ten"),
        ("max_tokens", 1.5),
        ("max_completion_tokens", {}),
        ("max_output_tokens", []),
        ("n", True),
        ("n", 2**31),
        ("max_tokens", 10**30),
        ("max_tokens", -(10**30)),
        ("max_completion_tokens", 10**4000),
    ],
)
def test_the_error_names_a_field_of_the_wrong_type(field: str, value: Any) -> None:
    with pytest.raises(ValueError, match=rf"\$\.{field}`"):
        read(**{field: value})


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"[]",
        b"null",
        b'"model"',
        b"{",
        b'{"model":"a"} and more',
        b'{"model":"\xff"}',
        b"\xef\xbb\xbf{}",
        b'{"tools":' + b"[" * 100_000,
        b'{"messages":' + b'{"a":' * 100_000,
    ],
)
def test_a_body_that_is_not_a_json_object_raises_value_error(body: bytes) -> None:
    with pytest.raises(ValueError, match=r"."):
        read_body(body)


@given(st.binary(max_size=100))
def test_any_bytes_raise_value_error_or_nothing(body: bytes) -> None:
    for each in (body, b'{"model":' + body, b'{"prompt":' + body + b"}"):
        try:
            order = read_body(each)
            order.beginning(10)
            assert order.most_tokens(10) >= 10
        except ValueError:
            continue


def test_the_prefix_is_the_start_of_the_messages_as_sent() -> None:
    order = read_body(b'{"stream":true,"messages": [ {"role":"user"}],"model":"m"}')
    assert order.beginning(1000) == b'[ {"role":"user"}]'
    assert order.beginning(3) == b"[ {"


@pytest.mark.parametrize("prompt", ["hello", ["hello", "you"], [1, 2, 3], [[1, 2], [3]]])
def test_the_prefix_of_every_kind_of_prompt(prompt: Any) -> None:
    assert read(prompt=prompt).beginning(100) == json.dumps(prompt).encode()


def test_a_longer_conversation_keeps_its_prefix() -> None:
    more = [*HELLO, {"role": "assistant", "content": "hi"}]
    length = len(json.dumps(HELLO)) - 1
    assert read(messages=HELLO).beginning(length) == read(messages=more).beginning(length)


def test_the_prefix_does_not_keep_the_body_alive() -> None:
    body = bytearray(b'{"prompt":"hello"}')
    beginning = read_body(bytes(body)).beginning(100)
    body[:] = b"x" * len(body)
    assert beginning == b'"hello"'
    assert type(beginning) is bytes


@pytest.mark.parametrize("value", ["8", 8.0])
def test_the_gateway_accepts_the_same_numbers_as_a_backend(value: Any) -> None:
    assert read(max_tokens=value, stream="true").most_tokens(0) == 8
