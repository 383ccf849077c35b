"""Files of chats: what is written is read, and a bad field is named."""

import json
from copy import deepcopy
from pathlib import Path
from typing import Any

import pytest

from proofserve.reports import ReportedError
from proofserve.verifier.chat.conversation import (
    ChatChoice,
    Conversation,
    conversation,
    read,
    write,
)
from proofserve.wire.signed import signed_receipt_body
from support.provider import Node


@pytest.fixture
def chat() -> Conversation:
    return Node().chat("one")


@pytest.fixture
def body(chat: Conversation) -> dict[str, Any]:
    receipts = [signed_receipt_body(each) for each in chat.receipts]
    return deepcopy({"request": chat.request, "response": chat.response, "receipts": receipts})


def test_a_file_is_read_as_it_was_written(tmp_path: Path, chat: Conversation) -> None:
    path = tmp_path / "one.json"
    write(path, chat)
    found = read(path)
    assert found.name == "one.json"
    assert found.receipts == chat.receipts
    assert (found.request, found.response) == (chat.request, chat.response)
    assert (found.ended_ms, found.seen_ms) == (chat.ended_ms, chat.seen_ms) != (None, None)
    assert found.choices == (ChatChoice(0, "hello", (*map(ord, "hello"), 1)),)


def bad(path: Path, body: Any) -> str:
    path.write_text(body if isinstance(body, str) else json.dumps(body))
    with pytest.raises(ReportedError) as error:
        read(path)
    return str(error.value)


@pytest.mark.parametrize(
    ("where", "value", "named"),
    [
        (["request"], None, "request: "),
        (["request"], [], "request: "),
        (["receipts"], {}, "receipts: "),
        (["receipts", 0], 5, "receipts.0: "),
        (["more"], 1, "more: "),
        (["response", "id"], None, "response.id: "),
        (["response", "id"], "", "response.id: "),
        (["response", "choices"], [], "response.choices: "),
        (["response", "choices", 0, "index"], -1, "response.choices.0.index: "),
        (["response", "choices", 0, "token_ids"], [1, -1], "response.choices.0.token_ids.1: "),
        (["response", "choices", 0, "token_ids"], [2**32], "response.choices.0.token_ids.0: "),
        (["response", "choices", 0, "token_ids"], ["1"], "response.choices.0.token_ids.0: "),
        (["response", "choices", 0, "token_ids"], "12", "response.choices.0.token_ids: "),
        (["response", "choices", 0, "message", "content"], 5, "response.choices.0.message.content"),
        (["receipts", 0, "signature"], "00", "receipts.0: signature: "),
        (["receipts", 0, "receipt", "k_dim"], 8, "receipts.0: receipt.k_dim: "),
        (["receipts", 0, "receipt", "scheme"], "receipt-v2", "receipts.0: receipt.scheme: "),
        (["receipts", 0, "receipt", "output_tokens"], 7, "receipts.0: receipt.sketches: "),
        (["receipts", 0, "receipt", "secret"], 7, "receipts.0: receipt.secret: "),
    ],
)
def test_a_bad_field_is_named(
    tmp_path: Path, body: dict[str, Any], where: list[Any], value: Any, named: str
) -> None:
    *parents, last = where
    inner: Any = body
    for each in parents:
        inner = inner[each]
    inner[last] = value
    said = bad(tmp_path / "bad.json", body)
    assert named in said
    assert "bad.json" in said
    assert "\n" not in said


def test_files_that_are_no_chats(tmp_path: Path, body: dict[str, Any]) -> None:
    path = tmp_path / "bad.json"
    assert "not JSON of the expected kind" in bad(path, "{")
    assert "not JSON of the expected kind" in bad(path, [])
    del body["response"]
    assert "response: Field required" in bad(path, body)
    with pytest.raises(ReportedError, match=r"cannot read .*gone\.json"):
        read(tmp_path / "gone.json")


def test_a_choice_or_a_receipt_that_is_there_twice(tmp_path: Path, body: dict[str, Any]) -> None:
    """Else a node, or a client by mistake, would multiply the evidence of one answer."""
    path = tmp_path / "bad.json"
    twice = {**body, "receipts": body["receipts"] * 2}
    assert "receipts: choice 0 of one is there 2 times" in bad(path, twice)
    choices = body["response"]["choices"] * 3
    many = {**body, "response": {**body["response"], "choices": choices}}
    assert "response.choices: index 0 is there 3 times" in bad(path, many)


@pytest.mark.parametrize(
    ("message", "split"),
    [
        ({"content": "x"}, False),
        ({"content": "x", "reasoning": None, "tool_calls": []}, False),
        ({"content": "x", "reasoning": "hm"}, True),
        ({"content": "x", "reasoning_content": "hm"}, True),
        ({"content": None, "tool_calls": [{}]}, True),
    ],
)
def test_an_answer_whose_text_is_split(message: dict[str, Any], split: bool) -> None:
    response = {"id": "one", "choices": [{"index": 0, "message": message}]}
    choice = conversation("name", {}, response, []).choices[0]
    assert (choice.split, choice.text) == (split, message["content"])


def test_a_text_completion_has_its_text() -> None:
    response = {"id": "one", "choices": [{"index": 1, "text": "x", "finish_reason": "stop"}]}
    chat = conversation("name", {}, response, [])
    assert chat.choices == (ChatChoice(1, "x", None, finish_reason="stop"),)


def test_choices_without_a_receipt_are_counted(chat: Conversation) -> None:
    assert chat.without_receipt == 0
    response = {"id": "one", "choices": [{"index": 0}, {"index": 1}, {"index": 2}]}
    receipts = [signed_receipt_body(each) for each in chat.receipts]
    assert conversation("name", {}, response, receipts).without_receipt == 2
