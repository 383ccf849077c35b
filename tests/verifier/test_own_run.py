"""Which of our own runs a node is judged beside."""

from dataclasses import replace

import numpy as np
import pytest

from proofserve.engines.reference.kernels import SERVED
from proofserve.protocol.verdict.comparison import ClaimError, Mismatch, Reason
from proofserve.protocol.verdict.counting import SequentialResult
from proofserve.verifier.error_judges import DirectionJudge, FootprintJudge, PairedJudge
from proofserve.verifier.judges import Chances, Judge, Variant
from proofserve.verifier.judging import references_on
from verifier.toy_null import (
    CARD,
    ON_RANKS,
    REFERENCE,
    SECOND,
    SERVER,
    Kernel,
    ToyBank,
    claims,
    gathered,
    own_run,
)

CHANCES = Chances(1e-6, 1e-3, 0.3)
KERNELS = {"one": SERVER, "another": Kernel(size=1.3)}


def test_our_own_run_is_of_the_kernel_that_is_most_like_the_node() -> None:
    bank = ToyBank(KERNELS)
    own = own_run(bank, None)
    node = Kernel(like="second reference")
    assert own.honest.reference == "reference"
    own.compare(claims(bank.errors_by(node, range(12), 300)))
    assert own.honest.reference == "second reference"
    # The other one is so far behind that it is computed no more.
    own.expect([12])
    assert {run.kernels for run in bank.expected[-1]} == {"second reference"}
    # A claim without a vector is like nothing, and chooses nothing.
    other = own_run(bank, None)
    other.compare([ClaimError(0, None, Mismatch(0, Reason.MISSING))])
    assert other.honest.reference == "reference"
    assert other.cosines([0]).tolist() == [0.0]
    assert np.isinf(other.ratios([0], [np.inf])[0])


def test_a_kernel_that_only_led_at_first_costs_a_node_nothing() -> None:
    bank = ToyBank(KERNELS)
    judge, alone = (FootprintJudge(own_run(bank, None), CHANCES) for _ in range(2))
    node, other = Kernel(like="second reference"), Kernel(kept=0.1)
    first = claims(bank.errors_by(other, range(3), 302))
    rest = claims(bank.errors_by(node, range(3, 30), 301))
    judge.prepare(first)
    for error in first:
        judge.add(error)
    assert judge.opinion().figures["kernel"] == "reference"
    judge.prepare(rest)
    for error in rest:
        judge.add(error)
    alone.prepare([*first, *rest])
    for error in [*first, *rest]:
        alone.add(error)
    assert judge.opinion() == alone.opinion()
    assert judge.opinion().figures["kernel"] == "second reference"


def test_large_errors_convict_beside_the_kernel_that_leads_in_the_end() -> None:
    """A forged file whose first vectors looked like another kernel's once stopped all evidence."""
    bank = ToyBank(KERNELS)
    own = own_run(bank, gathered(bank, KERNELS))
    judge = PairedJudge(own, CHANCES)
    first = claims(bank.errors_by(Kernel(kept=0.1), range(3), 302))
    large = Kernel(size=100.0, like="second reference")
    for group in (first, claims(bank.errors_by(large, range(3, 30), 301))):
        judge.prepare(group)
        for error in group:
            judge.add(error)
    assert own.reference == "second reference"
    assert judge.opinion().result is SequentialResult.FRAUD


def judged_in_groups(judge: Judge[ClaimError], errors: list[ClaimError]) -> None:
    while errors:
        group, errors = errors[:6], errors[6:]
        judge.prepare(group)
        for error in group:
            judge.add(error)


@pytest.mark.parametrize("calibrated", [True, False], ids=["calibrated", "uncalibrated"])
def test_a_server_on_several_ranks_is_cleared_by_our_run_on_as_many(calibrated: bool) -> None:
    bank = ToyBank(KERNELS)
    own = own_run(bank, gathered(bank, KERNELS) if calibrated else None)
    judge = FootprintJudge(own, CHANCES)
    judged_in_groups(judge, claims(bank.errors_by(Kernel(like=ON_RANKS), range(60), 300)))
    assert own.reference == ON_RANKS
    assert judge.opinion().result is SequentialResult.HONEST
    assert judge.opinion().figures["kernel"] == ON_RANKS


def test_a_server_on_one_rank_costs_no_run_on_several() -> None:
    bank = ToyBank(KERNELS)
    own = own_run(bank, None)
    judged_in_groups(FootprintJudge(own, CHANCES), claims(bank.errors_by(SERVER, range(60), 300)))
    assert ON_RANKS not in bank.ran


def test_of_a_server_that_says_its_kernel_no_other_is_run() -> None:
    bank = ToyBank(KERNELS)
    own = own_run(bank, None, said=SECOND)
    own.expect([0])
    assert {(run.kernels, run.order) for run in bank.expected[-1]} == {(SECOND, 1), (SECOND, 2)}
    judge = FootprintJudge(own, CHANCES)
    judged_in_groups(judge, claims(bank.errors_by(Kernel(like=SECOND), range(30), 300)))
    assert judge.opinion().result is SequentialResult.HONEST
    assert bank.ran == {SECOND}


