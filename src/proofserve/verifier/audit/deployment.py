"""The audited deployment: a checkpoint, honest and changed to cheat, and what each change saves.

Prices count the multiplications of the matrices and of causal attention; the rest is a few percent
of a forward. Every share is one of the honest price. Where a scheme reads the last position alone,
that leaves out the last layer's MLP at all others, as our servers do (ADR 8).
"""

import copy
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Final, Self

from proofserve.engines import CheckpointError
from proofserve.engines.reference.engine import ReferenceEngine
from proofserve.engines.reference.kernels import PROFILES
from proofserve.engines.reference.network import Network, load, with_kernels
from proofserve.engines.reference.rounding import (
    Rounding,
    in_dtype,
    in_groups,
    integers,
    rotated,
    stochastic,
)
from proofserve.engines.reference.routing import routers_of
from proofserve.engines.reference.suspects import SUSPECTS, suspect, weight_bits
from proofserve.engines.reference.variants import (
    first_tokens_only,
    last_tokens_only,
    of_rank,
    pruned,
    share_of_experts,
    share_of_rank,
    with_cache,
    with_int8_attention,
    with_matrices,
    with_random_matrices,
    with_redrawn_matrices,
    without_experts,
    without_layers,
)
from proofserve.protocol.identity import Block
from proofserve.protocol.scheme import Scheme
from proofserve.rounds.records import Workload
from proofserve.verifier.judges import BankRun, Recompute, Vectors
from proofserve.verifier.validator import (
    EXACT,
    CheckpointValidator,
    ValidatorSetup,
    proofs_of,
    size_of,
)

# Bits of a weight as it is served.
SERVED_BITS = 16
# Shares of the full rank; from a half on, square matrices save nothing.
RANKS = {"half": 0.5, "a quarter": 0.25}
# Shares of a mixture's experts, the least used ones.
PRUNED_EXPERTS: Final = {"a quarter of the experts pruned": 0.25, "half of the experts pruned": 0.5}
# No public format has groups of this size.
PRIVATE_GROUP = 48
# A seed that only the prover knows, of the rotation in which it rounds.
_TURNED: Final = rotated(in_groups(integers(8), 32), 1)
# Rounds an eighth as much as bfloat16.
_FINER: Final = PROFILES["torch in float16"]
# In which the validator adds up; provers do as this machine does.
_ORDERS: Final = (7919, 7920)
BLOCK, OTHER_BLOCK = Block("audit-block", 1), Block("audit-other-block", 1)
KEY, OTHER_KEY = "audit-key", "audit-other-key"


