"""What a verdict, a calibration or an audit costs, before it computes: bytes, memory, time.

A verdict is planned as of an honest node, by the tests themselves. Of layers only the sizes are
read, from the headers of files or from the configuration.
"""

import math
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Final

import numpy as np
from torch import nn

from proofserve.engines.reference.routing import has_stacked_experts
from proofserve.engines.reference.suspects import FP8_CACHE
from proofserve.protocol.verdict.footprint import emulated_footprint
from proofserve.rounds.computation import chunks
from proofserve.verifier.judges import PUBLISHED, BankRun
from proofserve.verifier.judging import COUNT, DIRECTION, JudgingOptions, tests_of
from proofserve.verifier.noise import AT_ONCE, MeasuringPlan
from proofserve.verifier.verification import group_size

# Runs of a pass through the layers, and of how many nonces each is.
Pass = Mapping[BankRun, int]

FLOAT32: Final = 4
# As alike as two orders of sums were in three real models.
_OF_A_SKETCH: Final = emulated_footprint(128, [0.6])
# How many experts a token has, in the names of configurations.
_CHOSEN: Final = ("num_experts_per_tok", "moe_topk", "moe_k")
# Tensors of the widest matrix's output that an MLP has in memory at a time.
_WIDE_TENSORS: Final = 4


@dataclass(frozen=True, slots=True)
class LayerSize:
    """Of one layer: the bytes of its files, its numbers, and those that one token multiplies.

    ``attended`` are a token's multiplications for each position, ``stacked`` the numbers of the
    largest stack of experts, ``widest`` those that the widest matrix gives for a token.
    """

    stored: int
    weights: int
    multiplied: int
    attended: int
    stacked: int
    widest: int


def layer_size(layer: nn.Module, config: Any, stored: int) -> LayerSize:
    """The size of ``layer``, a module without weights that ``stored`` bytes fill."""
    chosen = next((n for each in _CHOSEN if (n := getattr(config, each, None))), 1)
    multiplied = stacked = widest = 0
    for module in layer.modules():
        experts = has_stacked_experts(module)
        for weight in module.parameters(recurse=False):
            if weight.ndim < 2:
                continue
            among = len(weight) if experts else 1
            multiplied += weight.numel() * min(chosen, among) // among
            stacked = max(stacked, weight.numel() if experts else 0)
            widest = max(widest, max(weight.shape[-2:]) * min(chosen, among))
    weights = sum(weight.numel() for weight in layer.parameters())
    # A head's numbers in a key and in a value.
    keys = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    if (values := getattr(config, "v_head_dim", None)) is not None:
        keys = config.qk_nope_head_dim + config.qk_rope_head_dim
    attended = int((keys + (keys if values is None else values)) * config.num_attention_heads)
    return LayerSize(stored, weights, multiplied, attended, stacked, widest)


@dataclass(frozen=True, slots=True)
class Rates:
    """How fast a machine is: operations a second in exact arithmetic and in emulated kernels.

    ``read`` is in bytes a second from the disk, ``filled`` in numbers a second that a layer is
    filled with, ``rounded`` in numbers a second of a suspect.
    """

    products: float
    emulated: float
    read: float
    filled: float
    rounded: float


