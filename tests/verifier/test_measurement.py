import numpy as np
import pytest
from numpy.typing import NDArray

from proofserve.protocol.codec import encode
from proofserve.protocol.verdict.comparison import Claim, compare
from proofserve.verifier.audit.attacks import (
    FARTHEST,
    ProverMeasurement,
    errors_of,
    measured,
    mixtures,
)
from proofserve.verifier.audit.deployment import AuditedProver

WIDTH, LIMIT = 12, 0.1


def prover(name: str, saving: float) -> AuditedProver:
    return AuditedProver(name, saving, lambda: lambda _nonces: {})


def of_lengths(name: str, saving: float, lengths: NDArray[np.float64]) -> ProverMeasurement:
    errors = np.zeros((len(lengths), WIDTH), np.float32)
    errors[:, 0] = lengths
    return measured(prover(name, saving), errors, LIMIT)


def test_a_mixture_is_what_sampling_it_gives() -> None:
    random = np.random.default_rng(0)
    near, far = abs(random.normal(0.05, 0.04, 4000)), random.normal(1.4, 0.1, 4000)
    honest = of_lengths("honest", 0.0, near)
    mixed, *others = mixtures(honest, [of_lengths("forged", 1.0, far)])
    drawn = np.where(random.random(4000) < 0.9, near, far)
    sampled = of_lengths("sampled", 0.1, drawn)
    assert mixed.name == "honest on 90%, else forged"
    assert [other.name for other in others] == [
        f"honest on {share}, else forged" for share in ("95%", "98%", "99%", "99.5%")
    ]
    assert mixed.saving == pytest.approx(0.1)
    assert mixed.mean == pytest.approx(sampled.mean, abs=0.03)
    assert mixed.sd == pytest.approx(sampled.sd, abs=0.03)
    assert mixed.rate == pytest.approx(sampled.rate, abs=0.02)
    assert mixed.interval[0] < mixed.rate < mixed.interval[1]
    assert mixed.chances is not None
    assert mixed.chances.sum() == pytest.approx(1.0)
    assert mixed.chances[4000:].sum() == pytest.approx(0.1)


def test_nothing_is_mixed_without_a_cheap_forgery() -> None:
    honest = of_lengths("honest", 0.0, np.full(9, 0.01))
    assert mixtures(honest, [of_lengths("dear", 0.5, np.ones(9))]) == []


def test_a_mismatch_is_what_a_validator_calls_one() -> None:
    random = np.random.default_rng(1)
    truth = {n: random.normal(size=WIDTH).astype(np.float32) for n in range(200)}
    # Rounding to the wire puts some on either side.
    errors = random.normal(size=(200, WIDTH))
    errors *= LIMIT / np.linalg.norm(errors, axis=1, keepdims=True)
    made = {n: truth[n] + errors[n].astype(np.float32) for n in truth}
    claims = [Claim(n, encode(vector[None])[0]) for n, vector in made.items()]
    counted = compare(range(200), truth, claims, LIMIT, WIDTH)
    assert 0 < counted.n_mismatch < 200
    found = measured(prover("near", 0.5), errors_of(made, truth), LIMIT)
    assert found.rate == counted.n_mismatch / 200


def test_a_vector_that_is_missing_is_a_mismatch() -> None:
    truth = {n: np.zeros(WIDTH, np.float32) for n in range(4)}
    found = measured(prover("silent", 0.5), errors_of({1: truth[1]}, truth), LIMIT)
    assert found.rate == 0.75
    assert found.mean == 0.75 * FARTHEST
    assert found.distances.tolist() == [np.inf, 0.0, np.inf, np.inf]
