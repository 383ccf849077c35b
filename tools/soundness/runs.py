"""Vectors of every run of a model, kept on disk: what was interrupted goes on where it was."""

import ast
import hashlib
import re
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import cache, partial
from pathlib import Path
from typing import Final

import numpy as np
from numpy.typing import NDArray

import proofserve
from proofserve.engines.reference.engine import ReferenceEngine
from proofserve.engines.reference.kernels import PROFILES, own_profile
from proofserve.engines.reference.network import DTYPES, Network, with_kernels
from proofserve.protocol import SKETCH_2
from proofserve.rounds.computation import chunks
from proofserve.rounds.records import Workload
from proofserve.verifier.audit.deployment import changed_weights, price_of
from proofserve.verifier.judges import OWN, BankRun, Recompute, Vectors, as_sent
from proofserve.verifier.validator import CheckpointValidator, ValidatorSetup, proofs_of
from soundness.subjects import FOLDER, Subject

# Forwards after which what was computed is written: some seconds' work.
AT_ONCE: Final = 4
# On which vectors depend; a change of one of these files computes all of them anew.
_CODE: Final = ("engines/reference/*.py", "protocol/*.py")
_IMPORTS: Final = (ast.Import, ast.ImportFrom)


class KeptRuns:
    """Implements ``verifier.noise.CalibratingBank``, by a validator and its folder.

    ``kernels`` and ``names`` restrict the emulated kernels and the suspects; None for all.
    """

    def __init__(
        self,
        subject: Subject,
        scheme: str,
        kernels: Sequence[str] | None = None,
        names: Sequence[str] | None = None,
        folder: Path = FOLDER,
    ) -> None:
        self.subject = subject
        self.work: Workload = subject.workload(scheme)
        model = subject.model.folder
        self._validator = CheckpointValidator(
            ValidatorSetup(model), proofs_of(self.work, subject.at_once)
        )
        self.weights_digest = self._validator.weights_digest
        self.served_dtype = self._validator.served_dtype
        self.kernel_facts = self._validator.kernel_facts
        self.kernels = tuple(self._validator.kernels if kernels is None else kernels)
        self.names = tuple(self._validator.names if names is None else names)
        self.references = tuple(n for n in self._validator.references if n in self.kernels)
        self.variants = self._validator.variants
        self.round_activations = self._validator.round_activations
        about = f"{self.weights_digest} {subject.seq_len} {_code()}".encode()
        digest = hashlib.sha256(about + (model / "config.json").read_bytes()).hexdigest()[:8]
        self.folder = folder / f"{subject.arch}-{scheme}-{digest}"
        self.folder.mkdir(parents=True, exist_ok=True)

    def expect(self, runs: Mapping[BankRun, Sequence[int]]) -> None:
        """Each run is computed, and kept, by itself."""

    def truth(self, nonces: Sequence[int]) -> Vectors:
        return self._kept("published", nonces, self._validator.truth)

    def errors(self, run: BankRun, nonces: Sequence[int]) -> Vectors:
        if run.weights is not None:
            return self.cheat_errors(run, nonces)
        kept = "own" if run == OWN else f"kernel {run.kernels}{_order(run)}"
        return self._kept(kept, nonces, partial(self._validator.errors, run))

    def predictions(self, name: str, nonces: Sequence[int]) -> Vectors:
        return self._kept(f"suspect {name}", nonces, partial(self._validator.predictions, name))

    def cheat_errors(self, run: BankRun, nonces: Sequence[int]) -> Vectors:
        """The errors of a node with changed weights, private ones too."""
        kernel = str(run.kernels or OWN.kernels)
        own = own_profile(DTYPES[self.served_dtype])
        usual = own if kernel == OWN.kernels else PROFILES[kernel]
        profile = usual and replace(usual, order=run.order)
        # Made only if a vector is missing.
        network = cache(lambda: with_kernels(self._changed(str(run.weights)), profile))

        def compute(nonces: Sequence[int]) -> Vectors:
            made = ReferenceEngine(self.subject.at_once).compute(self.work, network(), nonces)
            return self.errors_of(dict(zip(made.nonces, made.values, strict=True)))

        return self._kept(f"cheat {run.weights} by {kernel}{_order(run)}", nonces, compute)

    @property
    def may_clear(self) -> bool:
        """Whether a verdict about nodes of this model and scheme can be honest."""
        return self._validator.is_dense or self.work.scheme.name == SKETCH_2

    def errors_of(self, vectors: Vectors) -> Vectors:
        """Of a node that gave these vectors, as a validator sees them."""
        truth = self.truth(tuple(vectors))
        return {n: as_sent(vector) - as_sent(truth[n]) for n, vector in vectors.items()}

    def _changed(self, name: str) -> Network:
        published = self._validator.published
        price = price_of(published, self.subject.seq_len)
        (make,) = (made for each, _, made in changed_weights(published, price) if each == name)
        return make(published)

    def _kept(self, run: str, nonces: Sequence[int], compute: Recompute) -> Vectors:
        file = self.folder / f"{re.sub('[^a-z0-9]+', '-', run.lower())}.npz"
        known = _read(file)
        for part in chunks(
            [nonce for nonce in nonces if nonce not in known], self.subject.at_once * AT_ONCE
        ):
            known |= compute(part)
            _write(file, known)
        return {nonce: known[nonce] for nonce in nonces}


def _order(run: BankRun) -> str:
    return "" if run.order is None else f" in order {run.order}"


def _read(file: Path) -> dict[int, NDArray[np.float32]]:
    with suppress(FileNotFoundError), np.load(file) as kept:
        return dict(zip(kept["nonces"].tolist(), kept["vectors"], strict=True))
    return {}


def _write(file: Path, vectors: Vectors) -> None:
    # Whole or not at all: a signal may come at any time.
    part = file.with_suffix(".part.npz")
    np.savez(part, nonces=np.array([*vectors]), vectors=np.array([*vectors.values()]))
    part.replace(file)


def _code() -> str:
    """A digest of what the code computes: not of its comments, nor of where its imports lie."""
    source = Path(proofserve.__file__).parent
    digest = hashlib.sha256()
    for pattern in _CODE:
        for file in sorted(source.glob(pattern)):
            tree = ast.parse(file.read_text())
            tree.body = [each for each in tree.body if not isinstance(each, _IMPORTS)]
            digest.update(f"{file.name}\n{ast.dump(tree)}".encode())
    return digest.hexdigest()
