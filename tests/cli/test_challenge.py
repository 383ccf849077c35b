"""``proofserve challenge`` against a node over HTTP: honest, cheating, late, partial, others."""

import json
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from click.testing import Result
from typer.testing import CliRunner

from cli.challenged import BUDGET, OPERATOR, VALIDATOR, ChallengedNode, challenged_node
from proofserve.cli.main import app
from proofserve.protocol.verdict.counting import SequentialResult
from proofserve.verifier.challenge import DAY_S, ChallengeResult, Tally
from support.four_bits import one_thread
from support.pace import wait_until
from support.small_bank import small_bank
from support.stub_node import Habits, stub_node

SHAPE = ("--scheme", "sketch-v1", "--seq-len", "32")
LONGEST_S = "600"


@pytest.fixture(scope="module", autouse=True)
def few_kernels() -> Iterator[None]:
    with small_bank():
        yield


@pytest.fixture(scope="module")
def node(tiny: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[ChallengedNode]:
    with one_thread(), challenged_node(tiny, tmp_path_factory.mktemp("node")) as made:
        yield made


@pytest.fixture
def usual(node: ChallengedNode) -> Iterator[ChallengedNode]:
    """The node, which is as it was after the test."""
    yield node
    node.engine.serves = node.engine.honest
    node.engine.latency_s = 0.0
    node.engine.not_finite = frozenset()
    node.meddling.reverses_block = node.meddling.drops_nonce = False


def challenge(url: str, *options: str, key: str = VALIDATOR) -> Result:
    with one_thread():
        few = ("--nonces", "32", "--deadline", LONGEST_S)
        asked = ["challenge", url, "--api-key", key, *few, *options]
        return CliRunner().invoke(app, asked)


def test_an_honest_node_is_honest_by_nonces_of_a_new_block_each_time(
    usual: ChallengedNode, of_tiny: tuple[str, ...], tmp_path: Path
) -> None:
    blocks, nonces = set(), set()
    for _ in range(2):
        usual.engine.calls.clear()
        file = tmp_path / "challenge.json"
        result = challenge(usual.url, *of_tiny, "--json", str(file))
        assert result.exit_code == 0, result.output
        assert "footprint honest" in result.output
        found = json.loads(file.read_text())
        (one,) = found["challenges"]
        assert found["counts"] == {**dict.fromkeys(found["counts"], 0), "honest": 1}
        assert {"unproved", "fraud", "undecided"} < found["counts"].keys()
        assert {"late", "refused"} < found["unproved"].keys()
        assert found["alpha_left_today"] is None
        assert (one["outcome"], one["nonces"], one["answer"]) == ("honest", 32, None)
        assert one["report"]["block_hash"] == one["block_hash"]
        assert f"Block {one['block_hash']}, key proofserve challenge." in result.output
        blocks.add(one["block_hash"])
        nonces |= {nonce for call in usual.engine.calls for nonce in call}
    assert [len(block) for block in blocks] == [64, 64]
    assert len(nonces) == 64
    assert min(sum(nonce >= 2**62 for nonce in nonces), sum(nonce < 2**62 for nonce in nonces)) > 0


def test_weights_in_four_bits_are_fraud_and_verify_can_repeat_it(
    usual: ChallengedNode, of_tiny: tuple[str, ...], tmp_path: Path
) -> None:
    usual.engine.serves = usual.engine.four_bits
    file, answer = tmp_path / "challenge.json", tmp_path / "answer.json"
    result = challenge(usual.url, *of_tiny, "--json", str(file))
    assert result.exit_code == 1, result.output
    (one,) = json.loads(file.read_text())["challenges"]
    assert one["outcome"] == one["report"]["verdict"] == "fraud"
    answer.write_text(json.dumps(one["answer"]))
    with one_thread():
        seed = ("--seed", one["report"]["seed"])
        again = CliRunner().invoke(app, ["verify", str(answer), *of_tiny, *seed])
    assert again.exit_code == 1, again.output
    assert f"{one['report']['nonces_used']} of 32 nonces recomputed" in again.output


def outcome_of(file: Path) -> tuple[str, str]:
    """Why the one challenge is unproved: in a word, and in others."""
    found = json.loads(file.read_text())
    (one,) = found["challenges"]
    assert (one["outcome"], found["counts"]["unproved"]) == ("unproved", 1)
    assert found["unproved"][one["kind"]] == 1
    assert (one["report"], one["answer"]) == (None, None)
    return one["kind"], one["reason"]


def test_a_late_answer_is_unproved(
    usual: ChallengedNode, of_tiny: tuple[str, ...], tmp_path: Path
) -> None:
    usual.engine.latency_s = 3600.0
    file = tmp_path / "challenge.json"
    late = challenge(usual.url, *of_tiny, "--json", str(file), "--deadline", "0.5")
    assert late.exit_code == 2, late.output
    assert outcome_of(file) == ("late", "no answer within 0.5 s")
    # The node stops computing for a client that has left.
    wait_until(lambda: usual.engine.leases == 0)


def test_a_challenge_during_a_round_is_late_and_says_why(
    usual: ChallengedNode, of_tiny: tuple[str, ...], tmp_path: Path
) -> None:
    order = {"block_hash": "block", "block_height": 7, "public_key": "key", "node_id": 0}
    order |= {"node_count": 1, "params": {"model": "tiny", "seq_len": 32, "k_dim": 12}}
    assert usual.node.post("/init/generate", order).is_success
    file = tmp_path / "challenge.json"
    late = challenge(usual.url, *of_tiny, "--json", str(file), "--deadline", "2")
    assert usual.node.post("/stop", {}).is_success
    assert late.exit_code == 2, late.output
    outcome, reason = outcome_of(file)
    assert outcome == "late"
    assert reason == (
        "no answer within 2 s; it says that a round runs, and a challenge waits for its end"
    )


def test_a_part_of_the_answer_is_unproved(
    usual: ChallengedNode, of_tiny: tuple[str, ...], tmp_path: Path
) -> None:
    file = tmp_path / "challenge.json"
    usual.meddling.drops_nonce = True
    usual.engine.serves = usual.engine.four_bits
    partly = challenge(usual.url, *of_tiny, "--json", str(file))
    assert partly.exit_code == 2, partly.output
    assert outcome_of(file) == ("partly answered", "31 vectors came; 1 of 32 nonces have none")


def test_an_answer_for_another_block_is_unproved(
    usual: ChallengedNode, of_tiny: tuple[str, ...], tmp_path: Path
) -> None:
    file = tmp_path / "challenge.json"
    usual.meddling.reverses_block = True
    other = challenge(usual.url, *of_tiny, "--json", str(file))
    assert other.exit_code == 2, other.output
    outcome, reason = outcome_of(file)
    assert outcome == "another block"
    block = json.loads(file.read_text())["challenges"][0]["block_hash"]
    assert reason == f"block_hash: expected is {block}, the answer has {block[::-1]}"


@pytest.mark.parametrize(
    ("options", "key", "said"),
    [
        ((), "another-key", "401"),
        (("--nonces", str(BUDGET + 1)), VALIDATOR, f"more than the {BUDGET} that"),
    ],
)
def test_a_refused_challenge_is_unproved(
    usual: ChallengedNode,
    of_tiny: tuple[str, ...],
    tmp_path: Path,
    options: tuple[str, ...],
    key: str,
    said: str,
) -> None:
    file = tmp_path / "challenge.json"
    refused = challenge(usual.url, *of_tiny, *options, "--json", str(file), key=key)
    assert refused.exit_code == 2, refused.output
    outcome, reason = outcome_of(file)
    assert outcome == "refused"
    assert said in reason


def test_what_is_no_node_is_unproved(of_tiny: tuple[str, ...], tmp_path: Path) -> None:
    file = tmp_path / "challenge.json"
    with stub_node(Habits()) as (_, url):
        other = challenge(url, *of_tiny, "--json", str(file))
    assert (other.exit_code, outcome_of(file)[0]) == (2, "refused")
    gone = challenge(url, *of_tiny, "--json", str(file))
    assert (gone.exit_code, outcome_of(file)[0]) == (2, "not reached")


def test_repeated_challenges_are_counted_until_a_signal(
    usual: ChallengedNode, of_tiny: tuple[str, ...], tmp_path: Path
) -> None:
    """The node is late at each one. Ctrl-C ends the command, which then has counted all."""
    usual.engine.latency_s = 3600.0
    file = tmp_path / "challenges.json"
    argv = ["challenge", usual.url, *of_tiny, "--api-key", VALIDATOR, "--json", str(file)]
    code = "from proofserve.cli.main import app; app()"
    times = ("--every", "1s", "--deadline", "0.2")
    process = subprocess.Popen(
        [sys.executable, "-c", code, *argv, *times], stdout=subprocess.PIPE, text=True
    )

    def late() -> int:
        try:
            return int(json.loads(file.read_text())["unproved"]["late"])
        except (OSError, ValueError):
            return 0

    wait_until(lambda: late() >= 2, 600.0)
    process.send_signal(signal.SIGINT)
    output, _ = process.communicate(timeout=600)
    assert process.returncode == 2, output
    lines = [line for line in output.splitlines() if "unproved (late): 0." in line]
    assert len(lines) >= 2
    # What is not judged spends nothing.
    assert all(line.endswith("; 1e-06 of 1e-06 left of alpha today") for line in lines)
    assert f"{len(lines)} challenges: {len(lines)} unproved ({len(lines)} late)" in output
    assert late() == len(lines)


def test_the_challenges_of_a_day_share_alpha() -> None:
    """However late a verdict comes: no 24 hours have verdicts for more than all of it."""
    tally = Tally("http://node", 1e-6, 600.0)
    assert tally.alpha_of_one == pytest.approx(1e-6 / 146)
    report: Any = object()
    challenge_: Any = None
    judged = ChallengeResult(SequentialResult.HONEST, challenge_, "", report=report)
    # The first verdict comes at the end of its ten minutes, all others at once.
    for end in (600.0, *(600.0 * place for place in range(1, 145))):
        tally.add(judged, end)
    assert tally.alpha_left == "6.85e-09 of 1e-06 left of alpha today"
    assert tally.text == "145 challenges: 145 honest; 6.85e-09 of 1e-06 left of alpha today"
    tally.add(judged, 600.0 + DAY_S)
    assert tally.alpha_left == "1.37e-08 of 1e-06 left of alpha today"


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (("--every", "soon"), "'soon' is no time"),
        (("--every", "0"), "'0' is no time"),
        (("--every", "10d"), "'10d' is no time"),
        (("--nonces", "0"), "--nonces"),
        (("--calibration", "/nowhere.json"), "cannot read /nowhere.json"),
    ],
)
def test_a_wrong_option_asks_nothing_of_the_node(
    usual: ChallengedNode, of_tiny: tuple[str, ...], options: tuple[str, ...], said: str
) -> None:
    usual.engine.calls.clear()
    refused = challenge(usual.url, *of_tiny, *options, key=OPERATOR)
    assert refused.exit_code == 3, refused.output
    assert said in refused.output
    assert usual.engine.calls == []