def test_a_server_in_float32_is_cleared_and_costs_no_other_run() -> None:
    bank = ToyBank(KERNELS)
    own = own_run(bank, None, said=SECOND)
    judge = FootprintJudge(own, CHANCES)
    judged_in_groups(judge, claims(bank.errors_by(Kernel(size=0.003, kept=0.0), range(30), 300)))
    found = judge.opinion()
    assert found.result is SequentialResult.HONEST
    assert found.text == "30 of 30 vectors are the published ones, as float32 gives them"
    assert bank.ran == {SECOND}


def test_beside_activations_in_8_bits_a_short_error_clears_nobody() -> None:
    """A lie is as short: private int8 in one layer, all else in float32, for a model in fp8."""
    bank = ToyBank(KERNELS)
    bank.round_activations = True
    judge = FootprintJudge(own_run(bank, None), CHANCES)
    judged_in_groups(judge, claims(bank.errors_by(Kernel(size=0.05, kept=0.0), range(60), 300)))
    assert judge.opinion().result is not SequentialResult.HONEST


def test_vectors_in_float32_clear_no_lie_in_the_other_nonces() -> None:
    bank = ToyBank(KERNELS)
    judge = FootprintJudge(own_run(bank, None), CHANCES)
    exact = bank.errors_by(Kernel(size=0.003, kept=0.0), range(140), 300)
    lie = bank.errors_by(Kernel(kept=0.0), range(0, 200, 3), 301)
    judged_in_groups(judge, claims({**exact, **lie}))
    assert judge.opinion().result is not SequentialResult.HONEST


@pytest.mark.parametrize("has", [REFERENCE, ON_RANKS])
def test_a_server_with_another_kernel_than_it_says_is_judged_beside_that(has: str) -> None:
    bank = ToyBank(KERNELS)
    own = own_run(bank, None, said=SECOND)
    judge = FootprintJudge(own, CHANCES)
    judged_in_groups(judge, claims(bank.errors_by(Kernel(like=has), range(60), 300)))
    assert own.reference == has
    assert judge.opinion().result is SequentialResult.HONEST


@pytest.mark.parametrize(
    ("ran_on", "named"),
    [
        ({"processor": "a Xeon, AVX512 with AMX"}, ["vLLM on x86 with AMX"]),
        ({"processor": "AVX512 with bfloat16", "ranks": 1}, ["vLLM on x86 with bfloat16"]),
        ({"processor": "AVX2 without bfloat16"}, ["vLLM on x86 without bfloat16"]),
        ({"processor": "NVIDIA H100 80GB HBM3"}, ["vLLM on a GPU", "compiled"]),
        ({"processor": "NVIDIA L4", "ranks": 4}, ["vLLM on a GPU on 4 ranks"]),
        (
            {"processor": "an EPYC, AVX512 with bfloat16, ops of PyTorch", "ranks": 1},
            ["vLLM on x86 with bfloat16, ops of PyTorch"],
        ),
        (
            {"processor": "NVIDIA L4, ops of PyTorch", "ranks": 4},
            ["vLLM on a GPU, ops of PyTorch on 4 ranks"],
        ),
        (
            {"processor": "AVX2 without bfloat16", "ranks": 2},
            ["vLLM on x86 without bfloat16 on 2 ranks, by gloo"],
        ),
        # Who says nothing, or nothing that is known here, is compared with all.
        ({"processor": None, "ranks": None}, None),
        ({"processor": "AVX512", "ranks": 2}, None),
        ({"processor": "DEFAULT"}, None),
        ({"processor": "NVIDIA L4", "ranks": 3}, None),
        ({"processor": ["NVIDIA"], "ranks": "many"}, ["vLLM on a GPU", "compiled"]),
        ({}, None),
    ],
)
def test_what_a_server_says_names_the_references(
    ran_on: dict[str, object], named: list[str] | None
) -> None:
    references = ("our own rounding", *SERVED)
    card, x86 = "vLLM on a GPU", "vLLM on x86 with bfloat16"
    old = "vLLM on x86 without bfloat16"
    variants = {
        card: {
            Variant(ranks=4): f"{card} on 4 ranks",
            Variant("PyTorch", 4): f"{card}, ops of PyTorch on 4 ranks",
        },
        x86: {Variant("PyTorch"): f"{x86}, ops of PyTorch"},
        old: {Variant(ranks=2, by_gloo=True): f"{old} on 2 ranks, by gloo"},
    }
    found = references_on(ran_on, references, variants)
    assert found == (references if named is None else named)


@pytest.mark.parametrize(("kept", "beside"), [(0.0, False), (0.6, True)])
def test_large_errors_convict_beside_several_ranks_too(kept: float, beside: bool) -> None:
    """Who serves on two ranks, and forges, is no better off than on one."""
    bank = ToyBank(KERNELS)
    own = own_run(bank, gathered(bank, KERNELS))
    judge = PairedJudge(own, CHANCES)
    large = Kernel(size=4.0, kept=kept, like=ON_RANKS)
    judged_in_groups(judge, claims(bank.errors_by(large, range(60), 300)))
    assert ON_RANKS in bank.ran
    assert (own.reference == ON_RANKS) is beside
    assert judge.opinion().result is SequentialResult.FRAUD


