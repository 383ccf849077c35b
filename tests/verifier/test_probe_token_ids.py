"""Which token ids a probe believes."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

import pytest

from proofserve.verifier.probe.endpoint import Alternatives, Kind, LeftOut, ProbePrompt, RawAnswer
from proofserve.verifier.probe.probing import (
    FROM_LOGS,
    FROM_SERVER,
    FROM_TEXT,
    ProbeAnswer,
    prompts,
    resolved,
)

PROMPT = ProbePrompt(0, Kind.COMPLETION, "ab", greedy=False)


@dataclass
class Letters:
    """Ids of letters from 0 on; "ab" together is 27, and nothing but 26 ends an answer."""

    size: int = 28
    pieces: Mapping[str, int] = field(
        default_factory=lambda: {chr(97 + i): i for i in range(26) if i != 23} | {"ab": 27}
    )

    def prompt_ids(self, request: Mapping[str, str]) -> tuple[int, ...]:
        return self.answer_ids(request["prompt"])

    def answer_ids(self, text: str) -> tuple[int, ...]:
        return tuple(27 if c == "#" else ord(c) - 97 for c in text.replace("ab", "#"))

    def text(self, ids: Sequence[int]) -> str:
        return "".join("ab" if i == 27 else chr(97 + i) for i in ids if i != 26)


def raw(text: str, **changes: object) -> RawAnswer:
    return replace(RawAnswer(PROMPT, text, "length", 1, len(text)), **changes)


def logs(*tokens: str) -> tuple[Alternatives, ...]:
    return tuple(
        Alternatives(t, ((t, -0.5), ("c", -1.5), ("x", -2.0), ("d", -9999.0))) for t in tokens
    )


def ids(answer: ProbeAnswer | LeftOut) -> tuple[tuple[int, ...], str]:
    assert isinstance(answer, ProbeAnswer), answer
    return answer.output_ids, answer.ids_from


def test_ids_by_the_server_then_by_its_tokens_then_by_the_text() -> None:
    told = raw("ab", output_ids=(0, 1), alternatives=logs("a", "b"))
    assert ids(resolved(told, Letters())) == ((0, 1), FROM_SERVER)
    assert ids(resolved(replace(told, output_ids=None), Letters())) == ((0, 1), FROM_LOGS)
    named = logs("token_id:0", "token_id:1")
    assert ids(resolved(raw("ab", alternatives=named), Letters())) == ((0, 1), FROM_LOGS)
    assert ids(resolved(raw("cd"), Letters())) == ((2, 3), FROM_TEXT)


def test_a_text_in_other_tokens_than_the_tokenizers_is_left_out() -> None:
    left = resolved(raw("ab"), Letters())
    assert isinstance(left, LeftOut)
    assert left.unsure
    assert ids(resolved(raw("ab", completion_tokens=1), Letters())) == ((27,), FROM_TEXT)


def test_a_token_that_several_ids_have_is_told_by_the_text_if_at_all() -> None:
    assert ids(resolved(raw("xc", alternatives=logs("x", "c")), Letters())) == ((23, 2), FROM_TEXT)
    left = resolved(raw("abx", alternatives=logs("a", "b", "x"), completion_tokens=3), Letters())
    assert isinstance(left, LeftOut)


def test_the_end_of_an_answer_counts_as_a_token_and_has_no_text() -> None:
    ended = raw("cd", finish_reason="stop", completion_tokens=3)
    assert ids(resolved(ended, Letters())) == ((2, 3), FROM_TEXT)
    with_logs = replace(ended, output_ids=(2, 3, 26), alternatives=logs("c", "d"))
    assert ids(resolved(with_logs, Letters())) == ((2, 3), FROM_SERVER)


def test_only_log_probabilities_of_known_tokens_count() -> None:
    answer = resolved(raw("ab", output_ids=(0, 1), alternatives=logs("a", "b")), Letters())
    assert isinstance(answer, ProbeAnswer)
    assert [list(top.ids) for top in answer.tops] == [[0, 2], [1, 2]]
    assert list(answer.tops[0].logs) == [-0.5, -1.5]


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"prompt_ids": (5,)}, "another tokenizer or template"),
        ({"prompt_tokens": 2}, "another tokenizer or template"),
        ({"output_ids": (0, 28)}, "such as the checkpoint has not"),
        ({"alternatives": logs("a", "c")}, "other tokens than the answer"),
        ({"alternatives": logs("a")}, "other tokens than the answer"),
        ({"text": "", "output_ids": None}, "the answer is empty"),
    ],
)
def test_what_does_not_fit_is_left_out(changes: dict[str, object], said: str) -> None:
    left = resolved(replace(raw("ab", output_ids=(0, 1)), **changes), Letters())
    assert isinstance(left, LeftOut)
    assert said in left.reason


def test_prompts_are_repeatable_and_no_two_alike() -> None:
    kinds = (Kind.CHAT, Kind.COMPLETION)
    some = list(prompts("7", 400, kinds))
    assert some == list(prompts("7", 400, kinds))
    assert len({each.text for each in some}) == 400
    assert not {each.text for each in some} & {each.text for each in prompts("8", 4, kinds)}
    assert {(each.kind, each.greedy) for each in some[:4]} == {
        (kind, greedy) for kind in kinds for greedy in (True, False)
    }
