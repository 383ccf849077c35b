"""What a verification costs, known before it computes: bytes, operations, memory, time.

It is planned as of an honest node, by the tests themselves, and by the sizes of layers, of which
only the headers of files are read.
"""

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from torch import nn

from proofserve.engines.reference.routers import has_stacked_experts
from proofserve.engines.reference.suspects import FP8_CACHE
from proofserve.verifier.direction import REACH_NONCES
from proofserve.verifier.judges import PUBLISHED, BankRun
from proofserve.verifier.judging import COUNT, DIRECTION, JudgingOptions, tests_of
from proofserve.verifier.verification import FIRST_CHUNK, nonces_needed

# Runs of a pass through the layers, and of how many nonces each is.
Pass = Mapping[BankRun, int]

FLOAT32: Final = 4
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
class VerificationPlan:
    """The passes of a verification of an honest node; ``sequences`` are those of one nonce.

    ``kept`` says that layers stay in memory once they were read. ``others`` are the bytes of
    suspects that are checkpoints. ``sample`` is the most nonces that are recomputed.
    """

    layers: Sequence[LayerSize]
    hidden: int
    passes: Sequence[Pass]
    sample: int
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
        return sum(each[PUBLISHED] for each in self.passes)

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
        runs = self.runs
        emulated = runs["own runs"]
        filled = sum(each.weights for each in self.layers) * len(self.passes)
        often = 1 if cached or self.kept else len(self.passes)
        later = self.read_bytes - (1 if self.kept else len(self.passes)) * self.pass_bytes
        return {
            "products": self.operations(runs["truth"] + runs["suspects"]) / rates.products
            + self.operations(emulated) / rates.emulated,
            "rounding suspects": self.rounded_weights / rates.rounded,
            "reading": (often * self.pass_bytes + later) / rates.read
            + (0.0 if self.kept else filled / rates.filled),
        }

    def lines(self, rates: Rates, *, cached: bool, in_use: int, hashed: int = 0) -> Iterator[str]:
        """The plan in words; ``hashed`` bytes are read once for the digest of the weights."""
        runs = self.runs
        yield (
            f"plan: {self.nonces} of {self.sample} nonces until an honest node is cleared"
            f" ({self.sequences * self.seq_len} tokens each), in {len(self.passes)} passes through"
            f" {len(self.layers)} layers"
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
    tests = tests_of(options, suspects)
    references = [BankRun(kernels=name) for name in served if {*tests} != {COUNT}]
    # Without a calibration a few nonces say how far each suspect reaches.
    unknown = suspects if DIRECTION in tests and options.calibration is None else ()
    needed = min(sample, nonces_needed(options.chances(sample)) + 1)
    passes: list[Pass] = []
    done, size = 0, min(FIRST_CHUNK, at_once)
    while done < needed:
        nonces = min(sample - done, size)
        measured = {BankRun(name): min(nonces, REACH_NONCES) for name in unknown}
        passes.append({PUBLISHED: nonces, **dict.fromkeys(references, nonces), **measured})
        # The first nonces choose one of the references.
        references, unknown = references[:1], ()
        done, size = done + nonces, min(2 * size, at_once)
    return passes
