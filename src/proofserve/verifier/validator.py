"""A validator with the published checkpoint: true vectors, honest runs, and suspected weights."""

import copy
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Final, Self

import numpy as np
import torch
from numpy.typing import NDArray

from proofserve.engines.reference.engine import ReferenceEngine
from proofserve.engines.reference.kernels import (
    PROFILES,
    KernelProfile,
    fp8_kv_profile,
    own_profile,
    with_kernels,
)
from proofserve.engines.reference.network import DTYPES, Network, load
from proofserve.engines.reference.routing import ExpertMemory
from proofserve.engines.reference.suspects import SUSPECTS, suspect
from proofserve.lab.report import LabError
from proofserve.protocol.codec import to_float16
from proofserve.rounds.errors import EngineFault
from proofserve.rounds.records import ProofBatch, Workload
from proofserve.verifier.calibration_file import KV_AUTO, KernelFacts
from proofserve.verifier.judges import Vectors

# What a network computes for nonces; it may add other nonces that it computed with them.
Compute = Callable[[Network, Sequence[int]], ProofBatch]

# In which the published vectors are computed, for every test and whatever the checkpoint has:
# errors must not contain the validator's own rounding.
EXACT: Final = "float32"
# Keys and values in the dtype that is served, or in 8 bits.
KV_FP8: Final = "fp8"
KV_DTYPES: Final = (KV_AUTO, KV_FP8)
_FP8_SUSPECT: Final = "KV cache in fp8"


def proofs_of(work: Workload, forward_batch: int) -> Compute:
    """Computes proofs for ``work``, ``forward_batch`` nonces in a forward."""
    return lambda network, nonces: ReferenceEngine(network, forward_batch).compute(work, nonces)


@dataclass(frozen=True, slots=True)
class ValidatorSetup:
    """``served_dtype`` is that of honest nodes, None for the checkpoint's own.

    ``suspects`` are checkpoints, such as public quantised ones, beside the bank that is made from
    ``model``. With a ``kv_dtype`` of fp8 nodes may keep keys and values so, and it is no suspect.
    """

    model: Path
    device: str = "cpu"
    suspects: tuple[Path, ...] = ()
    served_dtype: str | None = None
    kv_dtype: str = KV_AUTO


