"""What the errors of a prover show, as the tests of a verdict read them."""

from collections.abc import Mapping

import numpy as np

from proofserve.lab.audit.measurement import Errors, Floats
from proofserve.lab.verify.populations import RunFigures
from proofserve.protocol.verdict.leaning import cosine
from proofserve.protocol.verdict.twins import alikeness

# An honest prover in float32 may give the published vector itself; a fit needs a length.
LEAST_LENGTH = 1e-6


def figures_of(errors: Errors, predictions: Mapping[str, Errors], has_twins: bool) -> RunFigures:
    """The figures of ``errors`` [n, width], NaN rows of nonces without a vector included.

    ``predictions`` [m, width] by suspect are those of the first m nonces; where n is a multiple of
    m, those nonces come again and again.
    """
    rows = np.arange(len(errors)) % len(next(iter(predictions.values())))
    broken = np.isnan(errors).any(axis=1)
    lengths = np.linalg.norm(errors, axis=1).astype(np.float64)

    def known(values: list[float]) -> Floats:
        return np.where(broken, np.nan, np.array(values, dtype=np.float64))

    return RunFigures(
        lengths=np.where(broken, np.inf, np.maximum(lengths, LEAST_LENGTH)),
        alike=known([alikeness(error) for error in errors]) if has_twins else None,
        cosines={
            name: known([cosine(e, p) for e, p in zip(errors, predicted[rows], strict=True)])
            for name, predicted in predictions.items()
        },
        rows=rows,
    )
