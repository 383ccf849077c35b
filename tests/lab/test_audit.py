from dataclasses import replace

import numpy as np
import pytest

from lab.toy_deployment import HONEST, PRIVATE, ToyDeployment
from proofserve.lab.audit.audit import AuditOptions, audit
from proofserve.lab.audit.conviction import ConvictionRule
from proofserve.lab.audit.evidence import HonestFigures
from proofserve.lab.audit.results import Audit, ProverResult
from proofserve.lab.client.errors import LabError
from proofserve.lab.client.progress import NoProgress
from proofserve.protocol.errors import ProtocolError
from proofserve.protocol.verdict.scale import fitted

RULE = ConvictionRule(max_nonces=300)
OPTIONS = AuditOptions(RULE, 64, runs=400)


def run(deployment: ToyDeployment, options: AuditOptions | None = None) -> Audit:
    return audit(deployment, options or OPTIONS, NoProgress())


def by_name(found: Audit) -> dict[str, ProverResult]:
    return {each.measurement.name: each for each in (*found.honest, *found.attacks)}


def missed(found: Audit) -> list[str]:
    return [e.measurement.name for e in found.attacks if not (e.caught or e.measurement.exact)]


@pytest.fixture(scope="module")
def found() -> Audit:
    return run(ToyDeployment())


def test_honest_provers_are_safe_and_what_is_worth_it_is_caught(found: Audit) -> None:
    assert [each.measurement.name for each in found.honest] == ["honest", "honest, batch of 1"]
    assert found.unfit is None
    assert found.passed
    rare = [name for name in missed(found) if name.startswith("honest on")]
    assert missed(found) == rare
    assert found.verdict.startswith("CAUGHT: every attack worth 10% within 300 nonces; not honest")


def test_each_attack_is_caught_by_the_test_that_is_made_for_it(found: Audit) -> None:
    results = by_name(found)
    weights = results["int8 per channel"].tests.tests
    assert weights["scale"].at_power is None
    assert weights["direction"].at_power is not None
    assert weights["direction"].at_power < 20
    private = results[PRIVATE].tests.tests
    assert private["scale"].median is private["direction"].median is None
    assert private["twins"].at_power is not None
    assert results["model skipped"].tests.tests["scale"].at_power == 3


def test_errors_point_to_the_weights_that_made_them(found: Audit) -> None:
    assert found.suspects == ("int8 per channel", "int4 g128")
    for name, own in (("int8 per channel", 0), ("int4 g128", 1)):
        means = by_name(found)[name].mean_cosines
        assert means is not None
        assert means[own] > 0.5
        assert abs(means[1 - own]) < 0.1
    honest = found.honest[0].mean_cosines
    assert honest is not None
    assert max(map(abs, honest)) < 0.1


def test_an_exact_shortcut_is_neither_caught_nor_missed(found: Audit) -> None:
    (exact,) = (each for each in found.attacks if each.measurement.exact)
    assert not exact.caught
    assert not exact.escapes
    assert exact.measurement.mean == found.honest[0].measurement.mean


def test_without_twins_private_weights_escape() -> None:
    found = run(ToyDeployment(has_twins=False))
    assert "twins" not in found.honest[0].tests.tests
    assert PRIVATE in missed(found)
    assert not found.passed
    assert found.verdict.startswith(f"NOT CAUGHT within 300 nonces: {PRIVATE} (saves 49%)")


def test_what_saves_little_fails_nothing() -> None:
    found = run(ToyDeployment(apart={"[11]": HONEST}))
    assert "last layer skipped" in missed(found)
    assert found.passed


def test_a_skipped_model_that_is_not_missed_is_what_the_rest_is_forged_with() -> None:
    found = run(ToyDeployment(apart={str(list(range(12))): HONEST}))
    assert missed(found) == [
        "model skipped",
        *(f"honest on {x}%, else model skipped" for x in ("90", "95", "98", "99", "99.5")),
    ]
    assert "model skipped (saves 100%)" in found.verdict
    # A tenth is worth it, to the last bit.
    assert [each.escapes for each in found.attacks][-5:] == [True, *[False] * 4]


def test_a_deployment_whose_honest_nodes_would_be_convicted_is_unfit() -> None:
    found = run(ToyDeployment(noisy=0.2))
    assert not found.passed
    assert found.verdict.startswith(
        "UNFIT: a node would be convicted that is honest, batch of 1; 100.0% of its vectors"
    )


def test_a_threshold_below_the_noise_is_unfit() -> None:
    found = run(ToyDeployment(), replace(OPTIONS, dist_threshold=0.005))
    assert found.dist_threshold == 0.005
    assert found.verdict.startswith("UNFIT: a node would be convicted that is honest; 100.0%")


def test_without_a_threshold_the_fit_gives_one(found: Audit) -> None:
    distances = found.honest[0].measurement.distances
    assert distances.max() < found.dist_threshold < 2 * distances.max()
    assert found.dist_threshold == fitted(distances).quantile(0.999)
    assert found.pairs == 64


def test_a_calibration_decides_what_is_honest() -> None:
    # The nodes of this one are three times as noisy.
    random = np.random.default_rng(0)
    pairs = 0.03 * np.exp(0.1 * random.normal(size=300))
    figures = HonestFigures(fitted(pairs), None, tuple(pairs.tolist()), {}, {})
    found = run(ToyDeployment(noisy=0.03), replace(OPTIONS, figures=figures))
    assert found.pairs == 300
    assert found.unfit is None
    # With so many pairs the ranks convict as well.
    assert found.honest[0].tests.tests["rank"].share == 0.0
    assert by_name(found)["model skipped"].tests.tests["rank"].at_power is not None
    # It knows no spread of cosines, so the direction test is the certified one.
    tests = by_name(found)["int4 g128"].tests.tests
    assert tests["direction"].median is not None
    assert tests["direction"].median > 30


def test_other_kernels_say_how_far_beyond_its_own_rounding_an_honest_node_is() -> None:
    found = run(ToyDeployment(other_kernels=True))
    assert found.unfit is None
    tests = by_name(found)["int4 g128"].tests
    assert "paired" in tests.default
    assert "scale" not in tests.default
    assert tests.tests["paired"].median == 3
    assert run(ToyDeployment()).honest[0].tests.tests.keys().isdisjoint({"paired"})


def test_a_vector_that_is_missing_is_a_mismatch() -> None:
    silent = by_name(run(ToyDeployment(silent=["int4 g128"])))["int4 g128"]
    assert (silent.measurement.rate, silent.measurement.mean) == (1.0, 2.0)
    assert silent.mean_cosines is None
    assert silent.caught


def test_a_setting_that_gives_no_numbers_is_left_out() -> None:
    found = run(ToyDeployment(silent=["batch of 1"]))
    assert [each.measurement.name for each in found.honest] == ["honest"]


def test_a_validator_that_fails_gives_no_verdict() -> None:
    with pytest.raises(LabError, match="not all finite"):
        run(ToyDeployment(missing=[5]))
    with pytest.raises(LabError, match="the vectors of honest are not all finite"):
        run(ToyDeployment(silent=["honest"]))
    with pytest.raises(ValueError, match=r"nonces: 1 is below 2"):
        run(ToyDeployment(), replace(OPTIONS, nonces=1))
    with pytest.raises(ProtocolError, match="above 0"):
        run(ToyDeployment(apart={"honest": 0.0}))
