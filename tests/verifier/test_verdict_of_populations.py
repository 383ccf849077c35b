"""A node is honest if it is one of the calibrated kernels, and a fraud only if it is none."""

from dataclasses import replace

import numpy as np
import pytest

from proofserve.lab.report import Progress
from proofserve.protocol.errors import ProtocolError
from proofserve.protocol.verdict.comparison import ClaimError, Mismatch, Reason
from proofserve.protocol.verdict.sequential import SequentialResult
from proofserve.verifier.direction import CalibratedYardstick, DirectionJudge
from proofserve.verifier.judges import Chances, Judge, PairedJudge, TwinJudge, default_share
from proofserve.verifier.populations import HonestPopulations
from proofserve.verifier.simulation import convictions, draws, node_figures, simulated
from proofserve.verifier.verification import Verification, decide
from verifier.toy_null import Kernel, ToyBank, claims, figures, toy_null

CHANCES = Chances(5e-7, 1e-3)
KERNELS = {
    "one": Kernel(),
    "head norms": Kernel(size=1.2, alike=0.45),
    "float16": Kernel(size=0.13, alike=0.1),
}
SAMPLE = 200


@pytest.fixture(scope="module")
def bank() -> ToyBank:
    return ToyBank(KERNELS)


@pytest.fixture(scope="module")
def null(bank: ToyBank) -> HonestPopulations:
    return toy_null(bank, KERNELS)


def verdict(
    bank: ToyBank, null: HonestPopulations, errors: list[ClaimError], chances: Chances = CHANCES
) -> Verification:
    judges: list[Judge] = [
        PairedJudge(bank.own_errors, null, chances),
        DirectionJudge(bank, CalibratedYardstick(null), chances),
        TwinJudge(bank.own_errors, null, chances),
    ]
    by_nonce = {error.nonce: error for error in errors}
    return decide(
        list(by_nonce), lambda nonces: [by_nonce[n] for n in nonces], 8, judges, Progress()
    )


def of_node(
    bank: ToyBank, node: Kernel, served: str | None = None, seed: int = 300
) -> list[ClaimError]:
    return claims(bank.errors_by(node, range(SAMPLE), seed, served))


@pytest.mark.parametrize("name", KERNELS)
@pytest.mark.parametrize("seed", range(300, 305))
def test_a_node_of_any_calibrated_kernel_is_cleared(
    bank: ToyBank, null: HonestPopulations, name: str, seed: int
) -> None:
    found = verdict(bank, null, of_node(bank, KERNELS[name], seed=seed))
    assert found.verdict is SequentialResult.HONEST
    assert found.nonces_used <= 60


def test_the_closest_kernel_is_named(bank: ToyBank, null: HonestPopulations) -> None:
    found = verdict(bank, null, of_node(bank, KERNELS["head norms"]))
    assert null.names[found.closest] == "head norms"


@pytest.mark.parametrize("served", ["int8", "fp8", "int4"])
@pytest.mark.parametrize("kernel", KERNELS)
def test_suspected_weights_are_a_fraud_on_any_kernel(
    bank: ToyBank, null: HonestPopulations, served: str, kernel: str
) -> None:
    found = verdict(bank, null, of_node(bank, KERNELS[kernel], served))
    assert found.verdict is SequentialResult.FRAUD
    direction = next(each for each in found.opinions if each.test == "direction")
    assert direction.figures["suspect"] == served
    assert found.nonces_used <= 24


def test_a_kernel_that_nobody_measured_is_not_convicted(
    bank: ToyBank, null: HonestPopulations
) -> None:
    """As the first foreign processor: twins far more alike, and errors a little larger."""
    found = verdict(bank, null, of_node(bank, Kernel(size=1.8, alike=0.85)))
    assert found.verdict is SequentialResult.UNEXPLAINED
    assert found.nonces_used == SAMPLE
    results = {each.test: each.result for each in found.opinions}
    assert SequentialResult.FRAUD not in results.values()
    assert results["twins"] is SequentialResult.UNEXPLAINED


