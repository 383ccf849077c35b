"""What receipts state, against chats: every lie is named."""

import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from proofserve.protocol.receipts.record import Sampling, SigningKey, token_hash
from proofserve.verifier.chat.conversation import ChatChoice, Conversation, PublicLog
from proofserve.verifier.chat.statements import (
    CheckedChats,
    FailedCheck,
    Gap,
    GapKind,
    NodeFacts,
    checked_answers,
)
from support.provider import END, TOKENIZER, WEIGHTS, Node, with_receipt

KNOWN = NodeFacts(WEIGHTS)


@pytest.fixture
def node() -> Node:
    return Node()


@pytest.fixture
def chat(node: Node) -> Conversation:
    return node.chat("one")


def checked(chat: Conversation, known: NodeFacts = KNOWN) -> CheckedChats:
    return checked_answers([chat], TOKENIZER, known)


def failure(chat: Conversation, known: NodeFacts = KNOWN) -> FailedCheck:
    """The only opinion about the chat."""
    found = checked(chat, known)
    assert {each.kind for each in found.gaps} <= {GapKind.MISSING}
    assert (found.answers, len(found.failures)) == ((), 1), found
    return found.failures[0]


def gap(chat: Conversation, known: NodeFacts = KNOWN) -> Gap:
    """The only opinion about the chat."""
    found = checked(chat, known)
    assert (found.answers, found.failures, len(found.gaps)) == ((), (), 1), found
    return found.gaps[0]


def unknown(chat: Conversation) -> str:
    found = gap(chat)
    assert found.kind is GapKind.UNCHECKED
    return found.text


def choice_of(chat: Conversation, **changes: Any) -> Conversation:
    return replace(chat, choices=(replace(chat.choices[0], **changes),))


def asked(chat: Conversation, **fields: Any) -> Conversation:
    return replace(chat, request={**chat.request, **fields})


def shows(node: Node, ids: tuple[int, ...], text: str | None, **fields: Any) -> Conversation:
    """A chat of which the client got ``ids`` and ``text``; ``fields`` are of its choice."""
    made = node.chat("shows")
    reason = "stop" if ids[-1:] == (END,) else "length"
    receipt = node.receipt("shows", made.request, ids, finish_reason=reason)
    choice = ChatChoice(0, text, ids)
    return with_receipt(replace(made, choices=(replace(choice, **fields),)), node.sign(receipt))


def test_an_honest_chat_is_an_answer(node: Node, chat: Conversation) -> None:
    known = NodeFacts(WEIGHTS, node.key.public_key, PublicLog(node.log(), node.key.public_key))
    found = checked(chat, known)
    assert (found.failures, found.gaps) == ((), ())
    answer = found.answers[0]
    receipt = chat.receipts[0].receipt
    assert answer.prompt == TOKENIZER.prompt_ids(chat.request)
    assert answer.output == (*map(ord, "hello"), END)
    assert answer.sketches.tobytes() == receipt.vectors.tobytes()
    assert (answer.scheme.key, answer.scheme.k_dim) == (receipt.sketch_key, receipt.k_dim)


def test_a_receipt_of_another_answer(node: Node, chat: Conversation) -> None:
    other = node.chat("two")
    found = failure(replace(chat, receipts=other.receipts))
    assert found == FailedCheck("answer", "the receipt is of response two, the answer of one")


def test_a_replayed_receipt_under_the_same_id(node: Node, chat: Conversation) -> None:
    """A node that names two responses alike shows the receipt of the first for the second."""
    second = choice_of(chat, token_ids=(*map(ord, "jolly"), END), text="jolly")
    assert failure(second) == FailedCheck("answer", "the receipt is of other tokens")


def test_a_receipt_of_a_choice_that_is_not_there(node: Node) -> None:
    assert failure(node.chat("one", choice=3)).text == "the response has no choice 3"


def test_a_receipt_of_another_nodes_key(chat: Conversation) -> None:
    known = NodeFacts(WEIGHTS, SigningKey.new().public_key)
    assert failure(chat, known) == FailedCheck("signature", "it is by another key than the node's")


def test_a_receipt_of_another_key_than_the_log(node: Node, chat: Conversation) -> None:
    other = Node(entries=list(node.entries))
    known = NodeFacts(WEIGHTS, log=PublicLog(other.log(), other.key.public_key))
    assert failure(chat, known).text == "it is by another key than the log's"


def flipped(raw: bytes) -> bytes:
    return bytes([raw[0] ^ 1]) + raw[1:]