class CheckpointValidator:
    """Vectors and errors of the published checkpoint and of suspects. Nothing is computed twice.

    The validator's own honest run is emulated, as transformers would round in the served dtype: so
    it is the same on every processor, and quick on one without 16-bit instructions. One suspect's
    matrices are in memory at a time, beside the published ones. ``forwards`` counts the nonces that
    suspects computed. Raises CheckpointError if a checkpoint cannot be used; the methods raise
    EngineFault.
    """

    def __init__(self, setup: ValidatorSetup, compute: Compute) -> None:
        others = {folder.name: folder for folder in setup.suspects}
        allowed = {_FP8_SUSPECT} if setup.kv_dtype == KV_FP8 else set()
        self.names = (*(name for name in SUSPECTS if name not in allowed), *others)
        self.forwards = 0
        self._setup = setup
        self._compute = compute
        self._others = others
        self.published = load(setup.model, EXACT, setup.device)
        self._own = _own_profile(setup.served_dtype, self.published)
        # A population like our own run has no spread to judge others by.
        self._kernels = {name: each for name, each in PROFILES.items() if each != self._own}
        if setup.kv_dtype == KV_FP8:
            self._kernels[fp8_kv_profile.name] = fp8_kv_profile
        self._experts = ExpertMemory(self.published)
        self._known: dict[tuple[str, int], NDArray[np.float32]] = {}

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
    def is_dense(self) -> bool:
        return self._experts.is_dense

    @property
    def served_dtype(self) -> str:
        """That of the validator's own honest run."""
        return self._own.format

    @property
    def kernels(self) -> Sequence[str]:
        """The honest kernels that are emulated."""
        return tuple(self._kernels)

    def kernel_facts(self, kernel: str) -> KernelFacts:
        profile = self._kernels[kernel]
        return KernelFacts(
            name=kernel,
            emulated=True,
            engine=None,
            processor=None,
            torch=None,
            dtype=profile.format,
            kv_dtype=KV_FP8 if profile.fp8_cache else KV_AUTO,
            attention=None,
            ranks=profile.ranks,
        )

    def truth(self, nonces: Sequence[int]) -> Vectors:
        """The vectors of the published checkpoint in float32."""
        with self._experts.recording():
            return self._of("published", lambda: self.published, nonces)

    def own_errors(self, nonces: Sequence[int]) -> Vectors:
        """What rounding in the served dtype does, by the validator's own honest run."""
        return self._errors("own", lambda: with_kernels(self.published, self._own), nonces)

    def kernel_errors(self, kernel: str, nonces: Sequence[int]) -> Vectors:
        profile = self._kernels[kernel]
        network = lambda: with_kernels(self.published, profile)  # noqa: E731
        return self._errors(f"kernel {kernel}", network, nonces)

    def predictions(self, name: str, nonces: Sequence[int]) -> Vectors:
        """What a suspect's weights change, with the experts that the published ones choose.

        Raises CheckpointError for a mixture whose experts cannot be held.
        """
        truth = self.truth(nonces)
        self.forwards += sum((name, nonce) not in self._known for nonce in nonces)
        # Another checkpoint is loaded anew for each call: keeping all would take their memory.
        make = lambda: self.suspect(name)  # noqa: E731
        made = self._of(name, make, nonces, self._experts.holding)
        return {nonce: made[nonce] - truth[nonce] for nonce in nonces}

    def served_errors(self, name: str, nonces: Sequence[int]) -> Vectors:
        """The errors of a node that serves the suspect's weights, with our own rounding."""
        return self._errors(f"{name}, served", lambda: self._serving(name), nonces)

    def served_by(self, name: str, nonces: Sequence[int]) -> Vectors:
        """The vectors of such a node."""
        return self._of(f"{name}, served", lambda: self._serving(name), nonces)

    def honest_vectors(self, kernel: str, nonces: Sequence[int]) -> Vectors:
        """The vectors of an honest node with these kernels."""
        profile = self._kernels[kernel]
        network = lambda: with_kernels(self.published, profile)  # noqa: E731
        return self._of(f"kernel {kernel}", network, nonces)

    def suspect(self, name: str) -> Network:
        """The published network with a suspect's weights.

        Raises CheckpointError if they cannot be loaded.
        """
        if name not in self._others:
            return suspect(self.published, name)
        other = load(self._others[name], EXACT, self._setup.device)
        # The published checkpoint decides the inputs: its digest is part of every seed.
        return replace(other, facts=self.published.facts)

    def _serving(self, name: str) -> Network:
        return with_kernels(self.suspect(name), self._own)

    def _errors(self, name: str, network: Callable[[], Network], nonces: Sequence[int]) -> Vectors:
        """Of a run, as a validator sees them: both vectors rounded as on the wire."""
        truth = self.truth(nonces)
        made = self._of(name, network, nonces)
        return {n: _as_sent(made[n]) - _as_sent(truth[n]) for n in nonces}

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


def _own_profile(served: str | None, published: Network) -> KernelProfile:
    """Raises LabError for an unknown dtype, and for one in which no server rounds."""
    if served is not None and served not in DTYPES:
        raise LabError(f"unknown dtype {served!r}; give bfloat16 or float16")
    dtype = DTYPES[served] if served else published.declared_dtype
    # A checkpoint in float32 is served in 16 bits too, unless an operator asks for more.
    profile = own_profile(torch.bfloat16 if dtype == torch.float32 and not served else dtype)
    if profile is None:
        raise LabError(f"served_dtype: servers do not round in {served}; give bfloat16 or float16")
    return profile


def _as_sent(vector: NDArray[np.float32]) -> NDArray[np.float32]:
    return to_float16(vector).astype(np.float32)
