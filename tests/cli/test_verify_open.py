"""``verify --open``: a node's file, a receiver's file, and the tiny model as the truth."""

import asyncio
import json
import re
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from typer.testing import CliRunner, Result

from proofserve.cli.main import app
from proofserve.engines.checkpoints import weights_digest
from proofserve.outbox.store import SqliteOutbox
from proofserve.protocol.codec import decode, encode
from proofserve.protocol.identity import Block
from proofserve.protocol.network_schemes import ArtifactScheme
from proofserve.protocol.nonces import NonceLane
from proofserve.protocol.verdict.comparison import Claim
from proofserve.remote.records import BLOCK_HEIGHT, Work
from proofserve.rounds.records import RoundSpec, Workload
from proofserve_lab.checkpoints import claims_of_model
from support.committed import FakeNode, Receiver, fake_node, receiver
from support.fake_engine import TOY_ENGINE_INFO, TOY_FACTS, FakeEngine
from support.models import TINY_THRESHOLD, SmallModels
from support.pace import wait_until

WORK = Work("tiny", seq_len=32)
NONCES = range(24)
CLOSE = ("--dist-threshold", TINY_THRESHOLD)


def run(source: Path, node: FakeNode, *args: str | Path) -> Result:
    command = ["verify", source, "--open", node.url, *CLOSE, *args]
    return CliRunner().invoke(app, [*map(str, command)])


@pytest.fixture(scope="module")
def vectors(tiny: Path) -> list[Claim]:
    claims = claims_of_model(tiny, WORK, NONCES)
    return [Claim(claim.nonce, claim.vector_b64) for claim in claims]


@pytest.fixture
def served(tiny: Path, vectors: list[Claim], tmp_path: Path) -> Iterator[tuple[FakeNode, Receiver]]:
    """A node of the tiny model after its round, and the receiver of its roots."""
    facts = replace(TOY_FACTS, weights_digest=weights_digest(tiny))
    engine = FakeEngine(replace(TOY_ENGINE_INFO, facts=facts))
    with receiver(tmp_path) as received:
        asyncio.run(_round(tmp_path / "outbox.sqlite", received.url, vectors))
        with fake_node(tmp_path, engine) as node:
            wait_until(lambda: received.committed() == len(NONCES))
            yield node, received


async def _round(outbox: Path, url: str, vectors: list[Claim]) -> None:
    block = Block(WORK.block_hash, BLOCK_HEIGHT)
    work = Workload(ArtifactScheme(), block, WORK.public_key, WORK.seq_len)
    spec = RoundSpec("r1", work, NonceLane(0, 1), 8, url, commits_roots=True)
    async with await SqliteOutbox.open(outbox) as store:
        await store.open_round(spec)
        await store.record("r1", len(NONCES), vectors, {})
        await store.close_round("r1")


def test_an_honest_node_is_honest_by_a_seed_of_now(
    tiny: Path, served: tuple[FakeNode, Receiver], tmp_path: Path
) -> None:
    node, received = served
    seeds = set()
    for _ in range(2):
        record = tmp_path / "outcome.json"
        result = run(received.file, node, "--model", tiny, "--json", record)
        assert result.exit_code == 0, result.output
        outcome = json.loads(record.read_text())
        assert (outcome["verdict"], outcome["mismatches"]) == ("honest", [])
        assert re.fullmatch(r"[0-9a-f]{32}", outcome["seed"])
        said = f"(to reproduce this sample: --seed {outcome['seed']})"
        assert said in result.output.replace("\n", " ")
        seeds.add(outcome["seed"])
    assert len(seeds) == 2


def test_a_vector_changed_after_its_root_was_posted_is_fraud(
    tiny: Path, served: tuple[FakeNode, Receiver], vectors: list[Claim]
) -> None:
    node, received = served
    # The change is far below the threshold: only the path shows it.
    near = decode(vectors[5].vector_b64, 12)
    near[0] += np.float32(0.004)
    node.change("UPDATE results SET value = ? WHERE nonce = 5", encode(near[None])[0])
    result = run(received.file, node, "--model", tiny, "--seed", "s")
    assert result.exit_code == 1, result.output
    # The node made its paths of the rows that it has now, so the whole batch does not fit.
    assert "8 of 24 opened nonces do not fit the roots" in result.output
    assert "nonce 5: not committed its path does not lead to the root" in result.output


def test_a_node_without_its_vectors_has_not_proved(
    tiny: Path, served: tuple[FakeNode, Receiver], tmp_path: Path
) -> None:
    node, received = served
    node.change("DELETE FROM results WHERE nonce < 8")
    record = tmp_path / "verdict.json"
    part = run(received.file, node, "--model", tiny, "--json", record)
    assert part.exit_code == 2, part.output
    assert "8 of 24 drawn nonces are not opened" in part.output
    found = json.loads(record.read_text())
    assert found["verdict"] == found["findings"][-1]["test"] == "unproved"
    # By the rest alone it would be honest.
    assert found["findings"][0]["result"] == "honest"
    node.change("DELETE FROM results")
    nothing = run(received.file, node, "--model", tiny, "--json", record)
    assert nothing.exit_code == 2, nothing.output
    assert "refused: 24 of 24 drawn nonces are not opened" in nothing.output
    found = json.loads(record.read_text())
    assert (found["verdict"], found["reason"]) == ("unproved", "refused")


def test_a_node_of_another_checkpoint_has_not_proved(
    small_models: SmallModels, served: tuple[FakeNode, Receiver]
) -> None:
    node, received = served
    result = run(received.file, node, "--model", small_models.get("qwen3", seed=1))
    assert result.exit_code == 2, result.output
    assert "another digest: weights_digest: the source has " in result.output.replace("\n", " ")


def test_roots_without_a_node_that_opens_them_are_no_source(
    tiny: Path, served: tuple[FakeNode, Receiver]
) -> None:
    _, received = served
    plain = ["verify", str(received.file), "--model", str(tiny), *CLOSE]
    result = CliRunner().invoke(app, plain)
    assert result.exit_code == 3, result.output
    assert "has roots and no vectors; give --open NODE" in result.output.replace("\n", " ")


def test_an_unknown_round_and_another_block_are_named(
    tiny: Path, served: tuple[FakeNode, Receiver]
) -> None:
    node, received = served
    for option, value in (("--round-id", "other"), ("--block-hash", "other")):
        result = run(received.file, node, "--model", tiny, option, value)
        assert result.exit_code == 3, result.output
        assert "no round with roots fits" in result.output
