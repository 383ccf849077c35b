"""Windows of a watch, its totals, and what reports say."""

import json
import math
from collections.abc import Sequence
from dataclasses import replace
from functools import partial

import numpy as np
import pytest

from proofserve.lab.report import NodeError
from proofserve.protocol.receipts.record import Sampling
from proofserve.protocol.receipts.sketches import ReceiptScheme
from proofserve.protocol.verdict.sequential import SequentialResult
from proofserve.verifier.chat.answers import Answer
from proofserve.verifier.chat.conversation import Conversation
from proofserve.verifier.chat.findings import FailedCheck, Gap, GapKind
from proofserve.verifier.chat.verification import ChatVerification, Watch, distinct
from proofserve.verifier.judges import Chances, Opinion
from proofserve.verifier.verification import Verification
from support.provider import WEIGHTS, Node

FRAUD, HONEST, UNDECIDED, UNPROVED = (
    SequentialResult.FRAUD,
    SequentialResult.HONEST,
    SequentialResult.UNDECIDED,
    SequentialResult.UNPROVED,
)
CHANCES = Chances(1e-6, 1e-3)
outcome_of = partial(ChatVerification, origin="of a file", seed="a seed")


class Clears:
    """Clears windows of ``needed`` chats; convicts if a chat is named "cheat"."""

    def __init__(self, needed: int) -> None:
        self.needed = needed
        self.asked: list[tuple[list[str], Chances]] = []

    def __call__(self, window: Sequence[Conversation], chances: Chances) -> ChatVerification:
        names = [chat.name for chat in window]
        self.asked.append((names, chances))
        bad = (FailedCheck("answer", "it lies"),) if "cheat" in names else ()
        clear = HONEST if len(names) >= self.needed else UNDECIDED
        sketches = Verification(clear, (), ())
        missing = sum(chat.without_receipt for chat in window)
        choices = sum(len(chat.choices) for chat in window)
        gaps = (Gap(GapKind.MISSING, "no receipt"),) * missing
        return outcome_of(bad, sketches, None, choices - missing, gaps, choices)


@pytest.fixture
def node() -> Node:
    return Node()


def test_a_window_ends_when_it_clears(node: Node) -> None:
    judge = Clears(3)
    watch = Watch(judge, CHANCES)
    found = [watch.add([node.chat(f"{n}")]) for n in range(7)]
    assert found == [UNDECIDED, UNDECIDED, HONEST] * 2 + [UNDECIDED]
    assert [names for names, _ in judge.asked] == [
        ["0"], ["0", "1"], ["0", "1", "2"], ["3"], ["3", "4"], ["3", "4", "5"], ["6"],
    ]  # fmt: skip
    assert watch.honest == 2


def test_the_chances_of_all_windows_add_up_to_alpha(node: Node) -> None:
    judge = Clears(1)
    watch = Watch(judge, CHANCES)
    for number in range(400):
        watch.add([node.chat(f"{number}")] if number < 3 else [])
        judge.needed = 0
    alphas = [chances.alpha for _, chances in judge.asked]
    assert alphas[:3] == pytest.approx([1e-6 / 2, 1e-6 / 6, 1e-6 / 12])
    assert math.fsum(alphas) < 1e-6
    assert math.fsum(alphas) == pytest.approx(1e-6, rel=0.01)
    assert {chances.beta for _, chances in judge.asked} == {1e-3}


def test_missing_receipts_count_over_all_windows(node: Node) -> None:
    """One in ten is too many, whether or not each window by itself is cleared."""
    watch = Watch(Clears(1), CHANCES)
    chat = node.chat("one")
    two = replace(chat, choices=(*chat.choices, replace(chat.choices[0], index=1)))
    for _ in range(19):
        assert watch.add([chat]) is HONEST
    assert watch.add([two]) is HONEST
    assert watch.add([replace(chat, receipts=())]) is UNPROVED
    assert watch.unproved == "2 missing, of 22 answers: 9%, more than 5%"
    assert (watch.chats, watch.answers, watch.honest) == (21, 22, 21)
    for _ in range(18):
        found = watch.add([chat])
    assert found is HONEST


def test_a_second_receipt_does_not_stand_for_a_missing_one(node: Node) -> None:
    chat, other = node.chat("one"), node.chat("two", choice=5)
    assert replace(chat, receipts=(*chat.receipts, *other.receipts)).without_receipt == 0
    assert replace(chat, receipts=other.receipts).without_receipt == 1