def test_invented_vectors_are_a_fraud_in_all_nonces_and_in_a_tenth(
    bank: ToyBank, null: HonestPopulations
) -> None:
    honest = of_node(bank, KERNELS["one"])
    drawn = np.random.default_rng(0)

    def invented(error: ClaimError) -> ClaimError:
        return ClaimError(error.nonce, drawn.normal(0.0, 0.1, len(error.error)).astype(np.float32))

    everywhere = verdict(bank, null, [invented(each) for each in honest])
    assert everywhere.verdict is SequentialResult.FRAUD
    assert everywhere.nonces_used <= 20
    mixed = [invented(each) if each.nonce % 10 == 5 else each for each in honest]
    careful = replace(CHANCES, share=0.1)
    assert verdict(bank, null, mixed, careful).verdict is SequentialResult.FRAUD
    assert verdict(bank, null, honest, careful).verdict is SequentialResult.HONEST


def test_claims_without_a_vector_convict(bank: ToyBank, null: HonestPopulations) -> None:
    broken = [ClaimError(n, None, Mismatch(n, Reason.MISSING)) for n in range(40)]
    found = verdict(bank, null, broken)
    assert found.verdict is SequentialResult.FRAUD


def test_the_verdict_says_which_share_of_forged_nonces_it_excludes(
    bank: ToyBank, null: HonestPopulations
) -> None:
    honest = of_node(bank, KERNELS["one"])
    quick = verdict(bank, null, honest, replace(CHANCES, share=0.5)).opinions[0]
    slow = verdict(bank, null, honest, replace(CHANCES, share=0.1)).opinions[0]
    assert quick.figures["excluded_share"] in {0.5, 0.3, 0.2}
    assert slow.figures["excluded_share"] == 0.1
    assert (default_share(79), default_share(80)) == (0.5, 0.1)


def test_simulated_verifications_end_as_real_ones(bank: ToyBank, null: HonestPopulations) -> None:
    own = figures(bank, bank.own_errors(range(SAMPLE)))
    drawn = draws(SAMPLE, 1000, SAMPLE)
    for kernel in KERNELS.values():
        node = node_figures(figures(bank, bank.errors_by(kernel, range(SAMPLE), 300)), own, null)
        ended = simulated(node, null, Chances(1e-6, 1e-3), drawn)
        assert (ended.convicted, ended.cleared) == (0, 1000)
    cheat = figures(bank, bank.errors_by(Kernel(), range(SAMPLE), 300, served="int8"))
    ended = simulated(node_figures(cheat, own, null), null, Chances(1e-6, 1e-3), drawn)
    assert ended.convicted == 1000
    assert ended.nonces_to(ended.convicted_at, 0.999) <= 24
    strange = figures(bank, bank.errors_by(Kernel(size=1.8, alike=0.85), range(SAMPLE), 300))
    ended = simulated(node_figures(strange, own, null), null, Chances(1e-6, 1e-3), drawn)
    assert (ended.convicted, ended.cleared, ended.unexplained) == (0, 0, 1000)


def test_a_kernel_left_out_is_judged_by_the_others(bank: ToyBank, null: HonestPopulations) -> None:
    own = figures(bank, bank.own_errors(range(SAMPLE)))
    node = node_figures(
        figures(bank, bank.errors_by(KERNELS["one"], range(SAMPLE), 300)), own, null
    )
    drawn = draws(SAMPLE, 1000, 500)
    others = null.without("one")
    assert others.names == ("head norms", "float16")
    assert (convictions(node, others, Chances(1e-6, 1e-3), drawn) > 500).all()
    # Beside float16 alone, whose errors are an eighth as large, a node in bfloat16 would look like
    # a fraud: the check of a calibration finds that out.
    alone = others.without("head norms")
    assert (convictions(node, alone, Chances(1e-6, 1e-3), drawn) <= 500).all()


def test_too_few_figures_are_refused(bank: ToyBank) -> None:
    with pytest.raises(ProtocolError):
        toy_null(bank, KERNELS, nonces=1)
