"""The verdicts of the demo, with plain transformers in the place of a server that cheats.

``test_demo.py`` has those of an honest one.
"""

from dataclasses import replace

import numpy as np
import pytest
from rich.console import Console

from proofserve.cli import demo
from proofserve.cli.model import checkpoint
from proofserve.cli.session import CommandSession, Interrupts, ProgressLine
from proofserve.protocol.codec import encode
from proofserve.protocol.verdict.comparison import Claim
from proofserve.verifier.judges import OWN
from proofserve.verifier.validator import CheckpointValidator, ValidatorSetup, proofs_of
from support.four_bits import one_thread

NONCES = range(32)


@pytest.mark.usefixtures("few_kernels")
def test_a_server_that_cheats_is_no_success(monkeypatch: pytest.MonkeyPatch) -> None:
    # Of the forgeries beside it, the altered copy and the other model's artifacts are enough.
    monkeypatch.setattr(demo, "QUANTISED", ())
    mine, other = checkpoint(demo.MODEL), checkpoint(demo.OTHER_MODEL)
    setup = ValidatorSetup(mine)
    console = Console(record=True, width=120)
    with one_thread(), Interrupts() as interrupts:
        validator = CheckpointValidator(setup, proofs_of(demo.WORKLOAD, 8))
        vectors = validator.vectors(replace(OWN, weights="int4 g128"), NONCES)
        texts = encode(np.stack([vectors[nonce] for nonce in NONCES]))
        claims = [Claim(nonce, text) for nonce, text in zip(NONCES, texts, strict=True)]
        session = CommandSession(console, interrupts, ProgressLine(console))
        right = demo.DemoValidator(mine, other, session).judge(claims)
    assert not right
    lines = console.export_text().splitlines()
    (line,) = [line for line in lines if "what this server produced" in line]
    assert "fraud  (should not be)" in line
