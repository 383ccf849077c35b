"""What ``verify`` and ``audit`` share: how a threshold is given, and exit codes of verdicts."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from typer.core import TyperCommand

from proofserve.lab.calibrate.calibration_file import HOW_TO_CALIBRATE, CalibrationFile, read
from proofserve.lab.client.errors import LabError

# The network's; a calibration has its own.
P_MISMATCH = 0.001
# Something could not be understood, read or recomputed.
NO_VERDICT = 3

DistThreshold = Annotated[
    float | None,
    typer.Option(help="L2 distance beyond which a vector is a mismatch, measured for this model."),
]
Calibration = Annotated[
    Path | None,
    typer.Option(help="Or the file of `calibrate noise --out`, which is checked to fit."),
]
PMismatch = Annotated[
    float | None,
    typer.Option(
        help="Share of honest vectors beyond the threshold;"
        f" the calibration's, or {P_MISMATCH} with --dist-threshold."
    ),
]


@dataclass(frozen=True, slots=True)
class MeasuredThreshold:
    """A threshold, the share of honest vectors beyond it, and where both come from."""

    dist_threshold: float
    p_mismatch: float
    calibration: CalibrationFile | None = None

    @property
    def origin(self) -> str:
        """Where it comes from, for reports."""
        return self.calibration.origin if self.calibration else "given as --dist-threshold"


def measured_threshold(
    dist_threshold: float | None, calibration: Path | None, p_mismatch: float | None
) -> MeasuredThreshold:
    """What the three options say. There is no default: a threshold belongs to a model.

    Raises LabError if neither a threshold nor a calibration is given, or both are, for a broken
    file, and for a ``p_mismatch`` that is not the calibration's.
    """
    if calibration is None:
        if dist_threshold is None:
            raise LabError(f"no threshold: {HOW_TO_CALIBRATE}")
        rate = P_MISMATCH if p_mismatch is None else p_mismatch
        return MeasuredThreshold(dist_threshold, rate)
    if dist_threshold is not None:
        raise LabError("two thresholds: give --calibration or --dist-threshold, not both")
    measured = read(calibration)
    if p_mismatch not in {None, measured.p_mismatch}:
        raise LabError(
            f"p_mismatch: {calibration} has {measured.p_mismatch:g}; leave --p-mismatch out"
        )
    return MeasuredThreshold(measured.dist_threshold, measured.p_mismatch, measured)


class VerdictCommand(TyperCommand):
    """Ends with ``NO_VERDICT`` where others end with 2 (usage errors) or 1 (crashes)."""

    def make_context(self, *args: Any, **kwargs: Any) -> Any:
        """Parse the command line."""
        with _no_verdict():
            return super().make_context(*args, **kwargs)

    def invoke(self, ctx: Any) -> Any:
        """Run the command."""
        with _no_verdict():
            return super().invoke(ctx)


@contextmanager
def _no_verdict() -> Iterator[None]:
    try:
        yield
    except typer.Exit:
        raise
    except Exception as error:
        # Usage errors carry their exit code; the command line library shows them.
        if hasattr(error, "exit_code"):
            error.exit_code = NO_VERDICT
            raise
        Console(stderr=True).print_exception()
        raise typer.Exit(NO_VERDICT) from error
