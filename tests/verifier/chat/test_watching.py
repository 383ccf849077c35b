"""Windows of a watch, its totals, and what reports say."""

import json
import math
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from proofserve.protocol.receipts.record import Sampling
from proofserve.protocol.receipts.sketches import ReceiptScheme
from proofserve.protocol.verdict.counting import SequentialResult
from proofserve.reports import NodeError, ReportedError
from proofserve.verifier.chat.answers import Answer
from proofserve.verifier.chat.conversation import Conversation
from proofserve.verifier.chat.statements import FailedCheck, Gap, GapKind
from proofserve.verifier.chat.verification import ChatVerification, distinct
from proofserve.verifier.chat.watching import EvidenceFile, Watch
from proofserve.verifier.chat.writers import WriterFinding, Writers
from proofserve.verifier.judges import BankRun, Chances, Opinion
from proofserve.verifier.verification import Verification
from proofserve.verifier.written.readings import Readings
from support.provider import WEIGHTS, Node

from .test_writers import GREEDY, MODEL

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
        self.answers: tuple[Answer, ...] = ()
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
        return outcome_of(self.answers, bad, gaps, choices, sketches)


def watch_of(judge: Any, file: EvidenceFile | None = None) -> Watch:
    """A watch whose writers know a model of tables."""
    writers = Writers(Readings(MODEL, MODEL.names), CHANCES, 0)  # type: ignore[arg-type]
    return Watch(judge, writers, CHANCES, file=file)


@pytest.fixture
def node() -> Node:
    return Node()


def test_a_window_ends_when_it_clears(node: Node) -> None:
    judge = Clears(3)
    watch = watch_of(judge)
    found = [watch.add([node.chat(f"{n}")]) for n in range(7)]
    assert found == [UNDECIDED, UNDECIDED, HONEST] * 2 + [UNDECIDED]
    assert [names for names, _ in judge.asked] == [
        ["0"], ["0", "1"], ["0", "1", "2"], ["3"], ["3", "4"], ["3", "4", "5"], ["6"],
    ]  # fmt: skip
    assert watch.honest == 2


def test_the_chances_of_all_windows_add_up_to_alpha(node: Node) -> None:
    judge = Clears(1)
    watch = watch_of(judge)
    for number in range(400):
        watch.add([node.chat(f"{number}")] if number < 3 else [])
        judge.needed = 0
    alphas = [chances.alpha for _, chances in judge.asked]
    assert alphas[:3] == pytest.approx([0.5e-6 / 2, 0.5e-6 / 6, 0.5e-6 / 12])
    assert math.fsum(alphas) < 0.5e-6
    assert math.fsum(alphas) == pytest.approx(0.5e-6, rel=0.01)
    assert {chances.beta for _, chances in judge.asked} == {1e-3}


def test_missing_receipts_count_over_all_windows(node: Node) -> None:
    """One in ten is too many, whether or not each window by itself is cleared."""
    watch = watch_of(Clears(1))
    chat, two = node.chat("one"), node.chat("two")
    two = replace(two, choices=(*two.choices, replace(two.choices[0], index=1)))
    for number in range(19):
        assert watch.add([node.chat(f"{number}")]) is HONEST
    assert watch.add([two]) is HONEST
    assert watch.add([replace(chat, receipts=())]) is UNPROVED
    assert watch.unproved == "2 missing, of 22 answers: 9%, more than 5%"
    assert (watch.chats, watch.answers, watch.honest) == (21, 22, 21)
    for number in range(18):
        found = watch.add([node.chat(f"later {number}")])
    assert found is HONEST


def test_a_second_receipt_does_not_stand_for_a_missing_one(node: Node) -> None:
    chat, other = node.chat("one"), node.chat("two", choice=5)
    assert replace(chat, receipts=(*chat.receipts, *other.receipts)).without_receipt == 0
    assert replace(chat, receipts=other.receipts).without_receipt == 1


def test_the_record_is_json_from_the_start(node: Node) -> None:
    watch = watch_of(Clears(2))
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
            "answers": 0,
            "gaps": [],
            "notes": [],
            "read_by": "fraud",
            "written_by": found["last"]["written_by"],
            "failures": [{"check": "answer", "text": "it lies"}],
            "findings": found["last"]["findings"],
            "figures_from": "of a file",
            "seed": "a seed",
        },
    }


def test_a_report_says_why_and_what_is_missing() -> None:
    failures = (FailedCheck("prompt", "the node read 3 tokens"),)
    gaps = (Gap(GapKind.MISSING, "no receipt"), Gap(GapKind.UNCHECKED, "x choice 0: adapter"))
    outcome = outcome_of((answer("a", (1,), (2,)),) * 3, failures, gaps, 6)
    lines = list(outcome.lines())
    assert lines == [
        "3 answers with a receipt checked (seed a seed)",
        "  unproved: 1 missing, 1 not checked, of 6 answers: 33%, more than 5%",
        "  prompt    fraud: the node read 3 tokens",
        "read by: others, or not as the receipts say",
        "  missing: no receipt",
        "  not checked: x choice 0: adapter",
        "Honest figures: of a file.",
    ]
    assert outcome.verdict is FRAUD