@pytest.mark.parametrize(
    "changes",
    [
        {"sketches": flipped},
        {"output_sha256": lambda _: token_hash((1, 2))},
        {"sampling": lambda _: Sampling(temperature=0.4)},
        {"created_ms": lambda at: at - 1},
        {"choice": lambda _: 1},
        {"response_id": lambda _: "two"},
    ],
    ids=lambda changes: next(iter(changes)),
)
def test_a_receipt_that_was_altered_after_it_was_signed(
    chat: Conversation, changes: dict[str, Callable[[Any], Any]]
) -> None:
    signed = chat.receipts[0]
    new = {name: change(getattr(signed.receipt, name)) for name, change in changes.items()}
    altered = replace(signed, receipt=replace(signed.receipt, **new))
    assert failure(with_receipt(chat, altered)).check == "signature"


def test_an_entry_that_another_key_signed(node: Node, chat: Conversation) -> None:
    signed = chat.receipts[0]
    forged = replace(signed, entry_signature=SigningKey.new().sign(node.entries[0].hash))
    found = failure(with_receipt(chat, forged))
    assert found.check == "signature"
    assert "inclusion.entry_signature" in found.text


def test_an_altered_token(chat: Conversation) -> None:
    ids = chat.choices[0].token_ids or ()
    found = failure(choice_of(chat, token_ids=(ids[0] + 1, *ids[1:])))
    assert found == FailedCheck("answer", "the receipt is of other tokens")


def test_a_truncated_answer(chat: Conversation) -> None:
    ids = chat.choices[0].token_ids or ()
    found = failure(choice_of(chat, token_ids=ids[:3], text="hel"))
    assert found == FailedCheck("answer", "the receipt has 6 tokens, the answer 3")


def test_a_text_that_is_cut_while_the_ids_are_whole(chat: Conversation) -> None:
    assert "cut" in failure(choice_of(chat, text="hel")).text


def test_a_text_that_is_not_that_of_its_tokens(chat: Conversation) -> None:
    assert failure(choice_of(chat, text="hallo")).text.endswith("not that of its tokens")


def test_a_receipt_that_is_not_in_the_log(chat: Conversation) -> None:
    bare = replace(chat.receipts[0], inclusion=None, entry_signature=None)
    found = failure(with_receipt(chat, bare))
    assert found == FailedCheck("log", "the receipt is not in the log")


def test_a_receipt_that_is_not_under_its_entry(node: Node, chat: Conversation) -> None:
    other = node.chat("two").receipts[0]
    moved = replace(
        chat.receipts[0], inclusion=other.inclusion, entry_signature=other.entry_signature
    )
    found = failure(with_receipt(chat, moved))
    assert found.check == "log"
    assert found.text.startswith("path:")


@pytest.mark.parametrize(("after_ms", "late"), [(60_000, False), (61_000, True)])
def test_a_late_receipt_by_the_clients_clock(node: Node, after_ms: int, late: bool) -> None:
    """The node's clock says nothing: it may be wrong by minutes, or lie."""
    chat = node.chat("one")
    ended = chat.receipts[0].receipt.created_ms - 3_600_000
    chat = replace(chat, ended_ms=ended, seen_ms=ended + after_ms)
    if late:
        text = "one choice 0: its receipt was there 61 s after its end, not within 60 s"
        assert gap(chat) == Gap(GapKind.LATE, text)
        assert len(checked(chat, replace(KNOWN, late_ms=61_000)).answers) == 1
    else:
        assert len(checked(chat).answers) == 1


def test_a_receipt_that_was_fetched_later_counts_if_its_root_was_seen_soon(
    node: Node, chat: Conversation
) -> None:
    ended = chat.ended_ms
    assert ended is not None
    later = replace(chat, seen_ms=ended + 86_400_000)
    assert gap(later).kind is GapKind.LATE
    for after, found in ((60_000, 1), (60_001, 0)):
        log = PublicLog(node.log(), node.key.public_key, {0: ended + after})
        assert len(checked(later, NodeFacts(WEIGHTS, log=log)).answers) == found


def test_without_a_clock_of_the_clients_nothing_is_known(node: Node, chat: Conversation) -> None:
    """Its node can put yesterday's time into its log."""
    for times in ({"ended_ms": None}, {"seen_ms": None}):
        assert "did not note by its own clock" in unknown(replace(chat, **times))
    late = with_receipt(chat, Node(key=node.key).sign(chat.receipts[0].receipt, 61_000))
    found = gap(replace(late, seen_ms=None))
    assert (found.kind, "entered the log 61 s after" in found.text) == (GapKind.LATE, True)


