"""The checks of the distance protocol against nodes with bad habits: each must be found out."""

from functools import partial

import pytest

from proofserve.remote.node_client import NodeClient
from proofserve.remote.records import DistanceWork, Work
from proofserve.reports import NodeError, TooSlowError
from proofserve.rounds.records import Winner
from proofserve_lab.check import checks as checks_module
from proofserve_lab.check.checks import Check, distance_smoke, smoke
from proofserve_lab.check.end_to_end import artifact_trial, distance_trial, end_to_end, find, forged
from support.stub_node import Habits, stub_node
from support.stub_servers import Servers

WORK = DistanceWork("stub")


def smoke_of(habits: Habits) -> tuple[list[Check], str]:
    """The checks, and the state in which they leave the node."""
    found: list[Check] = []
    with stub_node(habits) as (stub, url), NodeClient(url) as node:
        distance_smoke(node, WORK, found.append)
    return found, stub.state


def failed(checks: list[Check]) -> list[str]:
    return [check.name for check in checks if not check.passed]


def test_a_good_node_passes_and_is_left_stopped() -> None:
    checks, state = smoke_of(Habits())
    assert failed(checks) == []
    assert len(checks) == 8
    assert state == "STOPPED"


@pytest.mark.parametrize(
    ("habits", "names"),
    [
        (
            Habits(repeatable=False),
            ["the same nonce gives the same distance", "a round stores exactly its winners"],
        ),
        (Habits(keyed=False), ["another key gives other distances"]),
        (Habits(counts_right=False), ["a round counts the winners it stores"]),
        (
            Habits(publishes_all=True),
            ["every winner is below 1.41", "a round stores exactly its winners"],
        ),
        (Habits(drift=1.0), ["distances are valid", "a round stores exactly its winners"]),
        (Habits(stuck_state="GENERATING"), ["a distance round reports its states"]),
    ],
    ids=["draws lots", "ignores the key", "miscounts", "all win", "beyond 2", "always generates"],
)
def test_smoke_finds(habits: Habits, names: list[str]) -> None:
    assert failed(smoke_of(habits)[0]) == names


def test_a_round_that_does_not_get_on_is_stopped(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(checks_module, "ROUND_S", 0.2)
    with (
        stub_node(Habits(round=0.1)) as (stub, url),
        NodeClient(url) as node,
        pytest.raises(TooSlowError, match="first winners"),
    ):
        distance_smoke(node, WORK, lambda _: None)
    assert stub.state == "STOPPED"


def test_both_protocols_are_smoked_on_one_node_and_chat_is_asked_once() -> None:
    found: list[Check] = []
    with stub_node() as (stub, url), NodeClient(url) as node:
        smoke(node, [Work("stub"), WORK], found.append)
    assert failed(found) == []
    assert len(found) == 8 + 8
    assert stub.chats == 1


def end_to_end_on(habits: Habits, restarts: bool = True) -> list[Check]:
    found: list[Check] = []
    end_to_end(Servers(habits), restarts, [partial(distance_trial, WORK)], found.append)
    return found


@pytest.mark.parametrize(
    ("restarts", "where"), [(True, "after a restart"), (False, "on the same server")]
)
def test_honest_winners_pass_and_false_ones_are_caught(restarts: bool, where: str) -> None:
    checks = {check.name: check for check in end_to_end_on(Habits(), restarts)}
    assert [check.name for check in checks.values() if check.passed is False] == []
    # Said of a server that is not ours, and of no other.
    assert ("restart" in checks) is not restarts
    assert len(checks) == 8 + (not restarts)
    honest = checks[f"honest winners are accepted {where}"]
    assert honest.detail == "honest: 0 of 64 invalid, p = 1, off by at most 0.0e+00"
    assert "8 of 64 invalid" in checks["winners an eighth of which do not win are fraud"].detail


@pytest.mark.parametrize(
    ("habits", "names"),
    [
        (
            Habits(gullible=True),
            [
                "winners of another key are fraud",
                "winners an eighth of which do not win are fraud",
                "winners with layer hooks are fraud without them",
            ],
        ),
        (
            Habits(suspicious=True),
            [
                "honest winners are accepted after a restart",
                "honest winners with layer hooks are accepted after a restart",
            ],
        ),
        # Downwards, so that every winner stays one: only the numbers themselves can report.
        (
            Habits(drift=-2e-4),
            [
                "honest winners are accepted after a restart",
                "honest winners with layer hooks are accepted after a restart",
            ],
        ),
        (Habits(other_block=None), ["winners of another block are refused"]),
        (Habits(other_block=500), ["winners of another block are refused"]),
        (Habits(hooks_matter=False), ["winners with layer hooks are fraud without them"]),
    ],
    ids=["believes all", "believes no claim", "drifts", "any block", "breaks", "hooks do nothing"],
)
def test_end_to_end_finds(habits: Habits, names: list[str]) -> None:
    assert failed(end_to_end_on(habits)) == names


def test_both_protocols_share_one_restart() -> None:
    servers, found = Servers(Habits()), list[Check]()
    trials = [partial(artifact_trial, Work("stub"), None), partial(distance_trial, WORK)]
    end_to_end(servers, True, trials, found.append)
    assert servers.starts == 2
    assert len(found) == 6 + 8


def test_a_forgery_is_honest_but_for_an_eighth() -> None:
    with stub_node(Habits(failing_nonce=3)) as (stub, url), NodeClient(url) as node:
        found = find(node, DistanceWork("stub", r_target=1.416))
        false = [winner for winner in forged(found) if winner not in found.winners]
        distances = {winner.nonce: stub.distance(winner.nonce, WORK.body) for winner in false}
    assert len(found.winners) == 64
    assert len(false) == 8
    assert all(distance >= 1.416 for distance in distances.values())
    # This nonce failed, so it is unknown whether it wins.
    assert 3 not in found.losers


def test_an_answer_that_leaves_a_nonce_out_is_an_error() -> None:
    with (
        stub_node(Habits(forgets=True)) as (_, url),
        NodeClient(url) as node,
        node.judging(WORK),
        pytest.raises(NodeError, match="computed 1 of 2 distances"),
    ):
        node.judge(WORK, [Winner(0, 1.4), Winner(1, 1.4)])