def test_the_record_is_json_from_the_start(node: Node) -> None:
    watch = Watch(Clears(2), CHANCES)
    assert json.loads(json.dumps(watch.record()))["last"] is None
    watch.add([node.chat("one"), node.chat("cheat")])
    found = json.loads(json.dumps(watch.record()))
    assert found == {
        "chats": 2,
        "answers": 2,
        "gaps": {},
        "unproved": "",
        "times_cleared": 0,
        "unreadable": 0,
        "last": {
            "verdict": "fraud",
            "choices": 2,
            "answers": 2,
            "gaps": [],
            "notes": [],
            "failures": [{"check": "answer", "text": "it lies"}],
            "findings": [],
            "figures_from": "of a file",
            "seed": "a seed",
        },
    }


def test_a_report_says_why_and_what_is_missing() -> None:
    failures = (FailedCheck("prompt", "the node read 3 tokens"),)
    gaps = (Gap(GapKind.MISSING, "no receipt"), Gap(GapKind.UNCHECKED, "x choice 0: adapter"))
    outcome = outcome_of(failures, None, None, 3, gaps, 6)
    lines = list(outcome.lines())
    assert lines == [
        "3 answers with a receipt checked (seed a seed)",
        "  unproved: 1 missing, 1 not checked, of 6 answers: 33%, more than 5%",
        "  prompt    fraud: the node read 3 tokens",
        "  missing: no receipt",
        "  not checked: x choice 0: adapter",
        "Honest figures: of a file.",
    ]
    assert outcome.verdict is FRAUD


def test_a_report_of_tokens_alone_asks_for_more() -> None:
    tokens = Opinion("tokens", UNDECIDED, 64, "64 tokens fit", {})
    lines = list(outcome_of((), None, tokens, 1, (), 1).lines())
    assert lines[1:] == [
        "  tokens    undecided: 64 tokens fit",
        "More answers are needed: give several files.",
        "Honest figures: of a file.",
    ]


def test_a_report_of_what_no_kernel_explains_says_what_to_measure() -> None:
    unexplained = SequentialResult.UNEXPLAINED
    outcome = outcome_of((), Verification(unexplained, (), ()), None, 1, (), 1)
    assert outcome.verdict is unexplained
    said = " ".join(outcome.lines())
    assert "measure it: proofserve calibrate chat MODEL --url URL --out FILE" in said
    assert "More answers" not in said


@pytest.mark.parametrize(("result", "verdict"), [(HONEST, UNDECIDED), (FRAUD, FRAUD)])
def test_tokens_convict_but_never_clear(
    result: SequentialResult, verdict: SequentialResult
) -> None:
    outcome = outcome_of((), None, Opinion("tokens", result, 1, "", {}), 1, (), 1)
    assert outcome.verdict is verdict


def answer(name: str, prompt: tuple[int, ...], output: tuple[int, ...]) -> Answer:
    scheme = ReceiptScheme("key", WEIGHTS, 16)
    return Answer(name, prompt, output, Sampling(), scheme, np.zeros((len(output), 16), np.float32))


def test_an_answer_that_is_there_twice_counts_once() -> None:
    """Rounding errs alike in equal chats: repeated ones would convict an honest node."""
    all_of_them = [
        answer("a", (1, 2), (3,)),
        answer("b", (1,), (2, 3)),
        answer("c", (1, 2), (3,)),
        answer("d", (1, 2), (4,)),
        answer("e", (1, 2), (3,)),
    ]
    kept, repeated = distinct(all_of_them)
    assert [each.name for each in kept] == ["a", "b", "d"]
    assert [text.partition(";")[0] for text in repeated] == [
        "c: the same chat as a",
        "e: the same chat as a",
    ]


def test_chats_that_could_not_be_judged_yet_are_judged_later(node: Node) -> None:
    clears = Clears(2)

    def judge(window: Sequence[Conversation], chances: Chances) -> ChatVerification:
        if len(window) == 1:
            raise NodeError("the log cannot be reached")
        return clears(window, chances)

    watch = Watch(judge, CHANCES)
    with pytest.raises(NodeError):
        watch.add([node.chat("one")])
    assert watch.add([node.chat("two")]) is HONEST
    assert clears.asked[0][0] == ["one", "two"]
    assert watch.chats == 2
