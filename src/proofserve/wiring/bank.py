"""The bank of suspects over a checkpoint: implements ``lab.verify.direction.Bank``."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from proofserve.engines.reference.engine import ReferenceEngine
from proofserve.engines.reference.network import Network, load
from proofserve.engines.reference.suspects import SUSPECTS, suspect
from proofserve.lab.verify.judges import Vectors
from proofserve.rounds.errors import EngineFault
from proofserve.rounds.records import Workload


class CheckpointBank:
    """Suspects made from ``published``, and other checkpoints, by their folders' names.

    One suspect's matrices are in memory at a time, beside the published ones. Nothing is computed
    twice. ``forwards`` counts the nonces that suspects computed.
    """

    def __init__(
        self,
        published: Network,
        work: Workload,
        forward_batch: int,
        checkpoints: Sequence[Path] = (),
    ) -> None:
        others = {folder.name: folder for folder in checkpoints}
        self.names = (*SUSPECTS, *others)
        self.forwards = 0
        self._published = published
        self._work = work
        self._forward_batch = forward_batch
        self._others: Mapping[str, Path] = others
        self._known: dict[tuple[str, int], NDArray[np.float32]] = {}

    def predictions(self, name: str, nonces: Sequence[int]) -> Vectors:
        """Raises CheckpointError and EngineFault."""
        published = self._of("", self._published, nonces)
        missing = [nonce for nonce in nonces if (name, nonce) not in self._known]
        self.forwards += len(missing)
        # Changed weights are made anew for each call: keeping all would take their memory 20 times.
        made = self._of(name, self._network(name) if missing else self._published, nonces)
        return {nonce: made[nonce] - published[nonce] for nonce in nonces}

    def _of(self, name: str, network: Network, nonces: Sequence[int]) -> Vectors:
        """The vectors of ``network``, computed where they are not known yet."""
        missing = [nonce for nonce in nonces if (name, nonce) not in self._known]
        if missing:
            batch = ReferenceEngine(network, self._forward_batch).compute(self._work, missing)
            if batch.failed:
                raise EngineFault(f"{name or 'the model'}: nonce {batch.failed[0]} is not finite")
            rows = zip(batch.nonces, batch.values, strict=True)
            self._known |= {(name, nonce): vector for nonce, vector in rows}
        return {nonce: self._known[name, nonce] for nonce in nonces}

    def _network(self, name: str) -> Network:
        if name not in self._others:
            return suspect(self._published, name)
        published = self._published
        dtype = str(published.dtype).removeprefix("torch.")
        other = load(self._others[name], dtype, str(published.device))
        # The published checkpoint decides the inputs: its digest is part of every seed.
        return replace(other, facts=published.facts)