@pytest.mark.parametrize(
    ("ids", "reason", "fields", "told", "said"),
    [
        ("hell", "length", {"max_tokens": 1000}, None, "it ends at 4 of 1000 tokens"),
        ("hell", "length", {"max_tokens": 4}, None, ""),
        ("hell", "length", {"max_tokens": 9, "max_completion_tokens": 4}, "length", ""),
        ("hell", "length", {"max_tokens": 3}, None, "of which the request asked for 3 at most"),
        ("hell", "length", {}, "stop", "the receipt says that it ended by length, the answer stop"),
        ("hell", "stop", {}, None, "it stopped before a token or a text that ends an answer"),
        ("hell", "stop", {"stop": "ell"}, "stop", ""),
        ("hell", "stop", {"stop": ["x", "ell"]}, "stop", ""),
        ("hell", "stop", {"stop_token_ids": [ord("l")]}, "tool_calls", ""),
        ("hell", "abort", {}, None, "it ended by abort"),
    ],
)
def test_how_an_answer_ended(
    node: Node, ids: str, reason: str, fields: dict[str, Any], told: str | None, said: str
) -> None:
    tokens = tuple(map(ord, ids))
    chat = asked(node.chat("one", ids, finish_reason=reason), **fields)
    receipt = node.receipt("one", chat.request, tokens, finish_reason=reason)
    chat = choice_of(with_receipt(chat, node.sign(receipt)), token_ids=tokens, finish_reason=told)
    if said:
        found = gap(chat)
        assert found.kind is GapKind.CUT
        assert said in found.text
    else:
        assert len(checked(chat).answers) == 1


def test_an_answer_may_fill_the_model(node: Node) -> None:
    chat = asked(node.chat("one", finish_reason="length"), max_tokens=1000)
    tokens = len(TOKENIZER.prompt_ids(chat.request)) + 6
    for longest, answers in ((tokens, 1), (tokens + 1, 0)):
        known = NodeFacts(WEIGHTS, vocabulary=2**20, longest=longest)
        assert len(checked(chat, known).answers) == answers


def test_a_receipt_that_the_public_log_does_not_have(node: Node, chat: Conversation) -> None:
    log = PublicLog(node.log(), node.key.public_key)
    late = node.chat("two")
    assert failure(late, NodeFacts(WEIGHTS, log=log)).text == "log: it has no entry 1"


def test_a_log_that_shows_another_entry_than_the_receipt(node: Node, chat: Conversation) -> None:
    public = Node(key=node.key)
    public.chat("another")
    log = PublicLog(public.log(), node.key.public_key)
    assert (
        failure(chat, NodeFacts(WEIGHTS, log=log)).text == "log: it forks: it has another entry 0"
    )


def test_a_log_that_does_not_hold_fails_every_receipt(chat: Conversation) -> None:
    forks = FailedCheck("log", "it forks")
    assert failure(chat, NodeFacts(WEIGHTS, log=forks)) == forks


def test_another_prompt_than_the_clients(node: Node) -> None:
    shorter = node.chat("one", prompt_tokens=2, prompt_sha256=token_hash((5, 6)))
    assert failure(shorter).check == "prompt"
    same_length = len(TOKENIZER.prompt_ids(shorter.request))
    found = failure(node.chat("one", prompt_tokens=same_length, prompt_sha256=token_hash((5,))))
    assert found.text.startswith(f"the node read {same_length} tokens, which are not the")


@pytest.mark.parametrize(
    "fields",
    [
        {"tools": [{"type": "function"}]},
        {"truncate_prompt_tokens": 4},
        {"messages": [{"role": "user", "content": "one", "tool_calls": []}]},
    ],
)
def test_a_prompt_that_servers_may_read_in_several_ways_proves_nothing(
    node: Node, fields: dict[str, Any]
) -> None:
    chat = asked(node.chat("one", prompt_sha256=token_hash((5,))), **fields)
    assert "one choice 0: prompt:" in unknown(chat)


def test_a_template_that_writes_the_date_proves_nothing(node: Node) -> None:
    class Dated(type(TOKENIZER)):  # type: ignore[misc]
        tells_time = True

    found = checked_answers([node.chat("one", prompt_sha256=token_hash((5,)))], Dated(), KNOWN)
    assert not found.failures
    assert len(found.gaps) == 1


