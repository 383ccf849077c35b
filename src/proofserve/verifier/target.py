"""From distances of many nonces, as a node computes them, to a target radius and its report."""

import itertools
import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Final

import numpy as np
from numpy.typing import NDArray
from rich.table import Table
from scipy import stats

from proofserve.protocol.network_schemes import OUTPUT_DIM
from proofserve.remote.node_client import NodeClient
from proofserve.remote.records import DistanceWork
from proofserve.reports import Figure, Limit, NodeError, Progress, Report
from proofserve.rounds.computation import chunks
from proofserve.rounds.records import Winner
from proofserve.verifier.calibration_file import CalibrationFile

if TYPE_CHECKING:
    from matplotlib.axes import Axes

SIGN_FLIPS: Final = "sign_flips"
LAYER_HOOKS: Final = "layer_hooks"
# The two ways to randomise hidden states that the requirements compare; never both at once.
METHODS: Final = (SIGN_FLIPS, LAYER_HOOKS)
KEY: Final = "calibration-key-{}"

# float64 [blocks, keys, nonces of one key]
Distances = NDArray[np.float64]
# Two independent directions in n dimensions have a cosine c of mean 0 and variance 1/n, and are
# sqrt(2 - 2c) apart, which is sqrt(2) * (1 - c/2) to first order.
THEORY_MEAN: Final = math.sqrt(2.0)
THEORY_SD: Final = 1.0 / math.sqrt(2.0 * OUTPUT_DIM)

CONFIDENCE: Final = 0.95
# Percentage points. The requirements allow a spread of 5, chance included.
MOST_BEYOND_SAMPLING = Limit(2.0, at_most=True)
# The requirements report spreads of 3.9 and 10.3 points here.
NO_LIMIT = "; no limit: it depends on the model and the blocks, in either direction"
BINS = 50
# Inches.
WIDTH, HEIGHT = 9.0, 4.5
COLOURS = ("tab:blue", "tab:orange")


