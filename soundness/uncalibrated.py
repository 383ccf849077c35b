"""Simulated verifications without a calibration: ``verifier.simulation`` has those with one."""

import math
from collections.abc import Sequence

import numpy as np

from proofserve.protocol.verdict.leaning import uncalibrated_log_factors
from proofserve.verifier.judges import Chances
from proofserve.verifier.populations import UNKNOWN, RunFigures
from proofserve.verifier.simulation import Draws, Endings, first_of, ruled_out


def simulated_uncalibrated(
    node: RunFigures, own: RunFigures, kernels: Sequence[RunFigures], chances: Chances, drawn: Draws
) -> Endings:
    """Verifications of ``node`` without a calibration, as ``verify --test direction`` runs them.

    All figures are of the same nonces; ``kernels`` are the honest ones that are emulated.
    """
    above_own, above_all = {}, {}
    for name, cosines in node.cosines.items():
        ours = own.cosines[name]
        above_own[name] = cosines - ours
        honest = [ours, *(kernel.cosines[name] for kernel in kernels)]
        above_all[name] = cosines - np.maximum.reduce(honest)
    limit = math.log(len(node.cosines) / chances.alpha)
    convicting, refuting = (
        [uncalibrated_log_factors(figures) for figures in every.values()]
        for every in (above_all, above_own)
    )
    convicted = first_of(convicting, drawn, limit)
    refuted = first_of(refuting, drawn, limit, convicted)
    out = ruled_out(above_own, dict.fromkeys(above_own, UNKNOWN), chances, drawn)
    cleared = np.where(out < refuted, out, drawn.never)
    return Endings(
        drawn.most, convicted, cleared, refuted <= drawn.most, {"direction": convicted}, ""
    )