@dataclass(frozen=True, slots=True)
class CostPlan:
    """Passes through the layers; ``sequences`` are those of one nonce.

    ``about`` says what its nonces are for. ``kept`` says that layers stay in memory once they were
    read. ``others`` are the bytes of suspects that are checkpoints.
    """

    layers: Sequence[LayerSize]
    hidden: int
    passes: Sequence[Pass]
    about: str
    sequences: int
    seq_len: int
    forward_batch: int
    kept: bool = False
    others: Mapping[str, int] | None = None

    @property
    def pass_bytes(self) -> int:
        return sum(each.stored for each in self.layers)

    @property
    def read_bytes(self) -> int:
        """In all passes."""
        often = 1 if self.kept else len(self.passes)
        others = (self.others or {}).get
        runs = (run.weights for each in self.passes for run in each)
        return often * self.pass_bytes + sum(others(name or "", 0) for name in runs)

    @property
    def nonces(self) -> int:
        """Those whose true vectors are computed."""
        return sum(each.get(PUBLISHED, 0) for each in self.passes)

    @property
    def runs(self) -> Mapping[str, int]:
        """The nonces of each kind of run."""
        found = Counter[str]()
        for each in self.passes:
            for run, nonces in each.items():
                found[_kind(run)] += nonces
        return found

    def operations(self, nonces: int) -> float:
        """Multiplications and additions of one run of ``nonces``."""
        of_token = sum(each.multiplied + each.attended * self.seq_len for each in self.layers)
        return 2.0 * nonces * self.sequences * self.seq_len * of_token

    @property
    def all_operations(self) -> float:
        return self.operations(sum(self.runs.values()))

    @property
    def rounded_weights(self) -> int:
        """The numbers that are rounded: of each suspect in each pass all."""
        others = {None, FP8_CACHE, *(self.others or {})}
        suspects = sum(run.weights not in others for each in self.passes for run in each)
        return suspects * sum(each.weights for each in self.layers)

    @property
    def layer_memory(self) -> int:
        """Bytes of the largest layer in float32, and of a changed copy of it or what fills it."""
        whole = max(each.weights for each in self.layers)
        stacked = max(each.stacked for each in self.layers)
        changed = any(run.weights for each in self.passes for run in each)
        # Experts are read one by one, and then stacked.
        return FLOAT32 * (whole + max(whole if changed else 0, stacked))

    @property
    def state_memory(self) -> int:
        """Bytes of the states of all runs of a pass, and of what a forward makes in a layer."""
        tokens = self.sequences * self.seq_len
        nonces = max(sum(each.values()) for each in self.passes)
        widest = max(each.widest for each in self.layers)
        in_layer = self.forward_batch * (_WIDE_TENSORS * widest + 2 * self.hidden)
        return FLOAT32 * tokens * (nonces * self.hidden + in_layer)

    def seconds(self, rates: Rates, *, cached: bool = False) -> dict[str, float]:
        """Of each kind of work. ``cached``: the system keeps what was read once."""
        every = [pair for each in self.passes for pair in each.items()]
        emulated = sum(nonces for run, nonces in every if run.kernels is not None)
        exact = sum(self.runs.values()) - emulated
        filled = sum(each.weights for each in self.layers) * len(self.passes)
        often = 1 if cached or self.kept else len(self.passes)
        later = self.read_bytes - (1 if self.kept else len(self.passes)) * self.pass_bytes
        return {
            "products": self.operations(exact) / rates.products
            + self.operations(emulated) / rates.emulated,
            "rounding suspects": self.rounded_weights / rates.rounded,
            "reading": (often * self.pass_bytes + later) / rates.read
            + (0.0 if self.kept else filled / rates.filled),
        }

    def lines(self, rates: Rates, *, cached: bool, in_use: int, hashed: int = 0) -> Iterator[str]:
        """The plan in words; ``hashed`` bytes are read once for the digest of the weights."""
        runs = self.runs
        yield (
            f"plan: {self.nonces} {self.about} ({self.sequences * self.seq_len} tokens each),"
            f" in {len(self.passes)} passes through {len(self.layers)} layers"
        )
        often = "once" if self.kept else f"in each of {len(self.passes)} passes"
        cache = ", later from memory" if cached and not self.kept else ""
        digest = f", and {_bytes(hashed)} once for the weights' digest" if hashed else ""
        yield f"plan: reads {_bytes(self.pass_bytes)} {often}{cache}{digest}"
        names = Counter(_kind(run) for run in {run for each in self.passes for run in each})
        several = {kind: f" (of {count})" for kind, count in names.items() if count > 1}
        kinds = (f"{kind} {runs[kind]}{several.get(kind, '')}" for kind in runs)
        yield f"plan: forwards of a nonce: {', '.join(kinds)}"
        yield f"plan: {self.all_operations / 1e12:,.2f} TFLOP in float32"
        yield (
            f"plan: memory {_bytes(in_use + self.layer_memory + self.state_memory)} at most: in use"
            f" now {_bytes(in_use)}, the largest layer and its copy {_bytes(self.layer_memory)},"
            f" states {_bytes(self.state_memory)}"
        )
        parts = self.seconds(rates, cached=cached)
        shown = (f"{name} {duration(each)}" for name, each in parts.items())
        yield (
            f"plan: about {duration(sum(parts.values()))} on this machine: {', '.join(shown)}"
            f" ({rates.products / 1e9:,.0f} GFLOP/s, {rates.read / 1e9:,.2f} GB/s)"
        )


