"""The verdicts of the demo, with plain transformers in the place of its server."""

import re
from collections.abc import Iterator

import numpy as np
import pytest
from rich.console import Console

from proofserve.cli.demo import MODEL, OTHER_MODEL, WORKLOAD, DemoValidator
from proofserve.cli.model import checkpoint
from proofserve.cli.session import CommandSession, Interrupts, ProgressLine
from proofserve.protocol.codec import encode
from proofserve.protocol.verdict.comparison import Claim
from proofserve.wiring.validator import CheckpointValidator, ValidatorSetup, proofs_of
from support.four_bits import one_thread

NONCES = range(64)


@pytest.fixture
def session() -> Iterator[CommandSession]:
    console = Console(record=True, width=120)
    with Interrupts() as interrupts:
        yield CommandSession(console, interrupts, ProgressLine(console))


@pytest.fixture(scope="module")
def node() -> CheckpointValidator:
    return CheckpointValidator(ValidatorSetup(checkpoint(MODEL), "float32"), proofs_of(WORKLOAD, 8))


def claims(vectors: dict[int, np.ndarray]) -> list[Claim]:
    texts = encode(np.stack([vectors[nonce] for nonce in NONCES]))
    return [Claim(nonce, text) for nonce, text in zip(NONCES, texts, strict=True)]


def judged(session: CommandSession, made: list[Claim]) -> tuple[bool, list[str]]:
    with one_thread():
        validator = DemoValidator(checkpoint(MODEL), checkpoint(OTHER_MODEL), session)
        right = validator.judge(made)
    return right, session.console.export_text().splitlines()


def test_all_verdicts_are_right_and_name_their_test(
    session: CommandSession, node: CheckpointValidator
) -> None:
    right, lines = judged(session, claims(dict(node.deployed(NONCES))))
    assert right, lines
    expected = {
        "what this server produced": r"honest +\d+ +paired, direction, twins",
        "a copy with 32 of 64 altered": r"fraud +\d+ +paired: E = ",
        "another model's artifacts": r"fraud +\d+ +paired: E = ",
        "4-bit weights": r"fraud +\d+ +direction: int4 g128, E = ",
        "fp8 weights": r"fraud +\d+ +direction: fp8 \S+ \S+, E = ",
    }
    for what, row in expected.items():
        (line,) = [line for line in lines if what in line]
        assert re.search(row, line), line


def test_a_server_that_cheats_is_no_success(
    session: CommandSession, node: CheckpointValidator
) -> None:
    right, lines = judged(session, claims(dict(node.served_by("int4 g128", NONCES))))
    assert not right
    (line,) = [line for line in lines if "what this server produced" in line]
    assert "fraud  (should not be)" in line
