from collections.abc import Callable
from dataclasses import replace
from functools import partial

import numpy as np
import pytest

from proofserve.protocol.verdict.scale import fitted
from proofserve.reports import Progress, ReportedError
from proofserve.verifier.audit.audit import Audit, AuditOptions, ConvictionRule, ProverResult, audit
from proofserve.verifier.audit.report import UNEXPLAINED, verdict_of
from proofserve.verifier.populations import HonestPopulations, HonestRuns, RunFigures, populations
from verifier.toy_deployment import HONEST, PRIVATE, SHARED, ToyDeployment

RULE = ConvictionRule(max_nonces=200)
OPTIONS = AuditOptions(RULE, 64, runs=300)


def run(deployment: ToyDeployment, options: AuditOptions | None = None) -> Audit:
    return audit(deployment, options or OPTIONS, Progress())


def by_name(found: Audit) -> dict[str, ProverResult]:
    return {each.measurement.name: each for each in (*found.honest, *found.attacks)}


def missed(found: Audit) -> list[str]:
    return [e.measurement.name for e in found.attacks if not (e.noticed or e.measurement.exact)]


def other_kernels(size: float) -> Callable[[str], HonestPopulations]:
    """A calibration whose one kernel errs ``size`` times as much as our own run."""
    random = np.random.default_rng(0)
    rows = np.arange(256)

    def run(length: float, kept: float) -> RunFigures:
        lengths = length * np.exp(0.1 * random.normal(size=256))
        footprint = kept + 0.05 * random.normal(size=256)
        return RunFigures(lengths, {ToyDeployment.reference: footprint}, {}, rows)

    runs = {ToyDeployment.reference: run(HONEST, 1.0), "far": run(size * HONEST, SHARED)}
    known = HonestRuns(runs, {"far"}, {}, ToyDeployment.width)
    return partial(populations, known)


@pytest.fixture(scope="module")
def found() -> Audit:
    return run(ToyDeployment())


def test_honest_provers_are_safe_and_what_is_worth_it_is_noticed(found: Audit) -> None:
    names = ["as deployed", "one kernel", "another kernel"]
    assert [each.measurement.name for each in found.honest] == names
    # The validator's own run of one kernel is what the others are judged beside.
    assert found.populations == ("as deployed", "another kernel")
    assert found.unfit is None
    assert all(each.cleared_share == 1.0 for each in found.honest)
    assert found.passed
    assert missed(found) == [name for name in missed(found) if name.startswith("honest on")]
    assert found.verdict.startswith("CAUGHT: every attack worth 10% within 200 nonces; not honest")
    assert f"; no verdict on {PRIVATE} (saves 49%)" in found.verdict


def test_each_attack_is_caught_by_the_test_that_is_made_for_it(found: Audit) -> None:
    results = by_name(found)
    weights = results["int8 per channel"].endings
    assert weights.nonces_to(weights.by_test["paired"], 0.999) is None
    needed = weights.nonces_to(weights.by_test["direction"], 0.999)
    assert needed is not None
    assert needed < 20
    skipped = results["model skipped"].endings
    assert skipped.nonces_to(skipped.by_test["paired"], 0.999) == 3


def test_no_suspect_predicts_private_weights_but_they_lose_the_footprint(found: Audit) -> None:
    private = by_name(found)[PRIVATE]
    assert not private.caught
    assert private.unexplained_share == 1.0
    assert verdict_of(private) == UNEXPLAINED


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


def test_private_weights_that_keep_the_footprint_escape() -> None:
    found = run(ToyDeployment(apart={PRIVATE: 0.1}))
    assert PRIVATE in missed(found)
    assert not found.passed
    assert found.verdict.startswith(f"NOT CAUGHT within 200 nonces: {PRIVATE} (saves 49%)")


