"""Pictures of distances: a panel for each model, with a histogram of each kind of distance."""

from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from proofserve.lab.calibrate.calibration_file import CalibrationFile
from proofserve.lab.calibrate.target import THEORY_MEAN, THEORY_SD, Calibration

if TYPE_CHECKING:
    from matplotlib.axes import Axes

BINS = 50
POINTS = 400
# Inches.
WIDTH, HEIGHT = 9.0, 4.5
COLOURS = ("tab:blue", "tab:orange")


def write_histograms(panels: Mapping[str, Mapping[str, Calibration]], file: Path) -> None:
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


def _draw_methods(methods: Mapping[str, Calibration], axes: "Axes") -> None:
    pooled = np.concatenate([found.distances.ravel() for found in methods.values()])
    edges = np.histogram_bin_edges(pooled, BINS).tolist()
    style = {"bins": edges, "density": True, "histtype": "stepfilled", "alpha": 0.4}
    for colour, (method, found) in zip(COLOURS, methods.items(), strict=True):
        axes.hist(found.distances.ravel(), color=colour, label=method, **style)
        label = f"r_target {found.r_target:.5f}"
        axes.axvline(found.r_target, color=colour, linestyle="--", label=label)
    x = np.linspace(edges[0], edges[-1], POINTS)
    peak = 1.0 / (THEORY_SD * np.sqrt(2.0 * np.pi))
    density = peak * np.exp(-0.5 * ((x - THEORY_MEAN) / THEORY_SD) ** 2)
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
