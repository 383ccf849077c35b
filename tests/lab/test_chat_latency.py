import pytest

from lab.stub_node import Habits, stub_node
from proofserve.lab.bench.chat import compare_answers, measure_answers
from proofserve.lab.chats import Reply
from proofserve.lab.node_client import NodeClient
from proofserve.lab.records import Work
from proofserve.lab.report import NoProgress


def said(*texts: str) -> list[Reply]:
    return [Reply((text,), 1, 1, 0.0, 2.0) for text in texts]


def failed(error: str) -> Reply:
    return Reply((), 0, 0, 0.0, 1.0, error)


def test_each_run_is_compared_with_the_right_ones() -> None:
    answers = compare_answers(
        (said("a", "b", "c", "d"), said("a", "b", "C", "d")),
        # They differ by 1, 1 and 2: in the middle by 1.
        [said("a", "b", "c", "d"), said("a", "B", "c", "d"), said("a", "b", "c", "D")],
        # From each of these by 3, 4 and 2, and by 1, 2 and 2.
        [said("A", "b", "C", "D"), said("a", "b", "C", "d")],
    )
    assert (answers.asked, answers.identical) == (4, 3)
    assert (answers.differing_plain, answers.differing_round) == (1, 2.0)
    assert answers.errors == ()
    assert answers.plain_latency_s == 2.0


def test_a_failed_chat_is_identical_to_nothing_not_even_to_another() -> None:
    runs = [failed("503"), *said("b")]
    answers = compare_answers((runs, runs), [runs, runs], [runs])
    assert answers.identical == 1
    assert answers.differing_plain == answers.differing_round == 1
    assert answers.errors == ("503",) * 5


def test_a_run_that_is_short_is_an_error() -> None:
    with pytest.raises(ValueError, match="shorter"):
        compare_answers((said("a"), []), [said("a"), said("a")], [said("a")])
    with pytest.raises(ValueError, match="shorter"):
        compare_answers((said("a"), said("a")), [said("a"), said("a")], [[]])


@pytest.mark.parametrize(("truthful", "identical"), [(True, 6), (False, 0)])
def test_a_node_whose_answers_change_is_found_out(truthful: bool, identical: int) -> None:
    with stub_node(Habits(truthful=truthful)) as (stub, url), NodeClient(url) as node:
        answers = measure_answers(node, Work("stub"), 6, 4, NoProgress())
        assert stub.chats == 8 + 7 * 6
    assert answers.identical == identical
    assert answers.differing_plain == 0
    assert answers.differing_round == 6 - identical
    assert stub.state == "STOPPED"
