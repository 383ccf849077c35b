"""A validator with the published checkpoint: true vectors, and those of suspected weights."""

import copy
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Self

import numpy as np
from numpy.typing import NDArray

from proofserve.engines.reference.engine import ReferenceEngine
from proofserve.engines.reference.network import Network, load
from proofserve.engines.reference.routing import ExpertMemory
from proofserve.engines.reference.suspects import SUSPECTS, suspect
from proofserve.lab.verify.judges import Vectors
from proofserve.rounds.errors import EngineFault
from proofserve.rounds.records import ProofBatch, Workload

# What a network computes for nonces; it may add other nonces that it computed with them.
Compute = Callable[[Network, Sequence[int]], ProofBatch]


def proofs_of(work: Workload, forward_batch: int) -> Compute:
    """Computes proofs for ``work``, ``forward_batch`` nonces in a forward."""
    return lambda network, nonces: ReferenceEngine(network, forward_batch).compute(work, nonces)


@dataclass(frozen=True, slots=True)
class ValidatorSetup:
    """``dtype`` is the one to recompute in, ``served_dtype`` the one that nodes serve.

    None is the checkpoint's own. ``suspects`` are checkpoints, such as public quantised ones,
    beside the bank that is made from ``model``.
    """

    model: Path
    dtype: str | None
    device: str = "cpu"
    suspects: tuple[Path, ...] = ()
    served_dtype: str | None = None


class CheckpointValidator:
    """Implements ``lab.verify.direction.Bank``. Nothing is computed twice.

    One suspect's matrices are in memory at a time, beside the published ones. ``forwards`` counts
    the nonces that suspects computed. Raises CheckpointError if a checkpoint cannot be used; the
    methods raise EngineFault.
    """

    def __init__(self, setup: ValidatorSetup, compute: Compute) -> None:
        others = {folder.name: folder for folder in setup.suspects}
        self.names = (*SUSPECTS, *others)
        self.forwards = 0
        self._setup = setup
        self._compute = compute
        self._others = others
        self.published = load(setup.model, setup.dtype, setup.device)
        # Loaded when a test first asks for it.
        self.served = cache(lambda: load(setup.model, setup.served_dtype, setup.device))
        self._known: dict[tuple[str, int], NDArray[np.float32]] = {}
        self._experts = ExpertMemory(self.published)

    def with_other(self, compute: Compute) -> Self:
        """A validator of other nonces, with the networks that this one has loaded."""
        made = copy.copy(self)
        made._compute, made._known = compute, {}
        made._experts = ExpertMemory(self.published)
        return made

    @property
    def weights_digest(self) -> str | None:
        return self.published.facts.weights_digest

    @property
    def rounds_as_deployed(self) -> bool:
        """Whether ``truth`` is computed in the dtype of the deployment, so has its rounding."""
        return self.published.dtype == self.served().dtype

    def truth(self, nonces: Sequence[int]) -> Vectors:
        """The vectors of the published checkpoint in the validator's dtype."""
        with self._experts.recording():
            return self._of("published", lambda: self.published, nonces)

    def deployed(self, nonces: Sequence[int]) -> Vectors:
        """The vectors of the published checkpoint as served, which an honest node has."""
        return self._of("deployed", self.served, nonces)

    def own_errors(self, nonces: Sequence[int]) -> Vectors:
        """``deployed`` less ``truth``: what rounding in the served dtype does here."""
        truth = self.truth(nonces)
        return {n: vector - truth[n] for n, vector in self.deployed(nonces).items()}

    def predictions(self, name: str, nonces: Sequence[int]) -> Vectors:
        """What a suspect's weights change, with the experts that the published ones choose.

        Raises CheckpointError for a mixture whose experts cannot be held.
        """
        truth = self.truth(nonces)
        self.forwards += sum((name, nonce) not in self._known for nonce in nonces)
        # Changed weights are made anew for each call: keeping all would take their memory 20 times.
        make = lambda: self.suspect(name, self.published)  # noqa: E731
        made = self._of(name, make, nonces, self._experts.holding)
        return {nonce: made[nonce] - truth[nonce] for nonce in nonces}

    def served_by(self, name: str, nonces: Sequence[int]) -> Vectors:
        """The vectors of a node that deploys the suspect's weights in the served dtype."""
        make = lambda: self.suspect(name, self.served())  # noqa: E731
        return self._of(f"{name}, deployed", make, nonces)

    def _of(
        self,
        name: str,
        network: Callable[[], Network],
        nonces: Sequence[int],
        within: Callable[[Network], AbstractContextManager[object]] = nullcontext,
    ) -> Vectors:
        """The vectors by a network, computed ``within`` where they are not known yet."""
        missing = [nonce for nonce in nonces if (name, nonce) not in self._known]
        if missing:
            made = network()
            with within(made):
                batch = self._compute(made, missing)
            if batch.failed:
                raise EngineFault(f"{name}: the vector of nonce {batch.failed[0]} is not finite")
            rows = zip(batch.nonces, batch.values, strict=True)
            self._known |= {(name, nonce): vector for nonce, vector in rows}
        return {nonce: self._known[name, nonce] for nonce in nonces}

    def suspect(self, name: str, of: Network) -> Network:
        """``of`` with the suspect's weights. Raises CheckpointError if they cannot be loaded."""
        if name not in self._others:
            return suspect(of, name)
        other = load(self._others[name], str(of.dtype).removeprefix("torch."), str(of.device))
        # The published checkpoint decides the inputs: its digest is part of every seed.
        return replace(other, facts=of.facts)
