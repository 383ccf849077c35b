"""A picture of distances: a histogram for each method, theory, and the target radius."""

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from proofserve.lab.calibrate.target import THEORY_MEAN, THEORY_SD, Calibration

if TYPE_CHECKING:
    from matplotlib.axes import Axes

BINS = 50
POINTS = 400
# Inches.
WIDTH, HEIGHT = 9.0, 4.5
COLOURS = ("tab:blue", "tab:orange")


def write_histograms(panels: Mapping[str, Mapping[str, Calibration]], file: Path) -> None:
    """Write a PNG: for each model a panel with the histogram of each method. Raises OSError."""
    # Only commands that draw wait for this import. Without pyplot there is no shared state and no
    # search for a display: Agg draws the figure.
    from matplotlib.figure import Figure  # noqa: PLC0415

    figure = Figure(figsize=(WIDTH, HEIGHT * len(panels)), layout="constrained")
    rows = figure.subplots(len(panels), squeeze=False)
    for axes, (title, methods) in zip(rows[:, 0], panels.items(), strict=True):
        _draw(axes, methods)
        axes.set(title=title, xlabel="distance", ylabel="density")
        axes.legend()
    figure.savefig(file, format="png")


def _draw(axes: "Axes", methods: Mapping[str, Calibration]) -> None:
    pooled = np.concatenate([found.distances.ravel() for found in methods.values()])
    edges = np.histogram_bin_edges(pooled, BINS).tolist()
    for colour, (method, found) in zip(COLOURS, methods.items(), strict=True):
        axes.hist(
            found.distances.ravel(),
            bins=edges,
            density=True,
            histtype="stepfilled",
            color=colour,
            alpha=0.4,
            label=method,
        )
        label = f"r_target {found.r_target:.5f}"
        axes.axvline(found.r_target, color=colour, linestyle="--", label=label)
    x = np.linspace(edges[0], edges[-1], POINTS)
    density = np.exp(-0.5 * ((x - THEORY_MEAN) / THEORY_SD) ** 2) / (
        THEORY_SD * np.sqrt(2.0 * np.pi)
    )
    axes.plot(x, density, color="black", linewidth=1.0, label="independent directions")
