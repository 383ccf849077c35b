"""The report of the noise between two engines of one model."""

from collections.abc import Mapping
from typing import Any

from proofserve.lab.calibrate.noise import Noise
from proofserve.lab.calibrate.simulation import ALPHA, VerificationTrial
from proofserve.lab.report.figures import Figure, Limit
from proofserve.lab.report.report import Report
from proofserve.protocol.verdict.sequential import SequentialResult

# Of an honest node.
NO_CONVICTION = Limit(0, at_most=True)


def noise_report(
    title: str,
    found: Noise,
    trials: tuple[VerificationTrial, ...],
    setup: Mapping[str, Any],
    where: Mapping[str, str | int],
) -> Report:
    distances = found.distances
    low, high = found.interval
    upper = "the upper end of the interval"
    percent = f"{100.0 * found.rate:g} %"
    middle, high_up, top, most = found.quantiles.values()
    figures = (
        Figure("dist_threshold", found.dist_threshold, f"{upper}; for --p-mismatch {found.rate:g}"),
        Figure("quantile", found.quantile, f"{percent} lie beyond; 95 %: {low:.5f} to {high:.5f}"),
        Figure("mean", float(distances.mean()), f"of {distances.size} nonces"),
        Figure("sd", float(distances.std()), "standard deviation"),
        Figure("median", middle, "half of them lie below"),
        Figure("p90", high_up, "nine in ten"),
        Figure("p99", top, "99 in 100"),
        Figure("maximum", most, "of these nonces; others may be further apart"),
        *(figure for trial in trials for figure in _figures_of(trial)),
    )
    windows = {
        "interval": list(found.interval),
        "distances": distances.tolist(),
        "trials": {trial.test: _record(trial) for trial in trials},
    }
    return Report(title, figures, {**setup, "rate": found.rate}, windows, where)


def _figures_of(trial: VerificationTrial) -> tuple[Figure, ...]:
    convicted = trial.count(SequentialResult.FRAUD)
    cleared = trial.count(SequentialResult.HONEST)
    simulated = f"of {len(trial.verdicts)} simulated verifications, alpha {ALPHA:g}"
    until = f"of them, after {trial.median_nonces:g} nonces (median)"
    return (
        Figure(f"convicted_{trial.test}", convicted, simulated, NO_CONVICTION),
        Figure(f"cleared_{trial.test}", cleared, until),
    )


def _record(trial: VerificationTrial) -> dict[str, Any]:
    return {
        "runs": len(trial.verdicts),
        "nonces": trial.nonces,
        "seed": trial.seed,
        **{str(verdict): trial.count(verdict) for verdict in SequentialResult},
        "median_nonces": trial.median_nonces,
    }
