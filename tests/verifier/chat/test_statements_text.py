"""Texts without token ids, texts that servers may honestly change, and sampling parameters."""

from dataclasses import replace
from typing import Any

import pytest

from proofserve.protocol.receipts.record import Sampling
from support.provider import END, TOKENIZER, Node

from .test_statements import asked, checked, choice_of, failure, node, shows, unknown

__all__ = ["node"]

IDS = tuple(map(ord, "think: yes"))


def test_ids_are_told_from_a_text_of_one_spelling(node: Node) -> None:
    chat = choice_of(node.chat("one"), token_ids=None)
    assert checked(chat).answers[0].output == (*map(ord, "hello"), END)


def test_a_text_with_several_spellings_proves_nothing(node: Node) -> None:
    """The node's tokens for "ab" may be one or two: it is not convicted, and not cleared."""
    chat = shows(node, (2, *map(ord, "ab")), "abab")
    assert len(checked(chat).answers) == 1
    assert 'ask with "return_token_ids": true' in unknown(choice_of(chat, token_ids=None))


def test_a_shorter_spelling_than_the_tokenizers_proves_nothing(node: Node) -> None:
    chat = shows(node, (2, 2, 2), "ababab")
    assert "cannot be told from its text" in unknown(choice_of(chat, token_ids=None))


@pytest.mark.parametrize(
    ("ids", "text"),
    [
        (IDS, "think: yes"),
        (IDS, " think: yes\n"),
        ((*IDS, END), "think: yes"),
        # A stop token that is not special, which the client does not see.
        ((*IDS, ord("#")), "think: yes"),
        # A last character whose bytes were not complete.
        ((*IDS, 0xFFFD), "think: yes"),
        (IDS, "think: yes\ufffd"),
        (IDS, None),
    ],
)
def test_a_text_that_fits(node: Node, ids: tuple[int, ...], text: str | None) -> None:
    assert len(checked(shows(node, ids, text)).answers) == 1


def test_a_text_that_ends_before_a_stop_string(node: Node) -> None:
    chat = shows(node, IDS, "think")
    assert "cut" in failure(chat).text
    assert len(checked(asked(chat, stop=[": y"])).answers) == 1


def test_reasoning_that_was_put_apart_comes_before_the_text(node: Node) -> None:
    ids = tuple(map(ord, "analysisthinkassistantfinal yes"))
    chat = shows(node, ids, "yes", split=True, reasoning="think")
    assert len(checked(chat).answers) == 1


@pytest.mark.parametrize(
    ("text", "fields", "request_fields"),
    [
        ("yes", {}, {}),
        ("", {}, {}),
        ("think", {"split": True}, {}),
        ("quite another", {"split": True}, {}),
        ("es", {"split": True, "reasoning": "another"}, {}),
        # What stands between may be a part of the text that was left out.
        ("yes", {"split": True, "reasoning": "think"}, {}),
        ("another", {"split": True, "reasoning": "think"}, {}),
        ("", {"split": True, "reasoning": "think"}, {}),
        ("hello think: yes", {}, {"echo": True}),
        ("think: yes</s>", {}, {"skip_special_tokens": False}),
        ("think", {}, {"tools": [{"type": "function"}]}),
    ],
)
def test_a_text_that_an_honest_server_may_show_is_no_fraud(
    node: Node, text: str, fields: dict[str, Any], request_fields: dict[str, Any]
) -> None:
    chat = asked(shows(node, IDS, text, **fields), **request_fields)
    assert "text" in unknown(chat)


def test_broken_characters_within_a_text_prove_nothing(node: Node) -> None:
    """Servers decode streams piece by piece, and broken bytes may then show otherwise."""
    chat = shows(node, (*IDS, 0xFFFD, ord("x")), "think: yes\ufffd\ufffdx")
    assert "text" in unknown(chat)


def stated(node: Node, **fields: Any) -> Any:
    return node.chat("one", sampling=Sampling(temperature=0.5, **fields))


def test_a_temperature_that_is_misreported(node: Node) -> None:
    chat = node.chat("one", sampling=Sampling(temperature=1.5))
    found = failure(chat)
    assert (found.check, found.text) == (
        "sampling",
        "temperature: the request has 0.5, the receipt 1.5",
    )


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("top_p", 0.9),
        ("top_k", 5),
        ("min_p", 0.1),
        ("presence_penalty", 1.0),
        ("frequency_penalty", 1.0),
        ("repetition_penalty", 1.1),
    ],
)
def test_every_parameter_is_compared(node: Node, field: str, value: float) -> None:
    as_asked = asked(stated(node, **{field: value}), **{field: value})
    assert len(checked(as_asked).answers) == 1
    neutral = getattr(Sampling(), field)
    assert failure(asked(stated(node), **{field: value})).text.startswith(f"{field}: the request")
    assert failure(asked(stated(node, **{field: value}), **{field: neutral})).check == "sampling"


@pytest.mark.parametrize(
    ("temperature", "used", "honest"),
    [(0.004, 0.01, True), (0.004, 0.004, True), (0.004, 0.0, False), (0.004, 0.02, False)],
)
def test_a_tiny_temperature_is_raised(
    node: Node, temperature: float, used: float, honest: bool
) -> None:
    chat = asked(node.chat("one", sampling=Sampling(used)), temperature=temperature)
    assert bool(checked(chat).answers) is honest


def test_what_a_server_ignores_in_a_greedy_answer_is_not_compared(node: Node) -> None:
    chat = node.chat("one", sampling=Sampling(temperature=0.0))
    chat = asked(chat, temperature=0, top_p=0.5, top_k=7, min_p=0.2)
    assert len(checked(chat).answers) == 1


def test_no_limit_of_top_k_is_minus_one_too(node: Node) -> None:
    assert len(checked(asked(stated(node), top_k=-1)).answers) == 1


def test_restricted_without_a_reason(node: Node) -> None:
    chat = stated(node, restricted=True)
    assert "restricted the tokens, which it did not" in failure(chat).text
    assert failure(asked(chat, logit_bias={}, min_tokens=0)).check == "sampling"


@pytest.mark.parametrize(
    "fields", [{"logit_bias": {"5": 1}}, {"min_tokens": 3}, {"thinking_token_budget": 9}]
)
def test_restricted_by_the_request(node: Node, fields: dict[str, Any]) -> None:
    found = checked(asked(stated(node, restricted=True), **fields)).answers
    assert found[0].sampling.restricted


@pytest.mark.parametrize("value", ["hot", [1], {}])
def test_a_request_with_a_parameter_that_is_no_number(node: Node, value: object) -> None:
    assert "request.temperature" in unknown(asked(stated(node), temperature=value))


def test_parameters_that_the_request_leaves_out_are_the_servers(node: Node) -> None:
    chat = stated(node, top_p=0.8, repetition_penalty=1.05)
    assert len(checked(chat).answers) == 1
    silent = {name: value for name, value in chat.request.items() if name != "temperature"}
    assert len(checked(replace(chat, request=silent)).answers) == 1
    assert TOKENIZER.prompt_ids(silent) == TOKENIZER.prompt_ids(chat.request)
