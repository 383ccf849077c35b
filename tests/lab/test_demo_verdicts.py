"""The verdicts of the demo, with plain transformers in the place of a server.

``test_demo.py`` has those of an honest one, by all kernels.
"""

from dataclasses import replace

import pytest
from rich.console import Console

from proofserve.cli.model import checkpoint
from proofserve.cli.session import CommandSession, Interrupts, ProgressLine
from proofserve.models.trained import DENSE
from proofserve.verifier.judges import OWN, BankRun
from proofserve.verifier.validator import CheckpointValidator, ValidatorSetup, proofs_of
from proofserve.verifier.verification import claims_of_vectors
from proofserve_lab import demo
from support.four_bits import one_thread

pytestmark = pytest.mark.usefixtures("few_kernels")
# As of the real model: the last cheat also forges a share, and a forged proof may be undecided.
MIXED = replace(
    demo.REAL, known=DENSE, nonces=32, rounded=(("8-bit weights", "int8 per channel"),), cheated=16
)


def shown(model: demo.DemoModel, served: BankRun) -> tuple[bool, list[str]]:
    """Whether all is as it should be when a server computes ``served``; and what is said."""
    mine = checkpoint(demo.SmallModel(DENSE.name))
    other = checkpoint(model.other) if model.other else None
    console = Console(record=True, width=200)
    with one_thread(), Interrupts() as interrupts:
        server = CheckpointValidator(ValidatorSetup(mine), proofs_of(demo.WORKLOAD, 8))
        vectors = server.vectors(served, range(model.nonces))
        session = CommandSession(console, interrupts, ProgressLine(console))
        validator = demo.DemoValidator(model, mine, other, session)
        right = validator.judge(claims_of_vectors(vectors), {})
    return right, console.export_text().splitlines()


def row(lines: list[str], what: str) -> str:
    (line,) = [line for line in lines if line.strip().startswith(f"{what}  ")]
    return line


def test_a_server_that_cheats_is_no_success() -> None:
    # Of the forgeries beside it, the altered copy and the other model's artifacts are enough.
    few = replace(demo.TRAINED, nonces=24, cheated=18, rounded=())
    right, lines = shown(few, replace(OWN, weights="int4 g128"))
    assert not right
    assert "fraud  (should not be)" in row(lines, "what this server produced")


def test_a_share_of_forged_proofs_is_not_cleared() -> None:
    # The server is honest in float32, as on processors without instructions for bfloat16.
    right, lines = shown(MIXED, BankRun(kernels="float32"))
    assert right
    assert " honest " in row(lines, "what this server produced")
    assert " fraud " in row(lines, "8-bit weights")
    mixed = row(lines, "8-bit weights for 5 of 16 nonces")
    assert " honest " not in mixed
    assert "should not be" not in mixed
