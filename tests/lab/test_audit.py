import numpy as np
import pytest

from lab.toy_deployment import ToyDeployment
from proofserve.lab.audit.audit import (
    AttackMeasurement,
    Audit,
    attack_result,
    audit,
    measured,
    mixtures,
)
from proofserve.lab.audit.conviction import ConvictionRule, PowerAnalysis
from proofserve.lab.client.errors import LabError
from proofserve.lab.client.progress import NoProgress
from proofserve.protocol.codec import encode
from proofserve.protocol.verdict.comparison import Claim, compare

RULE = ConvictionRule(0.1)


def run(deployment: ToyDeployment, rule: ConvictionRule = RULE, nonces: int = 64) -> Audit:
    return audit(deployment, rule, nonces, NoProgress())


def by_name(found: Audit) -> dict[str, AttackMeasurement]:
    return {each.measurement.name: each.measurement for each in found.results}


def caught(found: Audit) -> dict[str, bool]:
    return {each.measurement.name: each.caught for each in found.results}


def test_far_is_caught_and_near_is_not() -> None:
    found = run(ToyDeployment(apart={"8 bits": 0.03, "[11]": 0.04}))
    missed = [name for name, yes in caught(found).items() if not yes]
    assert missed == [
        "weights of 8 bits",
        "last layer skipped",
        "honest on 98%, else model skipped",
    ]
    assert not found.passed
    assert found.verdict.startswith("NOT CAUGHT within 1000 nonces: weights of 8 bits (saves 49%)")
    measurement = by_name(found)["weights of 8 bits"]
    assert measurement.mean == pytest.approx(0.03, abs=1e-3)
    assert measurement.rate == 0.0
    assert measurement.interval[1] == pytest.approx(1 - 0.025 ** (1 / 64))


def test_what_saves_little_fails_nothing() -> None:
    found = run(ToyDeployment(apart={"[11]": 0.04}))
    assert found.passed
    assert found.verdict == (
        "CAUGHT: every attack worth 10% within 1000 nonces; not last layer skipped (saves 9%),"
        " honest on 98%, else model skipped (saves 2%)"
    )


def test_a_needed_threshold_catches() -> None:
    deployment = ToyDeployment(apart={"8 bits": 0.03})
    first = next(each for each in run(deployment).results if not each.caught)
    assert first.needed == "a threshold below 0.03 (honest: up to 0.01)"
    again = run(deployment, ConvictionRule(0.029))
    assert caught(again)[first.measurement.name]


def test_a_threshold_that_honest_nodes_cannot_bear_is_no_advice() -> None:
    found = run(ToyDeployment(apart={"8 bits": 0.009}))
    first = next(each for each in found.results if not each.caught)
    assert first.needed == "a threshold below 0.0091, which convicts honest nodes as well"


def test_a_threshold_below_the_noise_is_unfit() -> None:
    found = run(ToyDeployment(), ConvictionRule(0.005))
    assert found.convicts_honest
    assert not found.passed
    assert all(caught(found).values())
    assert found.verdict.startswith("UNFIT: 100.0% of honest vectors are beyond")


def test_a_skipped_model_that_is_not_missed_is_what_the_rest_is_forged_with() -> None:
    found = run(ToyDeployment(apart={str(list(range(12))): 0.05}))
    names = [name for name, yes in caught(found).items() if not yes]
    assert names == [
        "model skipped",
        *(f"honest on {share}, else model skipped" for share in ("90%", "95%", "98%")),
    ]
    assert "model skipped (saves 100%)" in found.verdict
    mixed = by_name(found)["honest on 90%, else model skipped"]
    assert mixed.saving == 0.1
    # A tenth is worth it, to the last bit.
    assert [each.escapes for each in found.results][-3:] == [True, False, False]
    assert next(e for e in found.results if e.measurement is mixed).needed == (
        "a rule that catches the forged nonces alone"
    )


def test_a_mixture_is_what_sampling_it_gives() -> None:
    random = np.random.default_rng(0)
    near, far = abs(random.normal(0.05, 0.04, 4000)), random.normal(1.4, 0.2, 4000)
    honest = measured("honest", 0.0, near, 0.1)
    (mixed, *_) = mixtures(honest, [measured("forged", 1.0, far, 0.1)])
    drawn = np.where(random.random(4000) < 0.9, near, far)
    sampled = measured("sampled", 0.1, drawn, 0.1)
    assert mixed.mean == pytest.approx(sampled.mean, abs=0.03)
    assert mixed.sd == pytest.approx(sampled.sd, abs=0.03)
    assert mixed.rate == pytest.approx(sampled.rate, abs=0.02)
    assert mixed.interval[0] < mixed.rate < mixed.interval[1]


def test_nothing_is_mixed_without_a_cheap_forgery() -> None:
    honest = measured("honest", 0.0, np.full(9, 0.01), 0.1)
    assert mixtures(honest, [measured("dear", 0.5, np.ones(9), 0.1)]) == []


@pytest.mark.parametrize(
    ("beyond", "expected"), [(20, True), (7, True), (6, False), (2, False), (0, False)]
)
def test_the_lower_end_of_the_rate_decides(beyond: int, expected: bool) -> None:
    distances = np.where(np.arange(128) < beyond, 0.5, 0.05)
    honest = measured("honest", 0.0, np.full(128, 0.01), 0.1)
    found = attack_result(measured("cheat", 0.5, distances, 0.1), honest, PowerAnalysis(RULE))
    assert found.caught is expected
    assert found.escapes is not expected
    assert bool(found.needed) is not expected
    if beyond == 6:
        assert found.needed == "2000 nonces, or a threshold below 0.05 (honest: up to 0.01)"


def test_a_mismatch_is_what_a_validator_calls_one() -> None:
    found = run(ToyDeployment(apart={"8 bits": 0.1}), nonces=200)
    deployment = ToyDeployment(apart={"8 bits": 0.1})
    truth, made = deployment.validator()(range(200)), deployment.rounded(8)(range(200))
    claims = [Claim(nonce, encode(vector[None])[0]) for nonce, vector in made.items()]
    counted = compare(range(200), truth, claims, RULE.dist_threshold, deployment.k_dim)
    # Rounding to the wire puts some on either side.
    assert 0 < counted.n_mismatch < 200
    assert by_name(found)["weights of 8 bits"].rate == counted.n_mismatch / 200


def test_a_vector_that_is_missing_is_a_mismatch() -> None:
    measurement = by_name(run(ToyDeployment(silent=["4 bits"])))["weights of 4 bits"]
    assert (measurement.rate, measurement.mean) == (1.0, 2.0)


def test_a_validator_that_fails_gives_no_verdict() -> None:
    with pytest.raises(LabError, match="not all finite"):
        run(ToyDeployment(missing=[5]))
    with pytest.raises(ValueError, match=r"nonces: 0 is below 1"):
        run(ToyDeployment(), nonces=0)
