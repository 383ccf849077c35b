"""A node with vLLM's default options, which compile the model: nearly all others here are eager."""

import pytest

from families.trial import receipts_hold
from proofserve.cli.model import SmallModel, checkpoint
from proofserve.cli.servers import ServerOptions, serving
from proofserve.cli.session import open_session
from proofserve.client import challenge
from proofserve.remote.records import Work
from proofserve.reports import Progress
from proofserve.verifier.chat.conversation import ReceiptClient, requests
from proofserve_lab.nodes import computing_round

pytestmark = [pytest.mark.engine, pytest.mark.slow]

ANSWERS, TOKENS = 24, 64


def test_its_proofs_are_cleared_and_so_are_receipts_of_its_compiled_chat() -> None:
    model = checkpoint(SmallModel("trained"))
    served = ServerOptions(model, "trained", receipts=True, eager=False)
    with open_session() as session, serving(served, session) as node:
        assert node.kernels()["ops"] == "PyTorch"
        outcome = challenge(node.url, model=model, nonces=200, deadline_s=600.0)
        with ReceiptClient(node.url) as client:
            asked = requests("trained", 1, ANSWERS, TOKENS)
            with computing_round(node, Work("trained", seq_len=64, scheme="sketch-v2", k_dim=64)):
                chats = client.chats(asked, 1, Progress())
    assert outcome["outcome"] == "honest", outcome
    found = receipts_hold(model, chats, Progress())
    assert found.passed, found.detail
