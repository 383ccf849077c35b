"""Receipts of a real server with vLLM's default options, whose chat runs a compiled graph."""

from pathlib import Path

import numpy as np

from proofserve.cli.model import SmallModel, checkpoint
from proofserve.protocol.codec import decode
from proofserve.protocol.verdict.directions import cosine
from proofserve.verifier.chat.answers import Blocks
from proofserve.verifier.chat.conversation import read
from proofserve.verifier.chat.statements import NodeFacts
from proofserve.verifier.chat.verification import ChatChecker
from proofserve.verifier.judges import BankRun, as_sent
from proofserve.verifier.validator import ValidatorSetup

# The trained model on vLLM 0.32.0, an AMD EPYC (Zen 5): AVX512 with bfloat16.
CHATS = Path(__file__).parents[2] / "data" / "chats-compiling"
KERNELS = "vLLM on x86 with bfloat16"


def test_errors_of_compiled_chat_point_where_the_emulated_graph_errs() -> None:
    checker = ChatChecker(ValidatorSetup(checkpoint(SmallModel("trained"))), None, "0")
    chats = [read(file) for file in sorted(CHATS.glob("*.json"))]
    found = checker.checked(chats, NodeFacts(checker.weights_digest))
    assert (len(found.answers), found.failures, found.gaps) == (len(chats), (), ())
    blocks = Blocks(found.answers, "0")
    validator = checker.validator.with_other(blocks.forwards)
    claims = {claim.nonce: claim for claim in blocks.claims().claims}
    truth = validator.truth(tuple(claims))
    errors = {
        n: decode(claim.vector_b64, blocks.width) - as_sent(truth[n]) for n, claim in claims.items()
    }

    def footprint(kernels: str) -> float:
        ours = validator.errors(BankRun(kernels=kernels), tuple(claims))
        return float(np.mean([cosine(errors[n], ours[n]) for n in claims]))

    assert footprint(f"{KERNELS}, compiled") > 0.5
    assert all(footprint(name) < 0.35 for name in validator.references)