# -- nodes that the validator trusts ---------------------------------------------------------------

# Two nodes with it are 0.64 alike.
ON_A_CARD = Kernel(kept=0.64, like=CARD)


@pytest.mark.parametrize("calibrated", [True, False], ids=["calibrated", "uncalibrated"])
def test_a_node_with_a_kernel_that_nobody_emulates_is_cleared_beside_its_like(
    calibrated: bool,
) -> None:
    bank = ToyBank(KERNELS)
    known = gathered(bank, KERNELS) if calibrated else None
    node = claims(bank.errors_by(ON_A_CARD, range(60), 300))
    trusted = {"mine": bank.errors_by(ON_A_CARD, range(60), 301)}
    alone, beside = (
        FootprintJudge(own_run(bank, known, trusted=of), CHANCES) for of in ({}, trusted)
    )
    judged_in_groups(alone, [*node])
    assert alone.opinion().result is not SequentialResult.HONEST
    bank.ran.clear()
    judged_in_groups(beside, [*node])
    assert beside.opinion().result is SequentialResult.HONEST
    assert beside.opinion().figures["kernel"] == "mine"
    # Its footprint saves the runs of all other kernels.
    assert ON_RANKS not in bank.ran
    cheat = FootprintJudge(own_run(bank, known, trusted=trusted), CHANCES)
    judged_in_groups(cheat, claims(bank.errors_by(ON_A_CARD, range(60), 302, "int8")))
    assert cheat.opinion().result is not SequentialResult.HONEST


def test_a_trusted_node_that_errs_so_far_that_lies_would_hide_clears_nobody() -> None:
    bank = ToyBank(KERNELS)
    far = replace(ON_A_CARD, size=1.7)
    trusted = {"mine": bank.errors_by(far, range(60), 301)}
    judge = FootprintJudge(own_run(bank, None, trusted=trusted), CHANCES)
    judged_in_groups(judge, claims(bank.errors_by(far, range(60), 300)))
    assert judge.opinion().result is not SequentialResult.HONEST


def test_a_node_whose_kernel_is_emulated_is_judged_beside_that_all_the_same() -> None:
    """A liar may know the order in which a trusted node adds up, and not ours."""
    bank = ToyBank(KERNELS)
    own = own_run(bank, None, trusted={"mine": bank.errors_by(SERVER, range(60), 300)})
    # Its very bits where it does not lie.
    judged_in_groups(FootprintJudge(own, CHANCES), claims(bank.errors_by(SERVER, range(60), 300)))
    assert own.reference == REFERENCE


def test_errors_as_long_as_those_of_a_trusted_node_convict_nobody() -> None:
    bank = ToyBank(KERNELS)
    large = Kernel(size=4.0, kept=0.0)
    node = claims(bank.errors_by(large, range(40), 300))
    for trusted, found in (
        ({}, SequentialResult.FRAUD),
        ({"mine": bank.errors_by(large, range(40), 301)}, SequentialResult.UNDECIDED),
        ({"mine": bank.errors_by(SERVER, range(40), 301)}, SequentialResult.FRAUD),
    ):
        judge = PairedJudge(own_run(bank, gathered(bank, KERNELS), trusted=trusted), CHANCES)
        judged_in_groups(judge, [*node])
        assert judge.opinion().result is found, trusted.keys()


def test_what_a_trusted_node_errs_explains_a_suspects_direction() -> None:
    bank = ToyBank(KERNELS)
    leaning = Kernel(like=CARD, lean=0.6)
    node = claims(bank.errors_by(leaning, range(30), 300))
    trusted = {"mine": bank.errors_by(leaning, range(30), 301)}
    results = []
    for of in ({}, trusted):
        judge = DirectionJudge(bank, own_run(bank, None, trusted=of), CHANCES)
        judged_in_groups(judge, [*node])
        results.append(judge.opinion().result)
    assert results[0] is SequentialResult.FRAUD
    assert results[1] is not SequentialResult.FRAUD


@pytest.mark.parametrize(
    ("size", "found"),
    [(1.0, SequentialResult.UNDECIDED), (3.0, SequentialResult.UNDECIDED), (20.0, "fraud")],
)
def test_without_a_calibration_gross_errors_convict_beside_a_trusted_node(
    size: float, found: str
) -> None:
    """Also where the trusted node is finer by far than our own run."""
    bank = ToyBank(KERNELS)
    node = claims(bank.errors_by(Kernel(size=size, kept=0.0), range(40), 300))
    for theirs in (Kernel(size=0.1, kept=0.0), SERVER):
        trusted = {"mine": bank.errors_by(theirs, range(40), 301)}
        judge = PairedJudge(own_run(bank, None, trusted=trusted), CHANCES)
        judged_in_groups(judge, [*node])
        assert judge.opinion().result == found
    alone = PairedJudge(own_run(bank, None), CHANCES)
    judged_in_groups(alone, [*node])
    assert alone.opinion().result is SequentialResult.UNDECIDED