def test_a_report_says_who_read_and_who_wrote() -> None:
    tokens = Opinion("tokens", UNDECIDED, 64, "64 tokens fit", {})
    writer = WriterFinding((tokens,), ("int4",), ("int8: 9 more sampled answers",), enough=True)
    sketches = Verification(HONEST, (), ())
    found = outcome_of((), (), (), 1, sketches, writer)
    assert found.verdict is HONEST
    assert list(found.lines())[1:] == [
        "  tokens     undecided: 64 tokens fit",
        "read by: these weights",
        "written by: not by int4",
        "written by: untested against int8: 9 more sampled answers",
        "Honest figures: of a file.",
    ]
    asked = outcome_of((), (), (), 1, sketches, replace(writer, enough=False))
    assert asked.verdict is UNDECIDED
    assert "More answers are needed: give several files." in asked.lines()


def test_a_report_of_what_no_kernel_explains_says_what_to_measure() -> None:
    unexplained = SequentialResult.UNEXPLAINED
    outcome = outcome_of((), (), (), 1, Verification(unexplained, (), ()))
    assert outcome.verdict is unexplained
    said = " ".join(outcome.lines())
    assert "measure it: proofserve calibrate chat MODEL --url URL --out FILE" in said
    assert "More answers" not in said


@pytest.mark.parametrize(("result", "verdict"), [(HONEST, UNDECIDED), (FRAUD, FRAUD)])
def test_tokens_convict_but_never_clear(
    result: SequentialResult, verdict: SequentialResult
) -> None:
    writer = WriterFinding((Opinion("tokens", result, 1, "", {}),), (), (), enough=True)
    assert outcome_of((), (), (), 1, None, writer).verdict is verdict


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

    watch = watch_of(judge)
    with pytest.raises(NodeError):
        watch.add([node.chat("one")])
    assert watch.add([node.chat("two")]) is HONEST
    assert clears.asked[0][0] == ["one", "two"]
    assert watch.chats == 2


def kept(path: Path, **changes: object) -> EvidenceFile:
    return EvidenceFile(path, {"weights": WEIGHTS, "alpha": 1e-6, **changes})


def wrote(model: Any, number: int, sampling: Sampling) -> Answer:
    made = model.writes(number, sampling)
    return replace(answer(f"{number}", made.prompt_ids, made.output_ids), sampling=sampling)


def test_a_watch_that_was_stopped_goes_on(node: Node, tmp_path: Path) -> None:
    """Evidence that neither half has convicts; the same chat counts once."""
    path = tmp_path / "evidence"
    cheap = MODEL.by(BankRun("fp8 per channel"))
    chats = [node.chat(f"{n}") for n in range(60)]
    answers = [wrote(cheap, n, Sampling()) for n in range(60)]

    def until(watch: Watch, judge: Clears, last: int) -> int | None:
        for number in range(last):
            judge.answers = (answers[number],)
            if watch.add([chats[number]]) is FRAUD:
                return number + 1
        return None

    judge = Clears(1)
    needed = until(watch_of(judge), judge, 60)
    assert needed is not None
    assert needed > 1
    first = watch_of(judge, kept(path))
    assert until(first, judge, needed - 1) is None
    first.close()
    with path.open("a") as file:
        file.write('{"window": 7, "conv')
    again = watch_of(judge, kept(path))
    assert again.window > first.window
    assert (again.chats, again.answers, again.honest) == (needed - 1, needed - 1, needed - 1)
    assert until(again, judge, needed) is not None
    assert again.chats <= needed
    assert watch_of(judge, kept(path)).convicted


def test_a_watch_knows_again_what_it_knew(node: Node, tmp_path: Path) -> None:
    judge = Clears(1)
    first = watch_of(judge, kept(tmp_path / "evidence"))
    for number in range(8):
        judge.answers = (wrote(MODEL, number, GREEDY if number % 2 else Sampling()),)
        first.add([node.chat(f"{number}")])
    first.close()
    judge.answers = ()
    again = watch_of(judge, kept(tmp_path / "evidence"))
    again.add([])
    first.add([])
    assert again.last is not None
    assert first.last is not None
    assert again.last.writer == first.last.writer
    assert "int4 g128" in again.last.writer.ruled_out  # type: ignore[union-attr]


def test_the_alpha_of_a_window_is_spent_once(node: Node, tmp_path: Path) -> None:
    judge = Clears(3)
    for number in range(4):
        watch = watch_of(judge, kept(tmp_path / "evidence"))
        watch.add([node.chat(f"{number}")])
        watch.close()
    assert len({chances.alpha for _, chances in judge.asked}) == 4
    assert math.fsum(chances.alpha for _, chances in judge.asked) < 0.5e-6


def test_other_evidence_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "evidence"
    kept(path)
    with pytest.raises(
        ReportedError, match=r"alpha: the file has 1e-06, this watch 0.1; give another"
    ):
        kept(path, alpha=0.1)
    path.write_text("no file of ours\n")
    with pytest.raises(ReportedError, match="is not a file of watch-chat"):
        kept(path)
    with pytest.raises(ReportedError, match=r"--evidence: .*Is a directory"):
        kept(tmp_path)


def test_a_node_stays_honest_while_later_answers_are_too_few(node: Node) -> None:
    """The exit code of a watch must not depend on whether it ends just after clearing."""
    watch = watch_of(Clears(2))
    found = [(watch.add([node.chat(f"{n}")]), watch.stays_honest) for n in range(4)]
    assert found == [(UNDECIDED, False), (HONEST, False), (UNDECIDED, True), (HONEST, False)]
    watch.add([replace(node.chat("owed"), receipts=())])
    assert watch.unproved
    assert not watch.stays_honest