@dataclass(frozen=True, slots=True)
class Price:
    """What a sequence costs in a decoder with grouped queries and a gated MLP, all layers alike.

    ``intermediate`` is the width of the MLP, or of all experts together that one token uses.
    ``every_position`` says whether the scheme reads all positions, or the last alone.
    """

    hidden: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    intermediate: int
    seq_len: int
    every_position: bool = False

    @property
    def queries(self) -> int:
        """Multiplications of the query and the output projection, for one token."""
        return 2 * self.hidden * self.heads * self.head_dim

    @property
    def keys(self) -> int:
        """Multiplications of the key and the value projection, for one token."""
        return 2 * self.hidden * self.kv_heads * self.head_dim

    @property
    def mlp(self) -> int:
        """Multiplications of gate, up and down projection, for one token."""
        return 3 * self.hidden * self.intermediate

    @property
    def pair(self) -> int:
        """Multiplications of attention for one token and one that it sees: score and value."""
        return 2 * self.heads * self.head_dim

    @property
    def honest(self) -> int:
        """What our servers compute for one sequence."""
        return self._whole - self._unread_mlp if self.layers else 0

    def without_layers(self, count: int) -> float:
        """The share (0 to 1) saved without ``count`` layers, and the last one's unread MLP."""
        return self.instead_of(replace(self, layers=self.layers - count))

    def instead_of(self, other: "Price") -> float:
        """The share saved by the ``other`` sequence; 0 if it is not cheaper."""
        return max(0.0, 1.0 - other.honest / self.honest)

    def tokens(self, count: int) -> float:
        """The share saved by computing ``count`` positions alone."""
        return self.instead_of(replace(self, seq_len=count))

    def of_matrices(self, saved: float) -> float:
        """The share saved if the layers' matrices, not attention, cost ``saved`` (0 to 1) less."""
        return (1.0 - self._attention / self.honest) * saved

    def bits(self, bits: int) -> float:
        """The share saved by matrices of ``bits`` instead of 16 bits, at most.

        Multiplications count as cheaper in proportion to the bits, which the fastest hardware
        offers if activations are rounded too.
        """
        return self.of_matrices(1.0 - bits / SERVED_BITS)

    def cache(self, bits: int) -> float:
        """The share saved by keys and values of ``bits`` instead of 16 bits, at most."""
        return self._attention / self.honest * (1.0 - bits / SERVED_BITS)

    @property
    def first_projections(self) -> float:
        """The share of the first layer's queries, keys and values, which only the token decides."""
        return self.seq_len * (self.queries // 2 + self.keys) / self.honest

    @property
    def unread_mlp(self) -> float:
        """The last MLP at unread positions, as a share of a forward that computes everything."""
        return self._unread_mlp / self._whole

    @property
    def unread_attention(self) -> float:
        """The share saved by also leaving out the last layer's queries at unread positions.

        Their scores and output projections are left out with them. Keys and values of every
        position stay, because the last position reads them.
        """
        if self.every_position:
            return 0.0
        unread = self.seq_len - 1
        # The pairs of all tokens but the last one.
        pairs = unread * self.seq_len // 2
        return (unread * self.queries + pairs * self.pair) / self.honest

    @property
    def _attention(self) -> int:
        pairs = self.seq_len * (self.seq_len + 1) // 2
        return self.layers * pairs * self.pair

    @property
    def _whole(self) -> int:
        token = self.queries + self.keys + self.mlp
        return self.layers * self.seq_len * token + self._attention

    @property
    def _unread_mlp(self) -> int:
        return 0 if self.every_position else (self.seq_len - 1) * self.mlp


@dataclass(frozen=True, slots=True)
class AuditedProver:
    """A way to make vectors. ``saving`` is the share (0 to 1) of an honest nonce's compute.

    ``prepare`` may take memory and seconds, and returns the function that computes the vectors,
    float32 [width]; a nonce without a finite vector is left out. ``exact`` says that the vectors
    are honest ones, so that no test can tell.
    """

    name: str
    saving: float
    prepare: Callable[[], Recompute]
    exact: bool = False


# The name of a change of weights, the share of compute that it saves, and what makes it. Of pruned
# experts the share is that of the layers' memory.
Change = tuple[str, float, Callable[[Network], Network]]


def changed_weights(network: Network, price: Price) -> Iterator[Change]:
    """Those of the bank, by their names, and private ones."""

    def matrices(rounding: Rounding) -> Callable[[Network], Network]:
        return lambda of: with_matrices(of, in_dtype(rounding))

    for name in SUSPECTS:
        bits = weight_bits(name)
        saving = price.bits(bits) if bits < SERVED_BITS else price.cache(8)
        yield name, saving, partial(suspect, name=name)
    chance = partial(with_random_matrices, change=lambda g: in_dtype(stochastic(8, g)))
    yield "int8 per channel by chance", price.bits(8), chance
    groups = partial(
        with_random_matrices, change=lambda g: in_dtype(in_groups(stochastic(8, g), 32))
    )
    yield "int8 g32 by chance", price.bits(8), groups
    grouped = in_groups(integers(8), PRIVATE_GROUP)
    yield f"int8 g{PRIVATE_GROUP}, private", price.bits(8), matrices(grouped)
    yield "int8 g32, rotated in private", price.bits(8), matrices(_TURNED)
    every_other = range(0, len(network.shapes), 2)
    half = partial(with_matrices, change=in_dtype(integers(8)), layers=every_other)
    yield "int8 per channel on half of the layers", price.bits(8) / 2, half
    yield "KV cache in int8", price.cache(8), partial(with_cache, rounding=integers(8))
    # As in the cache, half of attention's work is left at most.
    yield "attention in int8", price.cache(8), with_int8_attention
    yield "pruned 2:4", price.of_matrices(0.5), matrices(pruned)
    for name, share in RANKS.items():
        saving = price.of_matrices(1.0 - share_of_rank(network, share))
        yield f"{name} of the rank", saving, matrices(partial(of_rank, share=share))
    if routers_of(network):
        for name, share in PRUNED_EXPERTS.items():
            saving = share * share_of_experts(network)
            yield name, saving, partial(without_experts, share=share)


@dataclass(frozen=True, slots=True, kw_only=True)
class AuditSetup(ValidatorSetup):
    """What is audited, and how it is computed: the prover serves as the validator thinks.

    ``other`` is another checkpoint of the same hidden size, None for weights drawn at random.
    ``bank`` restricts the bank to these names and to ``suspects``. ``seq_len`` is in tokens.
    """

    scheme: Scheme
    seq_len: int
    forward_batch: int = 8
    other: Path | None = None
    bank: tuple[str, ...] | None = None


class CheckpointDeployment:
    """The audited model, honest and changed to cheat; makes each prover when it is asked for.

    ``width`` is the number of values per nonce, ``names`` are the validator's suspects, and
    ``reference`` is the kernel of the run beside which it judges.

    Provers are variants of the published network in float32, with emulated kernels: their weights
    are in memory once, however many round otherwise. Raises CheckpointError if the checkpoint
    cannot be used; what it returns raises EngineFault if a forward fails.
    """

    def __init__(self, setup: AuditSetup) -> None:
        self._setup = setup
        self._work = self._workload(setup.scheme)
        compute = proofs_of(self._work, setup.forward_batch)
        self._validator = CheckpointValidator(setup, compute)
        # A prover rounds as some server does. The validator emulates this kernel too, but adds up
        # in other orders.
        served = self._validator.references
        self.reference = served[min(1, len(served) - 1)]
        self._served = BankRun(kernels=self.reference)
        self._network = self._validator.network(self._served)
        self.weights_digest = self._validator.weights_digest
        self.is_dense = self._validator.is_dense
        block = setup.scheme.for_block(BLOCK, self._network.facts, self._network.device)
        self.price = price_of(self._network, setup.seq_len, block.reads_every_position)
        self.width = setup.scheme.width
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
        """The vectors of the honest model by the prover's kernel."""
        return self._answers(self._network)(nonces)

    def kernels(self) -> Iterator[AuditedProver]:
        """The honest model by other kernels than ``deployed``, and by the validator's own run."""
        for name in self._validator.kernels:
            run = BankRun(kernels=name, order=_ORDERS[0] if name == self.reference else None)
            answers = partial(self._validator.vectors, run)
            yield AuditedProver(name, 0.0, lambda answers=answers: answers)  # type: ignore[misc]

    @property
    def own_again(self) -> AuditedProver:
        """The validator's own run once more, in the second of its orders."""
        run = BankRun(kernels=self.reference, order=_ORDERS[1])
        answers = partial(self._validator.vectors, run)
        return AuditedProver("our own run in another order", 0.0, lambda: answers)

    def weights(self) -> Iterator[AuditedProver]:
        """Changed weights, activations and caches; those of the suspects have their names."""
        ours = size_of(self._setup.model)
        for folder in self._setup.suspects:
            # A quantised checkpoint is a smaller file.
            smaller = max(0.0, 1.0 - size_of(folder) / ours) if ours else 0.0
            saving = self.price.of_matrices(smaller)
            yield AuditedProver(folder.name, saving, partial(self._suspect, folder.name))
        for name, saving, make in changed_weights(self._network, self.price):
            if name not in SUSPECTS or name in self.names:
                yield AuditedProver(name, saving, partial(self._changed, make))

    def rotated(self, layers: Sequence[int], finer: Sequence[int]) -> Recompute:
        """Weights of some ``layers`` in int8, rounded in a rotation that only the prover knows.

        The layers of ``finer`` compute in float16, the others by the prover's kernel.
        """
        made = with_matrices(self._network, in_dtype(_TURNED), layers)
        return self._answers(replace(made, kernels_in=dict.fromkeys(finer, _FINER)))

    def without_layers(self, left_out: Sequence[int]) -> Recompute:
        """The checkpoint without some layers, with its final norm and the scheme's transforms."""
        return self._answers(without_layers(self._network, left_out))

    def some_tokens(self, count: int) -> Recompute:
        """The model that computes ``count`` positions: the last, or the first if all are read."""
        some = first_tokens_only if self.price.every_position else last_tokens_only
        return self._answers(some(self._network, count))

    def other_checkpoint(self) -> AuditedProver:
        """A model with other weights, of the same shape or a smaller one."""
        folder = self._setup.other
        if folder is None:
            random = lambda: self._answers(with_redrawn_matrices(self._network))  # noqa: E731
            return AuditedProver("another checkpoint", 0.0, random)
        other = with_kernels(load(folder, EXACT, self._setup.device), self._network.kernels)
        self._require_fit(folder, other)
        cheaper = price_of(other, self.price.seq_len, self.price.every_position)
        saving = self.price.instead_of(cheaper)
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
        return partial(self._validator.vectors, replace(self._served, weights=name))

    def _changed(self, make: Callable[[Network], Network]) -> Recompute:
        return self._answers(make(self._network))

    def _require_fit(self, folder: Path, other: Network) -> None:
        """Raise CheckpointError unless ``other`` can read the inputs of the audited model."""
        ours = self._network
        for field, needed, has in (
            ("hidden_size", ours.facts.hidden_size, other.facts.hidden_size),
            ("vocabulary", ours.vocabulary, other.vocabulary),
        ):
            if has < needed or (field == "hidden_size" and has != needed):
                raise CheckpointError(
                    f"{field}: {folder} has {has}, {self._setup.model} has {needed};"
                    " --other needs the same hidden size and all of its tokens"
                )

    def _answers(self, network: Network, work: Workload | None = None) -> Recompute:
        engine = ReferenceEngine(self._setup.forward_batch)
        work = work or self._work

        def answer(nonces: Sequence[int]) -> Vectors:
            made = engine.compute(work, network, nonces)
            return dict(zip(made.nonces, made.values, strict=True))

        return answer


def price_of(network: Network, seq_len: int, every_position: bool = False) -> Price:
    """By the configuration of a decoder, in transformers' names."""
    config = network.config
    heads = config.num_attention_heads
    # A token of a mixture uses a few experts. Some families give experts a width of their own.
    width = getattr(config, "moe_intermediate_size", None) or config.intermediate_size
    used = getattr(config, "num_experts_per_tok", None) or 1
    return Price(
        hidden=config.hidden_size,
        layers=len(network.shapes),
        heads=heads,
        kv_heads=getattr(config, "num_key_value_heads", None) or heads,
        head_dim=getattr(config, "head_dim", None) or config.hidden_size // heads,
        intermediate=width * used,
        seq_len=seq_len,
        every_position=every_position,
    )
