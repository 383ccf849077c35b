"""The direction test over a bank: who is named, who is ruled out, and what it costs."""

from collections import Counter
from collections.abc import Mapping, Sequence

import numpy as np
import pytest
from numpy.typing import NDArray

from proofserve.lab.verify.direction import DirectionJudge, Expected
from proofserve.lab.verify.judges import Chances, Vectors
from proofserve.protocol.verdict.comparison import ClaimError, Mismatch, Reason
from proofserve.protocol.verdict.direction import HonestSpread
from proofserve.protocol.verdict.sequential import SequentialResult

K = 64
NAMES = ("int8", "fp8", "int4")
# Mean cosines with the own suspect, as on small trained models.
OWN = {"int8": 0.4, "fp8": 0.9, "int4": 0.99}
EXPECTED = {name: Expected(mean, 0.16) for name, mean in OWN.items()}
CHANCES = Chances(1e-6, 1e-3)


def unit(drawn: np.random.Generator) -> NDArray[np.float32]:
    made = drawn.normal(size=K).astype(np.float32)
    return made / np.linalg.norm(made)


class Bank:
    """Each suspect moves each nonce in a direction of its own."""

    def __init__(self, names: Sequence[str] = NAMES) -> None:
        self.names = names
        self.asked: list[tuple[str, int]] = []

    def predictions(self, name: str, nonces: Sequence[int]) -> Vectors:
        self.asked += [(name, nonce) for nonce in nonces]
        return {nonce: self.direction(name, nonce) for nonce in nonces}

    def direction(self, name: str, nonce: int) -> NDArray[np.float32]:
        return unit(np.random.default_rng([nonce, self.names.index(name)]))


def errors(prover: str | None, nonces: Sequence[int], bank: Bank, seed: int) -> list[ClaimError]:
    """The errors of a prover with a suspect's weights; of an honest one with None."""
    drawn = np.random.default_rng([seed, len(NAMES)])
    made = []
    for nonce in nonces:
        error = 0.16 * np.sqrt(K / 60) * unit(drawn)
        if prover is not None:
            c = OWN[prover]
            error = c * bank.direction(prover, nonce) + np.sqrt(1 - c * c) * unit(drawn)
        made.append(ClaimError(nonce, error.astype(np.float32)))
    return made


def judged(
    prover: str | None, *, sd: float | None, seed: int = 0, most: int = 200
) -> tuple[DirectionJudge, Bank, int]:
    bank = Bank()
    honest = dict.fromkeys(NAMES, HonestSpread(sd)) if sd else {}
    judge = DirectionJudge(bank, EXPECTED, honest, CHANCES)
    for nonce in range(most):
        made = errors(prover, [nonce], bank, seed * 1000 + nonce)
        judge.prepare(made)
        judge.add(made[0])
        if judge.finding().result is not SequentialResult.UNDECIDED:
            return judge, bank, nonce + 1
    return judge, bank, most


@pytest.mark.parametrize(("prover", "most"), [("int8", 40), ("fp8", 8), ("int4", 8)])
@pytest.mark.parametrize("seed", range(5))
def test_the_prover_s_weights_are_named(prover: str, most: int, seed: int) -> None:
    judge, _, nonces = judged(prover, sd=0.16, seed=seed)
    finding = judge.finding()
    assert finding.result is SequentialResult.FRAUD
    assert finding.text.startswith(f"{prover}, E = ")
    assert finding.text.endswith("(calibrated)")
    assert nonces <= most


def test_without_a_calibration_the_verdict_is_certified_and_takes_longer() -> None:
    sharp, _, few = judged("fp8", sd=0.16)
    certain, _, more = judged("fp8", sd=None)
    assert sharp.finding().result is certain.finding().result is SequentialResult.FRAUD
    assert certain.finding().text.endswith("(certified)")
    assert few < more <= 45


@pytest.mark.parametrize("seed", range(20))
def test_an_honest_node_is_cleared_once_all_suspects_are_ruled_out(seed: int) -> None:
    judge, bank, nonces = judged(None, sd=0.16, seed=seed)
    assert judge.finding().result is SequentialResult.HONEST
    assert nonces <= 20
    # Suspects that would show at once are not computed for every nonce.
    counts: Mapping[str, int] = {name: sum(n == name for n, _ in bank.asked) for name in NAMES}
    assert counts["int4"] <= 3
    assert counts["fp8"] <= 3


MANY = tuple(f"suspect {number}" for number in range(20))


@pytest.mark.parametrize("guilty", [None, "suspect 0", "suspect 19"])
def test_a_nonce_costs_four_forwards_however_many_suspects_there_are(guilty: str | None) -> None:
    bank = Bank(MANY)
    honest = dict.fromkeys(MANY, HonestSpread(0.16))
    judge = DirectionJudge(bank, dict.fromkeys(MANY, Expected(0.44, 0.14)), honest, CHANCES)
    nonce, drawn = 0, np.random.default_rng(1)
    while judge.finding().result is SequentialResult.UNDECIDED:
        # As many nonces in one go as a verification takes.
        errors = []
        for each in range(nonce, nonce + min(8, nonce + 1)):
            noise = unit(drawn)
            lean = 0.44 * bank.direction(guilty, each) if guilty else 0.0
            errors.append(ClaimError(each, (lean + 0.9 * noise).astype(np.float32)))
        judge.prepare(errors)
        for error in errors:
            judge.add(error)
        nonce += len(errors)
    expected = SequentialResult.FRAUD if guilty else SequentialResult.HONEST
    assert judge.finding().result is expected
    assert nonce <= 40
    assert max(Counter(each for _, each in bank.asked).values()) == 4
    assert guilty is None or judge.finding().figures["suspect"] == guilty


def test_a_claim_without_a_vector_is_left_to_the_other_tests() -> None:
    bank = Bank()
    judge = DirectionJudge(bank, EXPECTED, {}, CHANCES)
    broken = ClaimError(4, None, Mismatch(4, Reason.MISSING))
    judge.prepare([broken])
    judge.add(broken)
    assert judge.finding().nonces == 0
    assert judge.finding().result is SequentialResult.UNDECIDED
    assert all(nonce != 4 for _, nonce in bank.asked)
