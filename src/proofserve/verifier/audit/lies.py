"""The price of a cleared lie: the most work that a node can save and still be cleared.

A liar rounds weights to 8 bits in a rotation that no validator knows, in some of the layers. It
computes by the kernel that it declares, or by a finer one there or everywhere, adds noise or none,
and does so in a share of its nonces. All of these are combined, and each combination is verified.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from typing import Final

import numpy as np
from numpy.typing import NDArray

from proofserve.reports import Progress
from proofserve.verifier.audit.attacks import Errors, Reference, errors_of, figures_of, vectors_by
from proofserve.verifier.audit.deployment import AuditedProver, CheckpointDeployment
from proofserve.verifier.judges import Chances, Vectors
from proofserve.verifier.populations import HonestPopulations
from proofserve.verifier.simulation import draws, node_figures, simulated

# Nonces of a verification, for each of which there is a price.
SAMPLES: Final = (24, 66, 200)
# Shares of verifications above this clear a lie too often.
CLEARED_AT_MOST: Final = 0.001
# Of the layers, from the last one and from the first one on; of the nonces; and the length of the
# noise in that of an honest error.
_PARTS: Final = (1 / 6, 1 / 3, 1 / 2, 2 / 3, 5 / 6, 1.0)
_SHARES: Final = (1.0, 0.7, 0.5, 0.3, 0.2, 0.1, 0.05)
_NOISES: Final = (0.0, 0.5)

Floats = NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class Lie:
    """Errors float32 [n, width] of a way to save the share ``saving`` (0 to 1) of the work."""

    name: str
    saving: float
    errors: Errors


@dataclass(frozen=True, slots=True)
class ClearedLie:
    """The lie of most worth among those that verifications of ``nonces`` clear too often.

    ``name`` is empty, and ``saving`` 0, if they clear none. ``cleared`` is the share that do.
    """

    nonces: int
    name: str = ""
    saving: float = 0.0
    cleared: float = 0.0

    @property
    def text(self) -> str:
        if not self.name:
            return f"{self.nonces} nonces: none of the lies that were tried is cleared"
        return f"{self.nonces} nonces: {self.saving:.0%} ({self.name}; {self.cleared:.1%} clear it)"


def lies(
    deployment: CheckpointDeployment, truth: Vectors, typical: float, progress: Progress
) -> Iterator[Lie]:
    """All that are tried in every nonce; noise is ``typical`` times as long as ``_NOISES``."""
    layers, nonces = deployment.price.layers, tuple(truth)
    counts = sorted({max(1, round(part * layers)) for part in _PARTS})
    places = {f"the last {n}": range(layers - n, layers) for n in counts}
    places |= {f"the first {n}": range(n) for n in counts[:-1]}
    drawn = np.random.default_rng(0)
    # What rounds less leaves a lie room for errors of its own.
    for (where, some), how in product(places.items(), ("", ", these in float16", ", in float16")):
        finer = {"": (), ", these in float16": some}.get(how, range(layers))
        rotated = deployment.rotated(some, finer)
        name = f"private int8 in {where} of {layers} layers{how}"
        saving = deployment.price.bits(8) * len(some) / layers
        prover = AuditedProver(name, saving, lambda rotated=rotated: rotated)  # type: ignore[misc]
        errors = errors_of(vectors_by(prover, nonces, progress), truth)
        if not np.isfinite(errors).all():
            continue
        noise = drawn.normal(size=errors.shape).astype(np.float32)
        noise *= typical / np.linalg.norm(noise, axis=1, keepdims=True)
        for times in _NOISES:
            said = f"{name}, noise of {times:g} honest errors" if times else name
            yield Lie(said, saving, errors + np.float32(times) * noise)


@dataclass(frozen=True, slots=True)
class LieDetector:
    """Verifies lies by ``null``, beside the ``reference`` and the ``honest`` node's own errors.

    ``predictions`` are of every suspect, ``alpha`` and ``runs`` of the verifications.
    """

    null: HonestPopulations
    reference: Reference
    predictions: Mapping[str, Errors]
    honest: Errors
    alpha: float
    runs: int

    def dearest(self, tried: Sequence[Lie], nonces: int) -> ClearedLie:
        """The price at ``nonces``: lies are tried from the one that saves most."""
        every = [(share * lie.saving, share, lie) for lie in tried for share in _SHARES]
        for saving, share, lie in sorted(every, key=lambda each: -each[0]):
            cleared = self._cleared(lie, share, nonces)
            if cleared > CLEARED_AT_MOST:
                where = "" if share == 1.0 else f", on {share:.0%} of the nonces"
                return ClearedLie(nonces, f"{lie.name}{where}", saving, cleared)
        return ClearedLie(nonces)

    def _cleared(self, lie: Lie, share: float, nonces: int) -> float:
        """The share of verifications that clear it."""
        errors = np.concatenate([self.honest, lie.errors])
        count = len(self.honest)
        chances = np.repeat(
            [(1.0 - share) / count, share / len(lie.errors)], [count, len(lie.errors)]
        )
        lengths = {
            name: np.linalg.norm(each, axis=1).astype(np.float64)
            for name, each in self.predictions.items()
        }
        own = figures_of(self.reference.errors, self.reference, self.predictions)
        shown = figures_of(errors, self.reference, self.predictions)
        node = node_figures(shown, {self.null.reference: own}, self.null, lengths)
        wanted = Chances(alpha=self.alpha).of_vectors(errors.shape[1])
        ended = simulated(node, self.null, wanted, draws(len(node), self.runs, nonces, chances))
        return ended.cleared / self.runs
