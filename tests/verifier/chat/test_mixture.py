"""Chats of a mixture of experts: honest errors point to suspects, unless experts are held."""

from dataclasses import replace

import numpy as np
import pytest

from proofserve.engines.reference.engine import Run
from proofserve.protocol.receipts.record import Sampling
from proofserve.protocol.receipts.sketches import ReceiptScheme
from proofserve.protocol.verdict.directions import cosine
from proofserve.verifier.chat.answers import Answer, Blocks
from proofserve.verifier.judges import OWN, BankRun, Vectors
from proofserve.verifier.validator import CheckpointValidator, ValidatorSetup
from support.four_bits import one_thread
from support.models import SmallModels

SUSPECT, TOKENS = "int8 per channel", 48


@pytest.fixture(scope="module")
def blocks() -> Blocks:
    draw = np.random.default_rng(0)
    scheme = ReceiptScheme("key", "00" * 32, 32)
    sketches = np.zeros((TOKENS, 32), np.float32)
    answers = []
    for number in range(8):
        prompt, output = draw.integers(10, 2000, 16), draw.integers(10, 2000, TOKENS)
        ids = tuple(prompt.tolist()), tuple(output.tolist())
        answers.append(Answer(f"{number}", *ids, Sampling(), scheme, sketches))
    return Blocks(answers, "seed")


@pytest.fixture(scope="module")
def validator(small_models: SmallModels, blocks: Blocks) -> CheckpointValidator:
    setup = ValidatorSetup(small_models.get("qwen3_moe"))
    with one_thread():
        made = CheckpointValidator(setup, blocks.forwards)
        made.truth(tuple(range(len(blocks))))
    return made


def leaning(errors: Vectors, moved: Vectors) -> float:
    return float(np.mean([cosine(errors[number], moved[number]) for number in errors]))


def test_suspects_are_computed_with_the_experts_of_the_published_weights(
    validator: CheckpointValidator, blocks: Blocks
) -> None:
    numbers = tuple(range(len(blocks)))
    with one_thread():
        own = validator.errors(OWN, numbers)
        held = validator.predictions(SUSPECT, numbers)
        truth = validator.truth(numbers)
        (routed,) = blocks.forwards([Run(validator.network(BankRun(SUSPECT)), numbers)])
        served = validator.errors(replace(OWN, weights=SUSPECT), numbers)
    natural = dict(zip(routed.nonces, routed.values, strict=True))
    natural = {number: natural[number] - truth[number] for number in numbers}
    assert leaning(own, natural) > 0.25
    assert abs(leaning(own, held)) < 0.06
    # A node with these weights routes as it likes, and points there all the same.
    assert leaning(served, held) > 0.1