@pytest.mark.parametrize("ids", [[-1], [2**32]])
def test_a_prompt_of_impossible_ids_is_named(chat: Conversation, ids: list[int]) -> None:
    long = [*ids, *range(len(TOKENIZER.prompt_ids(chat.request)) - 1)]
    request = {"prompt": long, "temperature": 0.5}
    assert "request.prompt" in unknown(replace(chat, request=request))


def test_an_adapter_is_not_checked_and_one_that_nobody_asked_for_is_other_weights(
    node: Node,
) -> None:
    chat = node.chat("one", adapter="tuned")
    assert "adapter: tuned cannot be checked" in unknown(asked(chat, model="tuned"))
    found = gap(asked(chat, model="toy"))
    assert found.kind is GapKind.OTHER
    assert "the receipt has tuned, which the request did not name" in found.text


def test_another_checkpoint_is_other_weights(node: Node) -> None:
    found = gap(node.chat("one", weights_digest="cd" * 32))
    assert found.kind is GapKind.OTHER
    assert f"weights_digest: the receipt has {'cd' * 32}, the checkpoint {WEIGHTS}" in found.text


def test_a_receipt_that_cannot_be_checked_hides_no_other(node: Node) -> None:
    """A node must not save a bad receipt by a second one of another checkpoint."""
    chat = node.chat("one")
    ids = chat.choices[0].token_ids or ()
    two = replace(chat, choices=(*chat.choices, replace(chat.choices[0], index=1)))
    lie = node.sign(node.receipt("one", chat.request, ids[:-1]))
    odd = node.sign(node.receipt("one", chat.request, ids, choice=1, weights_digest="cd" * 32))
    for receipts in [(lie, odd), (odd, lie)]:
        found = checked(replace(two, receipts=receipts))
        assert [each.check for each in found.failures] == ["answer"]
        assert [each.kind for each in found.gaps] == [GapKind.OTHER]


def test_two_choices_are_two_answers(node: Node) -> None:
    chat = node.chat("one")
    ids = tuple(map(ord, "other"))
    two = replace(chat, choices=(*chat.choices, ChatChoice(1, "other", ids)))
    receipt = node.receipt("one", chat.request, ids, choice=1, finish_reason="length")
    found = checked(replace(two, receipts=(*chat.receipts, node.sign(receipt))))
    assert [each.output for each in found.answers] == [(*map(ord, "hello"), END), ids]


def test_the_entry_of_a_receipt_may_be_any_of_the_log(node: Node) -> None:
    chats = [node.chat(f"chat {n}") for n in range(4)]
    log = PublicLog(node.log()[2:], node.key.public_key)
    assert len(checked(chats[3], NodeFacts(WEIGHTS, log=log)).answers) == 1
    assert failure(chats[1], NodeFacts(WEIGHTS, log=log)).text == "log: it has no entry 1"


def readable(chat: Conversation, vocabulary: int, longest: int) -> CheckedChats:
    return checked(chat, NodeFacts(WEIGHTS, vocabulary=vocabulary, longest=longest))


def test_what_the_checkpoint_cannot_read_ends_no_check(node: Node) -> None:
    """A node may sign any ids, and answers of any length."""
    chat = node.chat("one", "hello\u1234")
    length = len(TOKENIZER.prompt_ids(chat.request)) + 6
    assert len(readable(chat, 0x1235, length).answers) == 1
    assert readable(chat, 0x1234, length).failures == (
        FailedCheck("answer", f"one choice 0: the model has no token {0x1234}"),
    )
    [found] = readable(chat, 0x1235, length - 1).gaps
    assert found.text == f"one choice 0: {length} tokens exceed the model's {length - 1}"
    [found] = readable(asked(chat, prompt=[]), ord("<"), length).gaps
    assert found.text == f"one choice 0: prompt: the model has no token {ord('u')}"


def test_an_answer_without_tokens_is_not_checked(node: Node) -> None:
    empty = node.chat("one")
    receipt = node.receipt("one", empty.request, ())
    chat = with_receipt(choice_of(empty, token_ids=(), text=""), node.sign(receipt))
    [found] = readable(chat, 2**32, 100).gaps
    assert found.text == "one choice 0: the prompt or the answer has no tokens"


@pytest.mark.parametrize("temperature", [math.nan, math.inf, 10**400, "hot"])
def test_a_request_that_no_server_takes_convicts_nobody(
    chat: Conversation, temperature: object
) -> None:
    changed = replace(chat, request={**chat.request, "temperature": temperature})
    assert "request.temperature" in unknown(changed)
