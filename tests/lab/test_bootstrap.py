"""The nonces of the bootstrap are those that verifications need, by ``verify`` itself."""

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest
from numpy.typing import NDArray
from proofserve.protocol.verdict.direction import HonestSpread

from proofserve.lab.audit.bootstrap import Bootstrap, Draws, first_passages
from proofserve.lab.audit.conviction import ConvictionRule
from proofserve.lab.audit.evidence import HonestFigures, NonceEvidence
from proofserve.lab.client.progress import NoProgress
from proofserve.lab.verify.claimed import ClaimedArtifacts
from proofserve.lab.verify.direction import DirectionJudge, Expected
from proofserve.lab.verify.judges import (
    Chances,
    Judge,
    PairedJudge,
    RankJudge,
    ScaleJudge,
    TwinJudge,
    Vectors,
)
from proofserve.lab.verify.verification import Recomputation, Verification, verify
from proofserve.protocol.codec import encode
from proofserve.protocol.verdict.comparison import Claim
from proofserve.protocol.verdict.evidence import Evidence
from proofserve.protocol.verdict.scale import fitted
from proofserve.protocol.verdict.sequential import SequentialResult

Floats32 = NDArray[np.float32]
NONCES, WIDTH, MOST, RUNS = 64, 128, 300, 120
RULE = ConvictionRule(max_nonces=MOST)
NAMES = ("int8", "int4")


