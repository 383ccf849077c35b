"""The report of ``calibrate r-target``, for one model and one way to randomise hidden states."""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass

from rich.table import Table

from proofserve.lab.calibrate.distances import SIGN_FLIPS, Sample
from proofserve.lab.calibrate.target import THEORY_MEAN, THEORY_SD, Calibration, sampling_spread
from proofserve.lab.report.figures import Figure, Limit
from proofserve.lab.report.report import Report

# Percentage points. The requirements allow a spread of 5, chance included.
MOST_BEYOND_SAMPLING = Limit(2.0, at_most=True)
# The requirements report spreads of 3.9 and 10.3 points here.
NO_LIMIT = "; no limit: it depends on the model and the blocks, in either direction"


@dataclass(frozen=True, slots=True)
class Outcome:
    """``found`` about ``model`` with ``method`` in ``seconds``, server start not included.

    ``rate`` is the wanted share (0 to 1) of winners.
    """

    model: str
    method: str
    sample: Sample
    rate: float
    found: Calibration
    seconds: float

    @property
    def title(self) -> str:
        return self.method.replace("_", " ")


def report_of(outcome: Outcome, where: Mapping[str, str | int]) -> Report:
    """The figures. Rates and spreads are in percentage points, the rest in units of distance."""
    sample, found = outcome.sample, outcome.found
    low, high = found.interval
    chance = sampling_spread(sample.blocks, sample.per_block, outcome.rate)
    winners = ", ".join(map(_percent, found.block_rates))
    equal = "independent directions"
    limit = MOST_BEYOND_SAMPLING if outcome.method == SIGN_FLIPS else None
    points = "points" if limit else f"points{NO_LIMIT}"
    figures = (
        Figure("r_target", found.r_target, f"{found.r_target:.5f}, 95 %: {low:.5f} to {high:.5f}"),
        Figure("mean", found.mean, f"{found.mean:.5f}; {equal}: {THEORY_MEAN:.5f}"),
        Figure("sd", found.sd, f"{found.sd:.5f}; {equal}: {THEORY_SD:.5f}"),
        Figure("spread", found.spread, f"points between blocks; winners in percent: {winners}"),
        Figure("sampling_spread", chance, "points that equal blocks exceed 1 time in 20"),
        Figure("spread_beyond_sampling", max(0.0, found.spread - chance), points, limit),
        Figure("nonces_per_second", sample.total / outcome.seconds, f"of {sample.total} nonces"),
        Figure("seconds", outcome.seconds, "to compute them, through HTTP"),
    )
    said = {"model": outcome.model, "method": outcome.method, "rate": outcome.rate}
    title = f"r_target of {outcome.model} with {outcome.title}, {100.0 * outcome.rate:g} % win"
    windows = {
        "r_target_interval": list(found.interval),
        "block_rates": found.block_rates,
        "block_key_rates": found.rates.tolist(),
        "block_means": found.distances.mean(axis=(1, 2)).tolist(),
        "block_sds": found.distances.std(axis=(1, 2)).tolist(),
    }
    return Report(title, figures, {**said, **asdict(sample)}, windows, where)


def rates_table(outcomes: Sequence[Outcome]) -> Table:
    """Winners in percent: a row for each block and key, a column for each of ``outcomes``."""
    table = Table(title="winners in percent, side by side", title_justify="left")
    for heading in ("block", "key", *(outcome.title for outcome in outcomes)):
        table.add_column(heading, justify="right")
    found = [outcome.found for outcome in outcomes]
    blocks, keys = found[0].rates.shape
    for block in range(blocks):
        for key in range(keys):
            cells = [_percent(each.rates[block, key]) for each in found]
            table.add_row(str(block), str(key), *cells)
        cells = [_percent(each.block_rates[block]) for each in found]
        table.add_row(str(block), "all", *cells)
        table.add_section()
    return table


def _percent(rate: float) -> str:
    return f"{100.0 * rate:.1f}"
