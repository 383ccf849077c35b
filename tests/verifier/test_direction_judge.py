"""The direction test over a bank: who is named, who is ruled out, and what it costs."""

from collections import Counter

import numpy as np
import pytest

from proofserve.protocol.verdict.comparison import ClaimError, Mismatch, Reason
from proofserve.protocol.verdict.sequential import SequentialResult
from proofserve.verifier.direction import (
    CalibratedYardstick,
    DirectionJudge,
    EmulatedYardstick,
    Yardstick,
)
from proofserve.verifier.judges import OWN, BankRun, Chances
from verifier.toy_null import WIDTH, Kernel, ToyBank, claims, toy_null

CHANCES = Chances(1e-6, 1e-3)
KERNELS = {"one": Kernel(), "another": Kernel(size=1.3, alike=0.35)}
LEANING = {"leaning": Kernel(lean=0.5)}


def calibrated(bank: ToyBank) -> Yardstick:
    return CalibratedYardstick(toy_null(bank, KERNELS))


def judged(
    bank: ToyBank, yardstick: Yardstick, node: Kernel, served: str | None = None, seed: int = 300
) -> tuple[DirectionJudge, int]:
    judge = DirectionJudge(bank, yardstick, CHANCES)
    for nonce in range(200):
        made = claims(bank.errors_by(node, [nonce], seed, served))
        judge.plan([nonce])
        judge.prepare(made)
        judge.add(made[0])
        if judge.opinion(0).result in {SequentialResult.FRAUD, SequentialResult.HONEST}:
            return judge, nonce + 1
    return judge, 200


@pytest.mark.parametrize(("served", "most"), [("int8", 20), ("fp8", 8), ("int4", 8)])
@pytest.mark.parametrize("seed", range(300, 303))
def test_the_prover_s_weights_are_named(served: str, most: int, seed: int) -> None:
    bank = ToyBank(KERNELS)
    judge, nonces = judged(bank, calibrated(bank), Kernel(), served, seed)
    opinion = judge.opinion(0)
    assert opinion.result is SequentialResult.FRAUD
    assert opinion.text.startswith(f"{served}, E = ")
    assert opinion.text.endswith("(calibrated)")
    assert nonces <= most
    assert all(standing.convicts for standing in judge.standings())


@pytest.mark.parametrize("seed", range(300, 320))
def test_an_honest_node_is_cleared_once_all_suspects_are_ruled_out(seed: int) -> None:
    bank = ToyBank(KERNELS)
    judge, nonces = judged(bank, calibrated(bank), Kernel(), seed=seed)
    assert judge.opinion(0).result is SequentialResult.HONEST
    assert nonces <= 20
    # Suspects that would show at once are not computed for every nonce.
    counts = Counter(name for name, _ in bank.asked)
    assert counts["int4"] <= 4


def test_without_a_calibration_a_verdict_takes_longer() -> None:
    bank = ToyBank(KERNELS)
    judge, more = judged(bank, EmulatedYardstick(bank.kernels), Kernel(), "fp8")
    _, few = judged(bank, calibrated(bank), Kernel(), "fp8")
    assert judge.opinion(0).result is SequentialResult.FRAUD
    assert judge.opinion(0).text.endswith("(without a calibration)")
    assert few < more <= 80


def test_without_a_calibration_a_model_that_leads_all_errors_one_way_convicts_nobody() -> None:
    """The certified form of old convicted it: 0.5 is above any margin that was thought safe."""
    bank = ToyBank(LEANING)
    judge, nonces = judged(bank, EmulatedYardstick(bank.kernels), Kernel(lean=0.5))
    assert nonces == 200
    # Our own run does not lean here, so nothing clears the node either.
    assert judge.opinion(0).result is SequentialResult.UNEXPLAINED
    assert "as far as those of honest kernels may" in judge.opinion(0).text


def test_one_leaning_population_is_enough_to_be_honest() -> None:
    bank = ToyBank({})
    null = toy_null(bank, {**KERNELS, **LEANING})
    judge, _ = judged(bank, CalibratedYardstick(null), Kernel(lean=0.5))
    convicted = [standing.convicts for standing in judge.standings()]
    assert convicted[-1] is False
    assert any(convicted)


