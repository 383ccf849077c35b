"""The audited deployment: the reference engine on a checkpoint, honest and changed to cheat."""

import copy
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, Self

from proofserve.engines.reference.engine import ReferenceEngine
from proofserve.engines.reference.errors import CheckpointError
from proofserve.engines.reference.kernels import own_profile, with_kernels
from proofserve.engines.reference.network import DTYPES, Network, load
from proofserve.engines.reference.routers import routers_of
from proofserve.engines.reference.variants import (
    first_tokens_only,
    last_tokens_only,
    with_redrawn_matrices,
    without_layers,
)
from proofserve.lab.audit.attacks import AuditedProver
from proofserve.lab.audit.compute_share import ModelShape, Price
from proofserve.lab.verify.judges import Recompute, Vectors
from proofserve.protocol.identity import Block
from proofserve.protocol.scheme import Scheme
from proofserve.protocol.sketch import TWINS
from proofserve.rounds.records import Workload
from proofserve.wiring.changed_weights import changed_weights, size_saving
from proofserve.wiring.validator import (
    EXACT,
    KV_AUTO,
    CheckpointValidator,
    ValidatorSetup,
    proofs_of,
)

BLOCK, OTHER_BLOCK = Block("audit-block", 1), Block("audit-other-block", 1)
KEY, OTHER_KEY = "audit-key", "audit-other-key"


@dataclass(frozen=True, slots=True)
class AuditSetup:
    """What is audited, and how it is computed.

    The prover serves in ``dtype``, a name of ``engines.reference.network.DTYPES`` (None: the
    checkpoint's own), and may keep keys and values in ``kv_dtype``. ``other`` is another checkpoint
    of the same hidden size, None for weights drawn at random. ``suspects`` are checkpoints that
    join the bank; ``bank`` restricts it to these names, None for all of it. ``seq_len`` is in
    tokens, ``forward_batch`` in nonces.
    """

    model: Path
    scheme: Scheme
    seq_len: int
    dtype: str | None = None
    kv_dtype: str = KV_AUTO
    device: str = "cpu"
    forward_batch: int = 8
    other: Path | None = None
    suspects: tuple[Path, ...] = ()
    bank: tuple[str, ...] | None = None