def _kind(run: BankRun) -> str:
    if run.weights is not None:
        return "suspects"
    return "truth" if run == PUBLISHED else "own runs"


def _bytes(count: float) -> str:
    return f"{count / 1e9:,.2f} GB" if count < 1e11 else f"{count / 1e9:,.0f} GB"


def duration(seconds: float) -> str:
    """In the unit that a reader takes for so long."""
    if seconds < 100:
        return f"{seconds:.0f} s" if seconds >= 10 else f"{seconds:.1f} s"
    return f"{seconds / 60:.0f} min" if seconds < 6000 else f"{seconds / 3600:,.1f} h"


def expected_passes(
    options: JudgingOptions, sample: int, bank: tuple[Sequence[str], Sequence[str]], at_once: int
) -> list[Pass]:
    """The passes until an honest node is cleared; ``bank`` has suspects and references.

    Raises as ``tests_of``.
    """
    suspects, served = bank
    tests = tests_of(options, suspects, trusts_nodes=False)
    references = [BankRun(kernels=name) for name in served if {*tests} != {COUNT}]
    # In the end only one is run, in two orders; the first nonces choose it among several.
    one = [*references[:1], *(replace(each, order=0) for each in references[:1])]
    again = one[1:] if len(references) > 1 else []
    references = references if again else one
    # Without a calibration a nonce says how far each suspect reaches.
    unknown = suspects if DIRECTION in tests and options.calibration is None else ()
    chances = options.chances()
    typical = np.array([_OF_A_SKETCH.mean])
    gain = _OF_A_SKETCH.log_clearing(typical, chances.share, chances.kept).min()
    needed = min(sample, math.ceil(chances.clears_at / gain))
    passes: list[Pass] = []
    done = 0
    while done < needed:
        nonces = min(sample - done, group_size(done, at_once))
        measured = {BankRun(name): 1 for name in unknown}
        passes.append({PUBLISHED: nonces, **dict.fromkeys(references, nonces), **measured})
        if again:
            passes.append(dict.fromkeys(again, nonces))
        references, again, unknown = one, [], ()
        done += nonces
    return passes


# Suspects, emulated kernels, and those of the kernels that a run is judged beside.
BankNames = tuple[Sequence[str], Sequence[str], Sequence[str]]


def measuring_passes(plan: MeasuringPlan, bank: BankNames) -> list[Pass]:
    """The passes of a calibration."""
    names, kernels, references = bank
    first, few = len(plan.nonces[: plan.bank]), len(plan.nonces[: plan.emulated])
    passes: list[Pass] = [{PUBLISHED: len(plan.nonces)}]
    passes += [{BankRun(name): first} for name in names if first]
    for kernel in kernels:
        nonces = len(plan.nonces) if kernel in references else few
        passes += _in_parts(BankRun(kernels=kernel), nonces)
    return passes


def audit_passes(nonces: int, bank: BankNames, attacks: Sequence[str]) -> list[Pass]:
    """At most the passes of an audit: some ``attacks`` compute less than a whole forward."""
    names, kernels, _ = bank
    # The validator's own run is of a prover's kernel, and adds up in two other orders.
    own = [BankRun(kernels=kernels[0], order=order) for order in range(2)]
    honest = [PUBLISHED, *own, *(BankRun(kernels=each) for each in kernels)]
    cheats = [BankRun(each, kernels[0]) for each in attacks]
    predicted: list[Pass] = [{BankRun(name): nonces} for name in names]
    return predicted + [each for run in (*honest, *cheats) for each in _in_parts(run, nonces)]


def _in_parts(run: BankRun, nonces: int) -> list[Pass]:
    return [{run: len(part)} for part in chunks(range(nonces), AT_ONCE)]
