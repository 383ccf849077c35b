"""A picture of noise: for each model a histogram of distances, and the threshold."""

from collections.abc import Mapping
from pathlib import Path

from proofserve.lab.calibrate.noise import Noise

BINS = 50
# Inches.
WIDTH, HEIGHT = 9.0, 4.0


def write_noise(panels: Mapping[str, Noise], file: Path) -> None:
    """Write a PNG with a panel for each title. Raises OSError."""
    # As in ``histogram``: only commands that draw wait for this, and it needs no display.
    from matplotlib.figure import Figure  # noqa: PLC0415

    figure = Figure(figsize=(WIDTH, HEIGHT * len(panels)), layout="constrained")
    rows = figure.subplots(len(panels), squeeze=False)
    for axes, (title, found) in zip(rows[:, 0], panels.items(), strict=True):
        low, high = found.interval
        axes.hist(found.distances, bins=BINS, color="tab:blue", alpha=0.5)
        axes.axvspan(low, high, color="tab:orange", alpha=0.25, label="95 % interval")
        label = f"beyond {found.quantile:.5f}: {100.0 * found.rate:g} %"
        axes.axvline(found.quantile, color="tab:orange", label=label)
        label = f"dist_threshold {found.dist_threshold:.5f}"
        axes.axvline(found.dist_threshold, color="black", linestyle="--", label=label)
        axes.set(title=title, xlabel="distance", ylabel="nonces")
        axes.legend()
    figure.savefig(file, format="png")
