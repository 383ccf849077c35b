"""The audited deployment: the reference engine on a checkpoint, honest and changed to cheat."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

from proofserve.engines.reference.engine import ReferenceEngine
from proofserve.engines.reference.errors import CheckpointError
from proofserve.engines.reference.network import Network, load
from proofserve.engines.reference.precision import to_bits, to_fp8
from proofserve.engines.reference.variants import (
    last_tokens_only,
    with_matrices,
    with_redrawn_matrices,
    without_layers,
)
from proofserve.lab.audit.attacks import FP8
from proofserve.lab.audit.compute_share import ModelShape, Price
from proofserve.lab.verify.judges import Recompute, Vectors
from proofserve.protocol.identity import Block
from proofserve.protocol.scheme import Scheme
from proofserve.rounds.records import Workload

BLOCK, OTHER_BLOCK = Block("audit-block", 1), Block("audit-other-block", 1)
KEY, OTHER_KEY = "audit-key", "audit-other-key"


@dataclass(frozen=True, slots=True)
class AuditSetup:
    """What is audited, and how it is computed.

    The prover computes in ``dtype`` (None: the checkpoint's own), the validator in
    ``validator_dtype``; names as in ``engines.reference.network.DTYPES``. ``other`` is another
    checkpoint of the same shape, None for weights drawn at random. ``seq_len`` is in tokens,
    ``forward_batch`` in nonces.
    """

    model: Path
    scheme: Scheme
    seq_len: int
    dtype: str | None = None
    validator_dtype: str = "float32"
    device: str = "cpu"
    forward_batch: int = 8
    other: Path | None = None


class CheckpointDeployment:
    """Implements ``lab.audit.attacks.AuditedDeployment``; loads each prover when it is asked for.

    Raises CheckpointError if the checkpoint cannot be used. The functions that it returns raise
    EngineFault if a forward fails.
    """

    def __init__(self, setup: AuditSetup) -> None:
        self._setup = setup
        self._network = load(setup.model, setup.dtype, setup.device)
        self._work = Workload(setup.scheme, BLOCK, KEY, setup.seq_len)
        self.k_dim = setup.scheme.width
        self.price = Price(shape_of(self._network), setup.seq_len)

    def validator(self) -> Recompute:
        setup = self._setup
        return self._answers(load(setup.model, setup.validator_dtype, setup.device))

    def honest(self) -> Recompute:
        return self._answers(self._network)

    def rounded(self, precision: int | str) -> Recompute:
        change = to_fp8 if precision == FP8 else partial(to_bits, bits=int(precision))
        return self._answers(with_matrices(self._network, change))

    def without_layers(self, left_out: Sequence[int]) -> Recompute:
        """The checkpoint without some layers, with its final norm and the scheme's transforms."""
        return self._answers(without_layers(self._network, left_out))

    def last_tokens(self, count: int) -> Recompute:
        return self._answers(last_tokens_only(self._network, count))

    def other_checkpoint(self) -> Recompute:
        setup = self._setup
        if setup.other is not None:
            other = load(setup.other, setup.dtype, setup.device)
            if shape_of(other) != self.price.shape:
                raise CheckpointError(f"{setup.other} is not of the shape of {setup.model}")
            return self._answers(other)
        return self._answers(with_redrawn_matrices(self._network))

    def other_key(self) -> Recompute:
        return self._answers(self._network, replace(self._work, public_key=OTHER_KEY))

    def other_block(self) -> Recompute:
        return self._answers(self._network, replace(self._work, block=OTHER_BLOCK))

    def _answers(self, network: Network, work: Workload | None = None) -> Recompute:
        engine = ReferenceEngine(network, self._setup.forward_batch)
        work = work or self._work

        def answer(nonces: Sequence[int]) -> Vectors:
            batch = engine.compute(work, nonces)
            return dict(zip(batch.nonces, batch.values, strict=True))

        return answer


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
