"""The distance protocol on a real server: rounds, judgement, chat beside it."""

import re
import shlex
import subprocess
from typing import Any

import pytest

from proofserve.protocol.verdict.counting import DISTANCE_P_MISMATCH
from support.node import ServedNode, until

pytestmark = pytest.mark.engine


# The requirement's own commands, one after the other, and what each answers.
COMMANDS = """
curl -X POST http://localhost:8765/api/v1/pow/init/generate \
  -H "Content-Type: application/json" \
  -d '{
    "block_hash": "abc123",
    "block_height": 100,
    "public_key": "node1",
    "r_target": 0.5,
    "node_id": 0,
    "node_count": 1
  }'
curl http://localhost:8765/api/v1/pow/status
curl -X POST http://localhost:8765/api/v1/pow/phase/validate
curl -X POST http://localhost:8765/api/v1/pow/validate \
  -H "Content-Type: application/json" \
  -d '{
    "public_key": "node1",
    "block_hash": "abc123",
    "block_height": 100,
    "nonces": [0, 1, 2],
    "dist": [0.3, 0.4, 0.5],
    "node_id": 0
  }'
curl -X POST http://localhost:8765/api/v1/pow/stop
curl -X POST http://localhost:8765/api/v1/pow/phase/validate
curl -X POST http://localhost:8765/api/v1/pow/stop
"""
STATES = ["GENERATING", "GENERATING", "VALIDATING", None, "STOPPED", "VALIDATING", "STOPPED"]


def winners_of(node: ServedNode, first: int = 0) -> list[Any]:
    return [row for row in node.results() if row["seq"] > first and "dist" in row]


def last_seq(node: ServedNode) -> int:
    return max((row["seq"] for row in node.results()), default=0)


def test_the_commands_of_the_requirement_work_as_they_stand(node: ServedNode) -> None:
    text = COMMANDS.replace("http://localhost:8765", node.server.url)
    commands = [f"curl{rest}" for rest in re.split(r"^curl", text, flags=re.MULTILINE)[1:]]
    assert len(commands) == len(STATES)
    for command, state in zip(commands, STATES, strict=True):
        argv = [*shlex.split(command), "-s", "--fail-with-body"]
        done = subprocess.run(argv, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stdout
        assert (f'"state":"{state}"' in done.stdout) is (state is not None)
        if state is None:
            assert '"fraud_detected":true' in done.stdout


def test_winners_are_stored_and_judged_honest(node: ServedNode) -> None:
    first = last_seq(node)
    node.start_distance_round(r_target=1.416)
    until(lambda: node.status()["total_valid"] >= 24)
    node.stop()
    status = node.status()
    rows = winners_of(node, first)
    assert len(rows) == status["total_valid"] < status["total_checked"]
    verdict = node.judge(rows)
    assert verdict["computed_distances"] == [row["dist"] for row in rows]
    assert (verdict["n_invalid"], verdict["fraud_detected"]) == (0, False)
    forged = node.judge(rows, public_key="another")
    assert forged["fraud_detected"]
    assert forged["probability_honest"] < DISTANCE_P_MISMATCH


@pytest.mark.parametrize("layer_hooks", [False, True])
def test_chat_is_byte_identical_during_a_round(node: ServedNode, layer_hooks: bool) -> None:
    prompts = [f"Tell me about {word}." for word in ("rivers", "stones", "maps", "lanterns")]
    before = [node.chat(prompt) for prompt in prompts]
    node.start_distance_round(use_layer_hooks=layer_hooks, use_sign_flips=not layer_hooks)
    until(lambda: node.processed() > 0)
    assert [node.chat(prompt) for prompt in prompts] == before
    done = node.processed()
    until(lambda: node.processed() > done)
    node.stop()
    assert [node.chat(prompt) for prompt in prompts] == before


def test_options_change_the_numbers_and_phases_restore_them(node: ServedNode) -> None:
    distances = {}
    for flips, hooks in ((True, False), (False, True), (True, True), (False, False)):
        first = last_seq(node)
        node.start_distance_round(use_sign_flips=flips, use_layer_hooks=hooks)
        until(lambda: node.processed() >= 16)
        node.stop()
        # What was stopped goes on with the same options.
        done = node.processed()
        node.call("POST", "/phase/generate")
        until(lambda before=done: node.processed() > before)
        node.stop()
        rows = winners_of(node, first)
        assert [row["nonce"] for row in rows] == list(range(len(rows)))
        assert node.judge(rows)["computed_distances"] == [row["dist"] for row in rows]
        distances[flips, hooks] = tuple(row["dist"] for row in rows[:16])
    assert len(set(distances.values())) == 4