class CheckpointDeployment:
    """Implements ``lab.audit.attacks.AuditedDeployment``; makes each prover when it is asked for.

    Provers are variants of the published network in float32, with emulated kernels: their weights
    are in memory once, however many round otherwise.

    Raises CheckpointError if the checkpoint cannot be used. The functions that it returns raise
    EngineFault if a forward fails.
    """

    def __init__(self, setup: AuditSetup) -> None:
        self._setup = setup
        self._work = self._workload(setup.scheme)
        self._validator = CheckpointValidator(
            ValidatorSetup(
                model=setup.model,
                device=setup.device,
                suspects=setup.suspects,
                served_dtype=setup.dtype,
                kv_dtype=setup.kv_dtype,
            ),
            proofs_of(self._work, setup.forward_batch),
        )
        self._own = own_profile(DTYPES[self._validator.served_dtype])
        self._network = with_kernels(self._validator.published, self._own)
        self.weights_digest = self._validator.weights_digest
        self.is_dense = self._validator.is_dense
        block = setup.scheme.for_block(BLOCK, self._network.facts, self._network.device)
        self.price = Price(shape_of(self._network), setup.seq_len, block.reads_every_position)
        self.width = setup.scheme.width
        self.has_twins = setup.scheme.sequences_per_nonce == TWINS
        self.mixes_experts = bool(routers_of(self._network))
        bank, added = setup.bank, {folder.name for folder in setup.suspects}
        every = self._validator.names
        self.names = [each for each in every if bank is None or each in {*bank, *added}]

    def with_routing(self, scheme: Scheme) -> Self:
        """The same networks, proving by a sketch of which others choose the experts."""
        made = copy.copy(self)
        made._work = self._workload(scheme)
        made._validator = self._validator.with_other(
            proofs_of(made._work, self._setup.forward_batch)
        )
        return made

    def truth(self, nonces: Sequence[int]) -> Vectors:
        return self._validator.truth(nonces)

    def predictions(self, name: str, nonces: Sequence[int]) -> Vectors:
        return self._validator.predictions(name, nonces)

    def deployed(self, nonces: Sequence[int]) -> Vectors:
        return self._answers(self._network)(nonces)

    def kernels(self) -> Iterator[AuditedProver]:
        for name in self._validator.kernels:
            answers = partial(self._validator.honest_vectors, name)
            yield AuditedProver(name, 0.0, lambda answers=answers: answers)  # type: ignore[misc]

    def weights(self) -> Iterator[AuditedProver]:
        for folder in self._setup.suspects:
            # A quantised checkpoint is a smaller file.
            saving = self.price.of_matrices(size_saving(folder, self._setup.model))
            yield AuditedProver(folder.name, saving, partial(self._suspect, folder.name))
        for change in changed_weights(self._network, self.price):
            if change.private or change.name in self.names:
                prepare = partial(self._changed, change.make)
                yield AuditedProver(change.name, change.saving, prepare)

    def without_layers(self, left_out: Sequence[int]) -> Recompute:
        """The checkpoint without some layers, with its final norm and the scheme's transforms."""
        return self._answers(without_layers(self._network, left_out))

    def some_tokens(self, count: int) -> Recompute:
        some = first_tokens_only if self.price.every_position else last_tokens_only
        return self._answers(some(self._network, count))

    def other_checkpoint(self) -> AuditedProver:
        folder = self._setup.other
        if folder is None:
            random = lambda: self._answers(with_redrawn_matrices(self._network))  # noqa: E731
            return AuditedProver("another checkpoint", 0.0, random)
        other = with_kernels(load(folder, EXACT, self._setup.device), self._own)
        self._require_fit(folder, other)
        saving = self.price.other(shape_of(other))
        name = "a smaller checkpoint" if saving else "another checkpoint"
        # The published checkpoint decides the inputs.
        answers = partial(self._answers, replace(other, facts=self._network.facts))
        return AuditedProver(name, saving, answers)

    def other_key(self) -> Recompute:
        return self._answers(self._network, replace(self._work, public_key=OTHER_KEY))

    def other_block(self) -> Recompute:
        return self._answers(self._network, replace(self._work, block=OTHER_BLOCK))

    def _workload(self, scheme: Scheme) -> Workload:
        return Workload(scheme, BLOCK, KEY, self._setup.seq_len)

    def _suspect(self, name: str) -> Recompute:
        return partial(self._validator.served_by, name)

    def _changed(self, make: Any) -> Recompute:
        return self._answers(make(self._network))

    def _require_fit(self, folder: Path, other: Network) -> None:
        """Raise CheckpointError unless ``other`` can read the inputs of the audited model."""
        ours, theirs = self._network, other
        for field, needed, has in (
            ("hidden_size", ours.facts.hidden_size, theirs.facts.hidden_size),
            ("vocabulary", _vocabulary(ours), _vocabulary(theirs)),
        ):
            if has < needed or (field == "hidden_size" and has != needed):
                raise CheckpointError(
                    f"{field}: {folder} has {has}, {self._setup.model} has {needed};"
                    " --other needs the same hidden size and all of its tokens"
                )

    def _answers(
        self, network: Network, work: Workload | None = None, batch: int | None = None
    ) -> Recompute:
        engine = ReferenceEngine(network, batch or self._setup.forward_batch)
        work = work or self._work

        def answer(nonces: Sequence[int]) -> Vectors:
            made = engine.compute(work, nonces)
            return dict(zip(made.nonces, made.values, strict=True))

        return answer


def _vocabulary(network: Network) -> int:
    config: Any = network.decoder.config
    return int(config.vocab_size)


def shape_of(network: Network) -> ModelShape:
    """The dimensions of a decoder, from its configuration in transformers' names."""
    config: Any = network.decoder.config
    heads = config.num_attention_heads
    # A token of a mixture uses a few experts. Some families give experts a width of their own.
    width = getattr(config, "moe_intermediate_size", None) or config.intermediate_size
    used = getattr(config, "num_experts_per_tok", None) or 1
    return ModelShape(
        hidden=config.hidden_size,
        layers=len(network.layers),
        heads=heads,
        kv_heads=getattr(config, "num_key_value_heads", None) or heads,
        head_dim=getattr(config, "head_dim", None) or config.hidden_size // heads,
        intermediate=width * used,
    )
