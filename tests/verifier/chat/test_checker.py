"""Verdicts over chats of the trained model, by its packaged calibration."""

from dataclasses import replace
from functools import cache, partial
from pathlib import Path

import numpy as np
import pytest

from proofserve.cli.model import SmallModel, checkpoint
from proofserve.engines.reference.kernels import PROFILES
from proofserve.engines.reference.network import Network, load, with_kernels
from proofserve.engines.reference.suspects import suspect
from proofserve.protocol.codec import to_float16
from proofserve.protocol.receipts.record import Receipt
from proofserve.protocol.verdict.counting import SequentialResult
from proofserve.reports import Progress, ReportedError
from proofserve.verifier.calibration_file import CalibrationFile
from proofserve.verifier.chat.statements import GapKind, NodeFacts
from proofserve.verifier.chat.verification import ChatChecker, ChatVerification
from proofserve.verifier.judges import Chances
from proofserve.verifier.validator import CheckpointTokenizer, ValidatorSetup
from proofserve_lab.checkpoints import trained_calibration
from support.chats import Writer, unchanged

CHANCES = Chances(alpha=1e-6, beta=1e-3)
# ``honest`` reads by torch's own kernels in bfloat16, of whose footprint our emulation has 0.46:
# less than of a server's, so without a measured node of its kind it gets no verdict.
SERVER = "vLLM on x86 with bfloat16"
FRAUD, HONEST, UNDECIDED, UNPROVED, UNEXPLAINED = (
    SequentialResult.FRAUD,
    SequentialResult.HONEST,
    SequentialResult.UNDECIDED,
    SequentialResult.UNPROVED,
    SequentialResult.UNEXPLAINED,
)


@pytest.fixture(scope="module")
def model() -> Path:
    return checkpoint(SmallModel("trained"))


@pytest.fixture(scope="module")
def served(model: Path) -> Network:
    return load(model, "bfloat16", "cpu")


@pytest.fixture(scope="module")
def measured() -> CalibrationFile:
    with trained_calibration("receipt-v1") as file:
        return CalibrationFile.read(file)


@pytest.fixture(scope="module")
def checker(model: Path, measured: CalibrationFile) -> ChatChecker:
    return ChatChecker(ValidatorSetup(model), measured, "seed")


@pytest.fixture(scope="module")
def honest(model: Path, served: Network, checker: ChatChecker) -> Writer:
    return Writer(served, CheckpointTokenizer(model), checker.weights_digest)


def judged(checker: ChatChecker, *chats: object) -> ChatVerification:
    known = NodeFacts(checker.weights_digest)
    return checker.outcome(chats, known, CHANCES, Progress())  # type: ignore[arg-type]


def fraud_by(outcome: ChatVerification) -> set[str]:
    return {opinion.test for opinion in outcome.opinions if opinion.result is FRAUD}


def test_an_honest_node_is_cleared(model: Path, checker: ChatChecker, honest: Writer) -> None:
    server = with_kernel(model, honest, SERVER)
    chats = [chat for n in range(2) for chat in server.chats(range(n, 8, 2), temperature=float(n))]
    outcome = judged(checker, *chats)
    assert outcome.verdict is HONEST
    assert len(outcome.answers) == len(chats)
    assert not outcome.failures
    assert not outcome.gaps


@pytest.mark.parametrize(
    ("weights", "chats"), [("int4 g128", 1), ("fp8 per channel", 2), ("int8 per channel", 2)]
)
def test_rounded_weights_are_named(
    checker: ChatChecker, honest: Writer, served: Network, weights: str, chats: int
) -> None:
    cheat = replace(honest, writes=suspect(served, weights))
    outcome = judged(checker, *cheat.chats(range(chats)))
    assert outcome.verdict is FRAUD
    named = next(each.text for each in outcome.opinions if each.test == "direction")
    assert weights.split(maxsplit=1)[0] in named


@pytest.mark.parametrize("temperature", [1.0, 0.0])
def test_a_cheap_writer_is_convicted_by_its_tokens_alone(
    checker: ChatChecker, honest: Writer, served: Network, temperature: float
) -> None:
    cheap = load(checkpoint(SmallModel("qwen3")), "bfloat16", "cpu")
    cheat = replace(honest, writes=cheap, reads=served)
    outcome = judged(checker, *cheat.chats(range(2), temperature=temperature))
    assert outcome.verdict is FRAUD
    assert fraud_by(outcome) >= {"tokens" if temperature else "greedy"}
    assert outcome.read_by is not FRAUD


def test_greedy_tokens_that_claim_to_be_drawn_are_convicted(
    checker: ChatChecker, honest: Writer
) -> None:
    chats = honest.chats(range(12), temperature=0.0, stated=1.0)
    assert "tokens" in fraud_by(judged(checker, *chats))


def invented(receipt: Receipt) -> Receipt:
    made = np.random.default_rng(0).normal(0, 0.2, (receipt.output_tokens, receipt.k_dim))
    return replace(receipt, sketches=to_float16(made.astype(np.float32)).tobytes())


