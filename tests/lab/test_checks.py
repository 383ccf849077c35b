"""The checks against nodes with bad habits: each must be found out, and nothing else blamed."""

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import pytest

from proofserve.engines.vllm.core_gate import CHAT_GRACE_S
from proofserve.remote.node_client import NodeClient
from proofserve.remote.records import Work
from proofserve.reports import NodeError
from proofserve.rounds.status import EngineGauges
from proofserve_lab.check import checks as checks_module
from proofserve_lab.check.checks import Check, Reporter, coexist, smoke
from proofserve_lab.check.end_to_end import artifact_trial, end_to_end
from support.stub_node import Habits, stub_node
from support.stub_servers import Servers

WORK = Work("stub")
# Tokens per second. Chats this slow leave the stub no idle moment on a busy machine, either.
UNHURRIED = 1000.0


def made(checks: Callable[[NodeClient, Work, Reporter], None], habits: Habits) -> list[Check]:
    found: list[Check] = []
    with stub_node(habits) as (_, url), NodeClient(url) as node:
        checks(node, WORK, found.append)
    return found


def failed(checks: list[Check]) -> list[str]:
    return [check.name for check in checks if not check.passed]


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, seconds in (
        ("SETTLE_S", 0.2),
        ("LOAD_S", 0.3),
        ("FULL_SPEED_S", 0.5),
        ("RESUME_S", 10.0),
    ):
        monkeypatch.setattr(checks_module, name, seconds)
    # An answer that comes late on a busy machine is a large part of so short a time.
    monkeypatch.setattr(checks_module, "FULL_SPEED", 0.3)


def artifact_smoke(node: NodeClient, work: Work, report: Reporter) -> None:
    smoke(node, [work], report)


def test_a_good_node_passes_the_smoke_checks() -> None:
    checks = made(artifact_smoke, Habits())
    assert failed(checks) == []
    assert len(checks) == 8


@pytest.mark.parametrize(
    ("habits", "name"),
    [
        (Habits(repeatable=False), "the same nonce gives the same bits"),
        (Habits(keyed=False), "another key gives other values"),
        (Habits(counts_right=False), "a round counts what it stores"),
        (Habits(chat_error=500), "chat answers"),
    ],
)
def test_smoke_finds(habits: Habits, name: str) -> None:
    assert failed(made(artifact_smoke, habits)) == [name]


def test_a_nonce_that_cannot_be_computed_is_an_error_and_no_check() -> None:
    with pytest.raises(NodeError, match="computed no vector"):
        made(artifact_smoke, Habits(failing_nonce=2))


@pytest.mark.usefixtures("quick")
def test_a_good_node_passes_the_coexistence_checks() -> None:
    checks = made(coexist, Habits(chat_tokens=UNHURRIED))
    assert failed(checks) == []
    assert len(checks) == 11


@pytest.mark.usefixtures("quick")
@pytest.mark.parametrize(
    ("habits", "names"),
    [
        (
            Habits(polite=False, chat_tokens=UNHURRIED),
            [
                "the round waits until that chat has ended",
                "a running round pauses while chat is active",
            ],
        ),
        (
            Habits(gauges={"busy_s": 1.0}, chat_tokens=UNHURRIED),
            ["proofs run at full speed while chat is idle"],
        ),
        (
            Habits(gauges={"longest_chat_wait_batches": 2.0}, chat_tokens=UNHURRIED),
            ["no chat request waits for more than one forward"],
        ),
        (
            Habits(finish_reason="abort", chat_tokens=UNHURRIED),
            [
                "chat completes during a round",
                "chat completes although a round has started",
                "chat completes beside a paused round",
            ],
        ),
    ],
    ids=["does not give way", "idles", "lets chat wait", "aborts"],
)
def test_coexist_finds(habits: Habits, names: list[str]) -> None:
    assert failed(made(coexist, habits)) == names