@dataclass(frozen=True, slots=True)
class Sample:
    """What to compute: ``nonces`` per block, shared evenly by its ``keys`` and rounded up.

    ``seq_len`` is in tokens per nonce, ``batch_size`` in nonces per call of the node.
    """

    nonces: int
    blocks: int
    keys: int
    seq_len: int
    batch_size: int

    @property
    def per_key(self) -> int:
        return -(-self.nonces // self.keys)

    @property
    def per_block(self) -> int:
        return self.per_key * self.keys

    @property
    def total(self) -> int:
        return self.per_block * self.blocks

    @property
    def shape(self) -> tuple[int, int, int]:
        return self.blocks, self.keys, self.per_key

    def orders(self, model: str, method: str) -> Iterator[DistanceWork]:
        for block in range(self.blocks):
            yield DistanceWork(
                model,
                block_hash=f"calibration-block-{block}",
                public_key=KEY.format(0),
                seq_len=self.seq_len,
                batch_size=self.batch_size,
                sign_flips=method == SIGN_FLIPS,
                layer_hooks=method == LAYER_HOOKS,
            )


def collect(
    node: NodeClient, model: str, method: str, sample: Sample, progress: Progress
) -> Distances:
    """The distances of ``sample``; the node stores none, and is stopped. Raises NodeError."""
    ranges = chunks(range(sample.per_key), sample.batch_size)
    calls = list(itertools.product(range(sample.keys), ranges))
    title = f"{model}: {sample.total} nonces with {titled(method)}"
    progress.step(title, sample.blocks * len(calls))
    computed: list[float] = []
    for order in sample.orders(model, method):
        with node.judging(order):
            for key, nonces in calls:
                # A node recomputes only distances that are claimed, whatever value is claimed.
                claims = [Winner(nonce, 1.0) for nonce in nonces]
                judgement = node.judge(replace(order, public_key=KEY.format(key)), claims)
                computed += judgement.computed_distances
                progress.advance()
    distances = np.array(computed, dtype=np.float64).reshape(sample.shape)
    if not np.isfinite(distances).all():
        raise NodeError("the node computed a distance that is not a number")
    return distances


@dataclass(frozen=True, slots=True)
class TargetRadius:
    """The ``r_target`` of one method: the radius that a share ``rate`` of distances is below.

    ``interval`` is the 95 % confidence interval of the radius, for these blocks. ``rates`` are
    shares (0 to 1) of nonces below ``r_target``, float64 [blocks, keys].
    """

    distances: Distances
    rate: float
    r_target: float
    interval: tuple[float, float]
    rates: NDArray[np.float64]

    @property
    def mean(self) -> float:
        return float(self.distances.mean())

    @property
    def sd(self) -> float:
        return float(self.distances.std())

    @property
    def block_rates(self) -> list[float]:
        """Share of winners of each block; every key has as many nonces."""
        return [float(rate) for rate in self.rates.mean(axis=1)]

    @property
    def spread(self) -> float:
        """Between the blocks with the most and the fewest winners, in percentage points."""
        return 100.0 * (max(self.block_rates) - min(self.block_rates))


def calibrate(distances: Distances, rate: float) -> TargetRadius:
    """The radius that a share ``rate`` of ``distances`` is below. Raises ValueError for too few."""
    r_target = float(np.quantile(distances, rate))
    # A nonce wins strictly below the target (protocol A.2).
    rates = (distances < r_target).mean(axis=2)
    return TargetRadius(distances, rate, r_target, quantile_interval(distances, rate), rates)


def quantile_interval(values: Distances, share: float) -> tuple[float, float]:
    """Two of ``values`` with the true quantile of ``share`` between them, 19 times in 20.

    Whatever they were drawn from, independently. Raises ValueError for too few values.
    """
    low, high = interval_ranks(values.size, share)
    ordered = np.sort(values, axis=None)
    return float(ordered[low - 1]), float(ordered[high - 1])


def interval_ranks(count: int, share: float) -> tuple[int, int]:
    """Ranks (1 to ``count``) of the values that hold the quantile of ``share`` between them.

    The number X of values below the quantile is Binomial(count, share), and the quantile lies
    between the values of rank l and u iff l <= X < u. The ranks are the innermost with at most
    2.5 % beyond either of them (David and Nagaraja, Order Statistics, 7.1). Raises ValueError if so
    few values cannot hold it.
    """
    beyond = (1.0 - CONFIDENCE) / 2.0
    low, last = (int(rank) for rank in stats.binom.ppf([beyond, 1.0 - beyond], count, share))
    high = last + 1
    if low < 1 or high > count:
        more = "compute more of them, or ask for a rate closer to 0.5"
        raise ValueError(f"{count} nonces are too few for a rate of {share:g}; {more}")
    return low, high


def sampling_spread(blocks: int, count: int, rate: float) -> float:
    """The spread that ``blocks`` of ``count`` nonces and one true ``rate`` exceed 1 time in 20.

    In percentage points: the 95 % point of the range of as many independent Binomial(count, rate)
    shares, by simulation. The third digit is uncertain, and the same in every call.
    """
    drawn = np.random.default_rng(0).binomial(count, rate, size=(200_000, blocks))
    return 100.0 * float(np.quantile(np.ptp(drawn, axis=1), CONFIDENCE)) / count


def report_of(
    found: TargetRadius,
    model: str,
    method: str,
    sample: Sample,
    *,
    seconds: float,
    where: Mapping[str, str | int],
) -> Report:
    """The figures. Rates and spreads are in percentage points, the rest in units of distance.

    ``seconds`` do not include the start of a server.
    """
    low, high = found.interval
    chance = sampling_spread(sample.blocks, sample.per_block, found.rate)
    winners = ", ".join(map(_percent, found.block_rates))
    equal = "independent directions"
    limit = MOST_BEYOND_SAMPLING if method == SIGN_FLIPS else None
    points = "points" if limit else f"points{NO_LIMIT}"
    figures = (
        Figure("r_target", found.r_target, f"{found.r_target:.5f}, 95 %: {low:.5f} to {high:.5f}"),
        Figure("mean", found.mean, f"{found.mean:.5f}; {equal}: {THEORY_MEAN:.5f}"),
        Figure("sd", found.sd, f"{found.sd:.5f}; {equal}: {THEORY_SD:.5f}"),
        Figure("spread", found.spread, f"points between blocks; winners in percent: {winners}"),
        Figure("sampling_spread", chance, "points that equal blocks exceed 1 time in 20"),
        Figure("spread_beyond_sampling", max(0.0, found.spread - chance), points, limit),
        Figure("nonces_per_second", sample.total / seconds, f"of {sample.total} nonces"),
        Figure("seconds", seconds, "to compute them, through HTTP"),
    )
    said = {"model": model, "method": method, "rate": found.rate, **asdict(sample)}
    title = f"r_target of {model} with {titled(method)}, {100.0 * found.rate:g} % win"
    windows = {
        "r_target_interval": list(found.interval),
        "block_rates": found.block_rates,
        "block_key_rates": found.rates.tolist(),
        "block_means": found.distances.mean(axis=(1, 2)).tolist(),
        "block_sds": found.distances.std(axis=(1, 2)).tolist(),
    }
    return Report(title, figures, said, windows, where)


def titled(method: str) -> str:
    return method.replace("_", " ")


def rates_table(methods: Mapping[str, TargetRadius]) -> Table:
    """Winners in percent: a row for each block and key, a column for each of ``methods``."""
    table = Table(title="winners in percent, side by side", title_justify="left")
    for heading in ("block", "key", *map(titled, methods)):
        table.add_column(heading, justify="right")
    found = [*methods.values()]
    blocks, keys = found[0].rates.shape
    for block in range(blocks):
        for key in range(keys):
            table.add_row(str(block), str(key), *(_percent(of.rates[block, key]) for of in found))
        table.add_row(str(block), "all", *(_percent(of.block_rates[block]) for of in found))
        table.add_section()
    return table


def _percent(rate: float) -> str:
    return f"{100.0 * rate:.1f}"


def write_histograms(panels: Mapping[str, Mapping[str, TargetRadius]], file: Path) -> None:
    """Write a PNG with the distances of each method, theory and radius. Raises OSError."""
    _write({title: partial(_draw_methods, methods) for title, methods in panels.items()}, file)


def write_noise(made: CalibrationFile, file: Path) -> None:
    """Write a PNG with the distances of honest kernels and the threshold. Raises OSError."""
    _write({made.model: partial(_draw_noise, made)}, file)


def _write(panels: Mapping[str, Callable[["Axes"], None]], file: Path) -> None:
    # Only commands that draw wait for this import. Without pyplot there is no shared state and no
    # search for a display: Agg draws the figure.
    from matplotlib.figure import Figure  # noqa: PLC0415

    figure = Figure(figsize=(WIDTH, HEIGHT * len(panels)), layout="constrained")
    rows = figure.subplots(len(panels), squeeze=False)
    for axes, (title, draw) in zip(rows[:, 0], panels.items(), strict=True):
        draw(axes)
        axes.set(title=title, xlabel="distance")
        axes.legend()
    figure.savefig(file, format="png")


def _draw_methods(methods: Mapping[str, TargetRadius], axes: "Axes") -> None:
    pooled = np.concatenate([found.distances.ravel() for found in methods.values()])
    edges = np.histogram_bin_edges(pooled, BINS).tolist()
    style = {"bins": edges, "density": True, "histtype": "stepfilled", "alpha": 0.4}
    for colour, (method, found) in zip(COLOURS, methods.items(), strict=True):
        axes.hist(found.distances.ravel(), color=colour, label=titled(method), **style)
        label = f"r_target {found.r_target:.5f}"
        axes.axvline(found.r_target, color=colour, linestyle="--", label=label)
    x = np.linspace(edges[0], edges[-1], 400)
    density = stats.norm.pdf(x, THEORY_MEAN, THEORY_SD)
    axes.plot(x, density, color="black", linewidth=1.0, label="independent directions")
    axes.set(ylabel="density")


def _draw_noise(made: CalibrationFile, axes: "Axes") -> None:
    pooled = np.concatenate([each.figures.lengths for each in made.populations])
    edges = np.histogram_bin_edges(pooled, BINS).tolist()
    for each in made.populations:
        lengths, name = each.figures.lengths, each.facts.name
        axes.hist(lengths, bins=edges, density=True, histtype="step", label=name)
    label = f"dist_threshold {made.dist_threshold:.5f}"
    axes.axvline(made.dist_threshold, color="black", linestyle="--", label=label)
    axes.set(ylabel="density")
