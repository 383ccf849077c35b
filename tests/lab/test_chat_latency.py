import pytest

from proofserve.remote.node_client import NodeClient
from proofserve.remote.records import Work
from proofserve.reports import Figure, Progress
from proofserve_lab.bench.chat import compare_answers, measure_answers
from proofserve_lab.chats import Reply
from support.stub_node import Habits, stub_node


def said(*texts: str) -> list[Reply]:
    return [Reply((text,), 1, 1, 0.0, 2.0) for text in texts]


def failed(error: str) -> Reply:
    return Reply((), 0, 0, 0.0, 1.0, error)


def values(figures: list[Figure]) -> dict[str, float | None]:
    return {figure.name: figure.value for figure in figures}


def test_each_run_is_compared_with_the_right_ones() -> None:
    figures, errors = compare_answers(
        (said("a", "b", "c", "d"), said("a", "b", "C", "d")),
        # They differ by 1, 1 and 2: in the middle by 1.
        [said("a", "b", "c", "d"), said("a", "B", "c", "d"), said("a", "b", "c", "D")],
        # From each of these by 3, 4 and 2, and by 1, 2 and 2.
        [said("A", "b", "C", "D"), said("a", "b", "C", "d")],
    )
    assert values(figures) == {
        "chats": 4,
        "identical": 3,
        "differing_without_proofs": 1,
        "differing_with_proofs": 2.0,
        "latency_s_plain": 2.0,
        "latency_s_round": 2.0,
    }
    assert errors == []


def test_a_failed_chat_is_identical_to_nothing_not_even_to_another() -> None:
    runs = [failed("503"), *said("b")]
    figures, errors = compare_answers((runs, runs), [runs, runs], [runs])
    found = values(figures)
    assert found["identical"] == 1
    assert found["differing_without_proofs"] == found["differing_with_proofs"] == 1
    assert errors == ["503"] * 5


def test_a_run_that_is_short_is_an_error() -> None:
    with pytest.raises(ValueError, match="shorter"):
        compare_answers((said("a"), []), [said("a"), said("a")], [said("a")])
    with pytest.raises(ValueError, match="shorter"):
        compare_answers((said("a"), said("a")), [said("a"), said("a")], [[]])


@pytest.mark.parametrize(("truthful", "identical"), [(True, 6), (False, 0)])
def test_a_node_whose_answers_change_is_found_out(truthful: bool, identical: int) -> None:
    with stub_node(Habits(truthful=truthful)) as (stub, url), NodeClient(url) as node:
        figures, _ = measure_answers(node, Work("stub"), 6, 4, Progress())
        assert stub.chats == 8 + 7 * 6
    assert values(figures)["identical"] == identical
    assert values(figures)["differing_without_proofs"] == 0
    assert values(figures)["differing_with_proofs"] == 6 - identical
    assert stub.state == "STOPPED"