def broken(receipt: Receipt) -> Receipt:
    made = np.full((receipt.output_tokens, receipt.k_dim), np.nan, np.float32)
    return replace(receipt, sketches=to_float16(made).tobytes())


@pytest.mark.parametrize("change", [invented, broken])
def test_right_tokens_with_other_sketches_are_convicted(
    checker: ChatChecker, honest: Writer, change: object
) -> None:
    chats = honest.chats(range(4), change=change)
    assert fraud_by(judged(checker, *chats)) >= {"paired"}


def test_one_altered_token_is_convicted(checker: ChatChecker, honest: Writer) -> None:
    chat = honest.chat(0)
    receipt = chat.receipts[0].receipt
    other = replace(honest, k_dim=32).chat(1).choices[0]
    altered = replace(chat, choices=(replace(other, index=0),))
    outcome = judged(checker, altered)
    assert [each.check for each in outcome.failures] == ["answer"]
    assert outcome.verdict is FRAUD
    assert receipt.output_tokens == len(other.token_ids or ())


def test_too_few_tokens_are_no_verdict(checker: ChatChecker, honest: Writer) -> None:
    outcome = judged(checker, honest.chat(0, tokens=9))
    assert outcome.verdict is UNDECIDED
    assert outcome.notes == ("9 tokens are fewer than a block of 16",)


def test_answers_without_a_receipt_are_counted(checker: ChatChecker, honest: Writer) -> None:
    outcome = judged(checker, honest.chat(0), replace(honest.chat(1), receipts=()))
    assert (len(outcome.answers), outcome.counts) == (1, {GapKind.MISSING: 1})
    assert outcome.verdict is UNPROVED


@pytest.mark.usefixtures("few_kernels")
def test_without_a_calibration_a_suspect_is_named_and_an_honest_node_cleared(
    model: Path, honest: Writer, served: Network
) -> None:
    unsure = ChatChecker(ValidatorSetup(model), None, "seed")
    cheat = replace(honest, writes=suspect(served, "int4 g128"))
    outcome = judged(unsure, *cheat.chats(range(2)))
    assert outcome.verdict is FRAUD
    assert fraud_by(outcome) == {"direction"}
    assert "int4" in outcome.opinions[0].text
    assert "kernels were emulated" in outcome.origin
    server = with_kernel(model, honest, SERVER)
    assert judged(unsure, *server.chats(range(8))).verdict is HONEST


@cache
def of_kernel(model: Path, kernel: str) -> Network:
    """One network for all tests, so that a writer decodes an answer with it once."""
    return with_kernels(load(model, "float32", "cpu"), PROFILES[kernel])


def with_kernel(model: Path, honest: Writer, kernel: str) -> Writer:
    return replace(honest, reads=of_kernel(model, kernel))


@pytest.mark.parametrize(
    "kernel",
    ["vLLM on a GPU", "float32", pytest.param("vLLM on x86 with AMX", marks=pytest.mark.slow)],
)
def test_an_honest_node_with_the_kernels_of_some_server_is_cleared(
    model: Path, honest: Writer, checker: ChatChecker, kernel: str
) -> None:
    """Its footprint is that of our own run of these kernels, or it errs too little to have any."""
    other = with_kernel(model, honest, kernel)
    outcome = judged(checker, *other.chats(range(12)))
    assert outcome.verdict is HONEST, outcome.opinions


# The coarsest and the finest of those that no server has.
@pytest.mark.parametrize(
    "kernel", ["sums of 32 in bfloat16", pytest.param("torch in float16", marks=pytest.mark.slow)]
)
def test_an_honest_node_without_a_known_footprint_gets_no_verdict(
    model: Path, honest: Writer, checker: ChatChecker, kernel: str
) -> None:
    other = with_kernel(model, honest, kernel)
    assert judged(checker, *other.chats(range(6))).verdict is UNEXPLAINED


def test_a_calibration_of_other_sketches_is_refused(checker: ChatChecker, honest: Writer) -> None:
    short = replace(honest, k_dim=16)
    with pytest.raises(ReportedError, match="k_dim: the calibration has 32"):
        judged(checker, short.chat(0))
    with pytest.raises(ReportedError, match=r"k_dim: the receipts have several: \[16, 32\]"):
        judged(checker, short.chat(0), honest.chat(1))


def test_a_receipt_of_another_checkpoint_clears_nobody(
    checker: ChatChecker, honest: Writer
) -> None:
    change = partial(replace, weights_digest="00" * 32)
    outcome = judged(checker, honest.chat(0, change=change))
    assert outcome.verdict is UNPROVED
    assert "1 other weights, of 1 answers" in outcome.unproved


def test_unchanged_is_honest_alone_too(checker: ChatChecker, honest: Writer) -> None:
    for number in range(20, 24):
        assert judged(checker, honest.chat(number, change=unchanged)).verdict is not FRAUD