class ScriptedNode(NodeClient):
    """Shows gauges twice for each window: at its beginning and at its end."""

    def __init__(self, *windows: tuple[int, list[float]]) -> None:
        """A window has a number of forwards, and the pauses that the engine measured in it."""
        self._windows = iter(windows)
        self._forwards, self._pauses = 100, [8.1]
        self._at_end = False

    def describe(self) -> Mapping[str, Any]:
        if self._at_end:
            forwards, pauses = next(self._windows)
            self._forwards += forwards
            self._pauses = [*self._pauses, *pauses]
        self._at_end = not self._at_end
        names = dict.fromkeys(EngineGauges.__dataclass_fields__, 0)
        shown = {**names, "forwards": self._forwards, "resume_ms": self._pauses}
        return {"status": "GENERATING", "stats": None, "engine": shown}


CALM = (0, list[float]())
# The API process got no CPU: one pause, and four forwards in it.
STALLED = (4, [31.4])


def judged(monkeypatch: pytest.MonkeyPatch, *windows: tuple[int, list[float]]) -> Check:
    monkeypatch.setattr(checks_module, "LOAD_S", 0.0)
    return checks_module._no_proofs(ScriptedNode(*windows), "chat first")


@pytest.mark.parametrize("at", range(3))
def test_a_forward_without_a_pause_of_chat_fails_in_every_window(
    monkeypatch: pytest.MonkeyPatch, at: int
) -> None:
    found = judged(monkeypatch, *[CALM] * at, (1, [5.9]))
    assert found.passed is False
    assert found.detail == "forwards in 0 s: 1, after a chat pause of 5.9 ms"


def test_one_forward_too_early_fails_beside_others_that_used_a_pause(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    assert judged(monkeypatch, STALLED, CALM, (6, [31.4, 0.2, 12.0])).passed is False


def test_forwards_fail_if_the_engine_has_measured_no_pause(monkeypatch: pytest.MonkeyPatch) -> None:
    node = ScriptedNode((1, []))
    node._pauses = []
    monkeypatch.setattr(checks_module, "LOAD_S", 0.0)
    assert checks_module._no_proofs(node, "chat first").passed is False


def test_a_window_in_which_the_machine_stood_still_is_measured_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    found = judged(monkeypatch, CALM, STALLED, CALM, CALM)
    assert found.passed is True
    assert "no forward in 3 windows" in found.detail
    assert "1 left out: chat paused for 8.1 ms or more" in found.detail


def test_without_a_window_that_counts_the_check_is_skipped_with_the_reason(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    found = judged(monkeypatch, *[STALLED] * 8)
    assert found.passed is None
    assert found.detail.startswith("skipped: no forward in 0 windows")
    assert "8 left out: chat paused for 8.1 ms or more" in found.detail


def end_to_end_on(habits: Habits, **stage: Any) -> tuple[list[Check], int]:
    servers, found = Servers(habits), list[Check]()

    def foreign(nonces: Any) -> Any:
        with stub_node() as (_, url), NodeClient(url) as node:
            return node.artifacts(Work("another model"), nonces)

    settings = {"restarts": True, "foreign": foreign} | stage
    trial = partial(artifact_trial, WORK, settings["foreign"])
    end_to_end(servers, settings["restarts"], [trial], found.append)
    return found, servers.starts


def test_honest_proofs_pass_and_four_forgeries_are_caught_after_a_restart() -> None:
    checks, starts = end_to_end_on(Habits())
    assert failed(checks) == []
    assert len(checks) == 6
    assert starts == 2


def test_a_server_that_is_not_ours_is_not_restarted_and_says_so() -> None:
    checks, starts = end_to_end_on(Habits(), restarts=False, foreign=None)
    assert starts == 1
    assert [check.name for check in checks if check.passed is None] == [
        "restart",
        "the proof of another checkpoint is fraud",
    ]
    assert [check.name for check in checks if check.passed is False] == []


def test_a_gullible_node_fails_every_forgery() -> None:
    checks, _ = end_to_end_on(Habits(gullible=True))
    assert len(failed(checks)) == 4


def test_a_node_that_distrusts_everybody_fails_the_honest_proof() -> None:
    checks, _ = end_to_end_on(Habits(suspicious=True))
    assert failed(checks) == ["an honest proof is accepted after a restart"]


def test_the_check_knows_the_grace_of_the_engine() -> None:
    assert pytest.approx(CHAT_GRACE_S * 1e3) == checks_module.GRACE_MS