MANY = tuple(f"suspect {number}" for number in range(20))


@pytest.mark.parametrize("guilty", [None, "suspect 0", "suspect 19"])
def test_a_nonce_costs_four_forwards_however_many_suspects_there_are(guilty: str | None) -> None:
    bank = ToyBank({}, MANY)
    null = toy_null(bank, KERNELS, nonces=64)
    judge = DirectionJudge(bank, CalibratedYardstick(null), CHANCES)
    nonce, drawn = 0, np.random.default_rng(1)
    while judge.opinion(0).result is SequentialResult.UNDECIDED:
        # As many nonces in one go as a verification takes.
        errors = []
        for each in range(nonce, nonce + min(8, nonce + 1)):
            noise = drawn.normal(size=WIDTH)
            lean = 0.8 * bank.direction(guilty, each) if guilty else 0.0
            error = lean + 0.6 * noise / np.linalg.norm(noise)
            errors.append(ClaimError(each, error.astype(np.float32)))
        judge.plan([error.nonce for error in errors])
        judge.prepare(errors)
        for error in errors:
            judge.add(error)
        nonce += len(errors)
    expected = SequentialResult.FRAUD if guilty else SequentialResult.HONEST
    assert judge.opinion(0).result is expected
    assert nonce <= 64
    assert max(Counter(each for _, each in bank.asked).values()) == 4
    assert guilty is None or judge.opinion(0).figures["suspect"] == guilty


def test_a_claim_without_a_vector_is_left_to_the_other_tests() -> None:
    bank = ToyBank(KERNELS)
    judge = DirectionJudge(bank, calibrated(bank), CHANCES)
    bank.asked.clear()
    broken = ClaimError(4, None, Mismatch(4, Reason.MISSING))
    judge.plan([4])
    judge.prepare([broken])
    judge.add(broken)
    assert judge.opinion(0).nonces == 0
    assert judge.opinion(0).result is SequentialResult.UNDECIDED
    assert not bank.asked


@pytest.mark.parametrize("with_calibration", [True, False], ids=["calibrated", "uncalibrated"])
def test_what_is_asked_of_a_bank_was_announced_before_the_errors_were_known(
    with_calibration: bool,
) -> None:
    bank = ToyBank(KERNELS, MANY)
    yardstick = calibrated(bank) if with_calibration else EmulatedYardstick(bank.kernels)
    judge = DirectionJudge(bank, yardstick, CHANCES)
    for first in (0, 4):
        nonces = range(first, first + 4)
        bank.asked.clear()
        bank.expected.clear()
        judge.plan(nonces)
        announced = {run: them for each in bank.expected for run, them in each.items()}
        assert not bank.asked
        errors = claims(bank.errors_by(Kernel(), nonces, seed=300))
        judge.prepare(errors)
        for error in errors:
            judge.add(error)
        suspects = {run: them for run, them in announced.items() if run.weights}
        asked = [(run.weights, nonce) for run, them in suspects.items() for nonce in them]
        assert sorted(bank.asked) == sorted(asked)
        assert all(run.kernels is None for run in suspects)
        kernels = {run: tuple(announced[run]) for run in announced.keys() - suspects.keys()}
        others = () if with_calibration else KERNELS
        runs = (OWN, *(BankRun(kernels=name) for name in others))
        assert kernels == dict.fromkeys(runs, tuple(nonces))


def test_once_all_suspects_are_ruled_out_nothing_more_is_asked_of_a_bank() -> None:
    bank = ToyBank(KERNELS)
    judge, _ = judged(bank, calibrated(bank), Kernel())
    assert judge.opinion(0).result is SequentialResult.HONEST
    bank.asked.clear()
    bank.expected.clear()
    judge.plan([900])
    judge.prepare(claims(bank.errors_by(Kernel(), [900], seed=300)))
    assert not bank.expected
    assert not bank.asked