def test_an_audit_can_be_of_some_attacks_only() -> None:
    deployment = ToyDeployment()
    some = run(deployment, replace(OPTIONS, only={"int4 g128", "zero vectors"}))
    assert [each.measurement.name for each in some.attacks if each.measurement.chances is None] == [
        *("int4 g128", "zero vectors")
    ]
    assert "other key" not in deployment.asked
    assert all(each.caught for each in some.attacks[:2])


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
    found = run(ToyDeployment(noisy=0.2), replace(OPTIONS, honest=other_kernels(1.0)))
    assert not found.passed
    assert found.populations == ("far",)
    assert found.verdict.startswith("UNFIT: an honest node would be convicted: another kernel;")


def test_a_threshold_below_the_noise_is_unfit() -> None:
    found = run(ToyDeployment(), replace(OPTIONS, dist_threshold=0.005))
    assert found.dist_threshold == 0.005
    assert found.verdict.startswith("UNFIT: an honest node would be convicted: as deployed; 100.0%")


def test_without_a_threshold_the_farthest_kernel_gives_one(found: Audit) -> None:
    assert found.dist_threshold == max(
        fitted(each.measurement.distances).quantile(0.999) for each in found.honest
    )


def test_a_calibration_decides_what_is_honest() -> None:
    # Its nodes are three times as noisy, so a prediction says less of an error.
    found = run(ToyDeployment(noisy=0.03), replace(OPTIONS, honest=other_kernels(3.0)))
    assert found.unfit is None
    # Lies would hide in errors as long as its nodes have, though they keep our footprint.
    assert by_name(found)["another kernel"].cleared_share == 0.0
    assert by_name(found)["one kernel"].cleared_share == 1.0
    assert by_name(found)["model skipped"].caught
    eight = by_name(found)["int8 per channel"].endings
    needed = eight.nonces_to(eight.by_test["direction"], 0.5)
    assert needed is not None
    assert 20 < needed < 100


def test_a_vector_that_is_missing_is_a_mismatch() -> None:
    silent = by_name(run(ToyDeployment(silent=["int4 g128"])))["int4 g128"]
    assert (silent.measurement.rate, silent.measurement.mean) == (1.0, 2.0)
    assert silent.mean_cosines is None
    assert silent.caught


def test_a_kernel_that_gives_no_numbers_is_left_out() -> None:
    found = run(ToyDeployment(silent=["another kernel"]))
    assert [each.measurement.name for each in found.honest] == ["as deployed", "one kernel"]


def test_a_validator_that_fails_gives_no_verdict() -> None:
    with pytest.raises(ReportedError, match="not all finite"):
        run(ToyDeployment(missing=[5]))
    with pytest.raises(ReportedError, match="the vectors of as deployed are not all finite"):
        run(ToyDeployment(silent=["honest"]))
    with pytest.raises(ValueError, match=r"nonces: 1 is below 8"):
        run(ToyDeployment(), replace(OPTIONS, nonces=1))


def test_the_price_of_a_cleared_lie_is_what_a_few_forged_nonces_save() -> None:
    """Lies without the honest footprint are cleared only where the sample meets too few of them."""
    options = replace(OPTIONS, nonces=16, runs=100, only=(), price=True)
    prices = run(ToyDeployment(layers=2), options).prices
    assert [each.nonces for each in prices] == [24, 66, 200]
    whole = ToyDeployment(layers=2).price.bits(8)
    for each in prices:
        assert each.saving < 0.3 * whole
        assert each.text.startswith(f"{each.nonces} nonces: ")


def test_a_lie_that_keeps_the_footprint_costs_all_that_it_saves() -> None:
    kept = ToyDeployment(layers=2, apart={"rotated 2 0": 0.0})
    price = run(kept, replace(OPTIONS, nonces=16, runs=100, only=(), price=True)).prices[1]
    assert price.saving == pytest.approx(kept.price.bits(8))
    assert price.name == "private int8 in the last 2 of 2 layers"
    assert price.cleared > 0.001