def drawn(seed: int, *, halves_alike: float = 0.0) -> Floats32:
    """Unit vectors [NONCES, WIDTH]; the halves share that much of their direction."""
    random = np.random.default_rng(seed)
    one, other, shared = random.normal(size=(3, NONCES, WIDTH // 2))
    parts = [halves_alike * shared + (1 - halves_alike) * part for part in (one, other)]
    rows = np.concatenate(parts, axis=1)
    return (rows / np.linalg.norm(rows, axis=1, keepdims=True)).astype(np.float32)


TRUTH = drawn(0)
SIZES = np.exp(0.1 * np.random.default_rng(1).normal(size=(NONCES, 1))).astype(np.float32)
OWN = 0.01 * SIZES * drawn(2)
PREDICTED = {"int8": 0.008 * drawn(3, halves_alike=1.0), "int4": 0.1 * drawn(4, halves_alike=1.0)}
KERNEL = 0.01 * SIZES * np.exp(0.1 * drawn(7)[:, :1] * WIDTH**0.5) * drawn(5)
FIGURES = HonestFigures(
    fitted(np.linalg.norm(OWN, axis=1).astype(np.float64)),
    None,
    tuple(np.linalg.norm(np.tile(OWN, (4, 1)), axis=1).tolist()),
    {"int8": Expected(0.6, 0.1), "int4": Expected(0.99, 0.05)},
    dict.fromkeys(NAMES, HonestSpread(0.1)),
)
EVIDENCE = NonceEvidence(FIGURES, PREDICTED, OWN, twins=True)
RATIOS = np.linalg.norm(KERNEL, axis=1) / np.linalg.norm(OWN, axis=1)
PAIRED_FIT = fitted(RATIOS.astype(np.float64))
PAIRED = NonceEvidence(replace(FIGURES, paired=PAIRED_FIT), PREDICTED, OWN, twins=True)

PROVERS = {
    "honest": OWN,
    "another kernel": KERNEL,
    "int8": OWN + PREDICTED["int8"],
    "int4": OWN + PREDICTED["int4"],
    "private": OWN + 0.012 * drawn(6, halves_alike=1.0),
    "half as far again": 1.9 * OWN,
}


def errors_of(name: str) -> Floats32:
    """As claims on the wire have them, so that both sides judge the same numbers."""
    exact = TRUTH.astype(np.float16).astype(np.float32)
    return (TRUTH + PROVERS[name]).astype(np.float16).astype(np.float32) - exact


class Bank:
    """The recorded vectors of the nonces ``rows``."""

    names = NAMES

    def __init__(self, rows: Sequence[int]) -> None:
        self._rows = rows

    def predictions(self, name: str, nonces: Sequence[int]) -> Vectors:
        return {nonce: PREDICTED[name][self._rows[nonce]] for nonce in nonces}

    def truth(self, nonces: Sequence[int]) -> Vectors:
        return {nonce: TRUTH[self._rows[nonce]] for nonce in nonces}

    def own_errors(self, nonces: Sequence[int]) -> Vectors:
        return {nonce: OWN[self._rows[nonce]] for nonce in nonces}

    def judges(self, tests: Sequence[str]) -> list[Judge]:
        chances = Chances(RULE.alpha / 3, 1 - RULE.power)
        expected, spreads = FIGURES.expected, FIGURES.spreads
        every: dict[str, Judge] = {
            "scale": ScaleJudge(FIGURES.fit, chances),
            "paired": PairedJudge(self.own_errors, PAIRED_FIT, chances),
            "direction": DirectionJudge(self, expected, spreads, chances),
            "twins": TwinJudge(self.own_errors, chances),
            "certified": DirectionJudge(self, {}, {}, Chances(RULE.alpha, 1e-300)),
            "rank": RankJudge(FIGURES.pairs, Chances(RULE.alpha, 1e-3)),
        }
        return [every[name] for name in tests]


def simulated(name: str, tests: Sequence[str], seed: int) -> Verification:
    """One verification of ``MOST`` of the prover's nonces, drawn with replacement."""
    rows = np.random.default_rng([7, seed]).integers(0, NONCES, MOST).tolist()
    bank = Bank(rows)
    texts = encode(TRUTH + PROVERS[name])
    claims = tuple(Claim(nonce, texts[row]) for nonce, row in enumerate(rows))
    every = tuple(range(MOST))
    claimed = ClaimedArtifacts("block", "key", every, claims)
    ours = Recomputation(bank.truth, WIDTH, at_once=64)
    return verify(claimed, every, ours, bank.judges(tests), NoProgress())


@pytest.mark.parametrize(
    ("name", "test"),
    [
        ("half as far again", "scale"),
        ("half as far again", "paired"),
        ("int4", "scale"),
        ("int8", "direction"),
        ("private", "twins"),
        ("int8", "certified"),
        ("half as far again", "rank"),
    ],
)
def test_verifications_convict_after_as_many_nonces(name: str, test: str) -> None:
    evidence = PAIRED if test == "paired" else EVIDENCE
    result = Bootstrap(RULE).result(evidence.increments(errors_of(name)), None, FIGURES.pairs)
    needed = result.tests[test]
    outcomes = [simulated(name, [test], seed) for seed in range(RUNS)]
    used = sorted(each.nonces_used for each in outcomes)
    assert needed.median is not None
    assert needed.at_power is not None
    fraud = [each for each in outcomes if each.verdict is SequentialResult.FRAUD]
    # Only tests of sizes can clear here; at a scale of 1.9 they may do so first.
    assert len(fraud) >= (0.9 if test in {"scale", "paired"} else 1.0) * RUNS
    # Of as many runs some three are beyond the 97.5 % quantile.
    assert used[RUNS // 2 - 20] <= needed.median <= used[RUNS // 2 + 20]
    assert max(used) <= needed.at_power * 1.2 + 1


@pytest.mark.parametrize("name", ["honest", "another kernel", "private", "int8"])
@pytest.mark.parametrize("size", ["scale", "paired"])
def test_verifications_clear_as_often(name: str, size: str) -> None:
    evidence = PAIRED if size == "paired" else EVIDENCE
    result = Bootstrap(RULE).result(evidence.increments(errors_of(name)), None, FIGURES.pairs)
    assert set(result.default) == {size, "direction", "twins"}
    outcomes = [simulated(name, (size, "direction", "twins"), seed) for seed in range(RUNS)]
    cleared = [each for each in outcomes if each.verdict is SequentialResult.HONEST]
    assert len(cleared) / RUNS == pytest.approx(result.cleared.share, abs=0.1)
    if "honest" in name or "kernel" in name:
        assert result.cleared.share == 1.0
        used = sorted(each.nonces_used for each in cleared)
        assert result.cleared.median is not None
        assert used[RUNS // 2 - 20] <= result.cleared.median <= used[RUNS // 2 + 20]


@pytest.mark.parametrize("name", ["honest", "another kernel"])
def test_honest_provers_are_never_convicted(name: str) -> None:
    result = Bootstrap(RULE).result(PAIRED.increments(errors_of(name)), None, FIGURES.pairs)
    assert {test: needed.share for test, needed in result.tests.items()} == dict.fromkeys(
        ("scale", "paired", "direction", "twins", "certified", "rank"), 0.0
    )


def test_a_first_passage_is_that_of_the_evidence_itself() -> None:
    random = np.random.default_rng(3)
    factors = random.normal(0.05, 0.6, size=(20, 3))
    draws = Draws(random.integers(0, 20, (50, 100)), np.full(20, 1 / 20))
    stops = first_passages(factors, draws, 4.0)
    for run, rows in enumerate(draws.rows):
        evidence, expected = Evidence(3), draws.never
        for n, row in enumerate(rows, 1):
            evidence.add(factors[row])
            if evidence.log >= 4.0:
                expected = n
                break
        assert stops[run] == expected
    assert 1 < np.median(stops) < draws.never
    # A run need not be followed beyond ``until``, and is not wrong before it.
    until = np.full(50, 40)
    early = first_passages(factors, draws, 4.0, until)
    assert np.array_equal(np.minimum(early, 41), np.minimum(stops, 41))


def test_a_prover_without_vectors_is_convicted_by_distance_alone() -> None:
    silent = np.full((NONCES, WIDTH), np.nan, np.float32)
    result = Bootstrap(RULE).result(EVIDENCE.increments(silent), None, FIGURES.pairs)
    assert result.tests["scale"].at_power == 3
    assert result.tests["direction"].share == result.tests["twins"].share == 0.0
    assert result.cleared.share == 0.0


def test_a_part_of_the_nonces_takes_longer() -> None:
    honest, gross = (EVIDENCE.increments(errors_of(name)) for name in ("honest", "int4"))
    both = honest.followed_by(gross)
    took = []
    for share in (0.4, 0.1):
        chances = np.repeat([(1 - share) / NONCES, share / NONCES], NONCES)
        needed = Bootstrap(RULE).result(both, chances, FIGURES.pairs).tests["scale"]
        assert needed.median is not None
        took.append(needed.median)
    assert 3 < took[0] < took[1]