def test_verify_takes_the_block_and_key_that_the_network_expects(
    usual: ChallengedNode, of_tiny: tuple[str, ...], tmp_path: Path
) -> None:
    order: dict[str, Any] = {"block_hash": "theirs", "block_height": 7, "public_key": "its-key"}
    order |= {"node_id": 0, "node_count": 1, "scheme": "sketch-v1", "batch_size": 8}
    order |= {"params": {"model": "tiny", "seq_len": 32, "k_dim": 64}}
    assert usual.node.post("/init/generate", order).is_success
    wait_until(lambda: usual.node.computed() >= 48, 600.0)
    assert usual.node.post("/stop", {}).is_success
    file = tmp_path / "verdict.json"
    asked = ["verify", usual.url, *of_tiny, "--api-key", VALIDATOR, "--nonces", "48"]

    def verify(*options: str) -> Result:
        with one_thread():
            return CliRunner().invoke(app, [*asked, *options, "--json", str(file)])

    believed = verify()
    assert believed.exit_code == 0, believed.output
    assert "Block theirs, key its-key." in believed.output
    assert f"believed as {usual.url} says" in believed.output
    found = json.loads(file.read_text())
    assert (found["block_hash"], found["public_key"]) == ("theirs", "its-key")
    assert found["expected"] == {"block_hash": None, "public_key": None, "lane": None}
    expected = verify("--expect-block", "theirs", "--expect-key", "its-key")
    assert expected.exit_code == 0, expected.output
    assert "believed" not in expected.output
    for options, said in (
        (("--expect-block", "ours"), f"block_hash: expected is ours, {usual.url} has theirs"),
        (("--expect-key", "mine"), f"public_key: expected is mine, {usual.url} has its-key"),
    ):
        other = verify(*options)
        assert other.exit_code == 3, other.output
        assert said in other.output
        assert "fraud" not in other.output
