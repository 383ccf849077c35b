"""Whether a calibration would convict honest kernels that it lacks, tried with its own ones."""

from typing import Final

import numpy as np

from proofserve.lab.calibrate.calibration_file import CalibrationFile, LeftOutCheck
from proofserve.lab.client.progress import Progress
from proofserve.lab.verify.judges import Chances
from proofserve.lab.verify.populations import HonestPopulations
from proofserve.lab.verify.simulation import convictions, draws, node_figures

VERIFICATIONS, NONCES = 10_000, 1000
# Of the whole verdict, as the default of ``verify``.
CHANCES: Final = Chances(alpha=1e-6, beta=1e-3)
# How many times as wide the margins become until no population is convicted by the others.
ROOMS: Final = (1.0, 1.25, 1.5, 2.0, 3.0, 4.0)


def checked(
    file: CalibrationFile, progress: Progress, verifications: int = VERIFICATIONS
) -> CalibrationFile:
    """The file with its check."""
    return file.model_copy(update={"left_out": left_out(file, progress, verifications)})


def left_out(
    file: CalibrationFile, progress: Progress, verifications: int = VERIFICATIONS
) -> LeftOutCheck | None:
    """The check of a file; None if it has one population alone, with nothing to judge it by."""
    names = [each.facts.name for each in file.populations]
    if len(names) < 2:
        return None
    at_once: dict[str, int] = {}
    for room in ROOMS:
        honest = file.null(room)
        progress.step(f"each kernel left out, margins times {room:g}", len(names))
        found = {}
        for name in names:
            found[name] = _convicted(file, honest, name, verifications)
            progress.advance()
        at_once = at_once or found
        if not any(found.values()):
            break
    return LeftOutCheck(
        verifications=verifications,
        nonces=NONCES,
        room=room,
        convicted={name: count for name, count in at_once.items() if count},
    )


def _convicted(
    file: CalibrationFile, honest: HonestPopulations, name: str, verifications: int
) -> int:
    run = next(each.figures.figures for each in file.populations if each.facts.name == name)
    node = node_figures(run, file.own.figures, honest)
    drawn = draws(len(node), verifications, NONCES)
    return int(np.count_nonzero(convictions(node, honest.without(name), CHANCES, drawn) <= NONCES))


def left_out_lines(found: LeftOutCheck | None) -> list[str]:
    """The result of the check in words, for a reader."""
    if found is None:
        return ["one kernel alone: nothing says how others differ; give --other or --add"]
    tried = f"{found.verifications} verifications of {found.nonces} nonces each"
    if not found.convicted:
        return [f"each kernel left out in turn was convicted by the others in 0 of {tried}"]
    named = ", ".join(f"{name} in {count}" for name, count in found.convicted.items())
    return [
        f"left out, honest kernels would be convicted by the others: {named} of {tried}",
        f"so verdicts have margins {found.room:g} times as wide, with which none is",
    ]
