"""What a verdict, a calibration or an audit costs, before it computes: bytes, memory, time.

A verdict is planned as of an honest node, by the tests themselves. Of layers only the sizes are
read, from the headers of files or from the configuration. How fast this machine computes a
checkpoint is measured in about a second, without its weights.
"""

import math
import os
import resource
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing, suppress
from dataclasses import dataclass, replace
from functools import partial
from mmap import mmap
from pathlib import Path
from time import perf_counter
from typing import Any, Final

import numpy as np
import torch
from torch import nn

from proofserve.engines.checkpoints import digest_is_kept
from proofserve.engines.reference.checkpoint import LayeredCheckpoint
from proofserve.engines.reference.engine import require_length
from proofserve.engines.reference.forward import NetworkForward, last_states
from proofserve.engines.reference.network import Network
from proofserve.engines.reference.routing import has_stacked_experts
from proofserve.engines.reference.suspects import FP8_CACHE, rounding_of
from proofserve.host import GIB, memory_gib
from proofserve.protocol.verdict.directions import Footprint
from proofserve.rounds.computation import chunks
from proofserve.rounds.records import Workload
from proofserve.verifier.judges import PUBLISHED, BankRun
from proofserve.verifier.judging import COUNT, DIRECTION, JudgingOptions, tests_of
from proofserve.verifier.noise import AT_ONCE, MeasuringPlan
from proofserve.verifier.validator import CheckpointValidator, ValidatorSetup, size_of
from proofserve.verifier.verification import group_size

# Runs of a pass through the layers, and of how many nonces each is.
Pass = Mapping[BankRun, int]

FLOAT32: Final = 4
_OWN_RUNS: Final = "own runs"
# Of an emulated kernel, as on a published model of 30 layers.
_OF_A_SKETCH: Final = Footprint(0.6, 0.1)
# How many experts a token has, in the names of configurations.
_CHOSEN: Final = ("num_experts_per_tok", "moe_topk", "moe_k")
# Tensors of the widest matrix's output that an MLP has in memory at a time.
_WIDE_TENSORS: Final = 4
# A layer of at most so many bytes in float32 is timed itself, a larger one by bare products.
_TIMED_LAYER: Final = 2**28
# Operations of the forward that is timed, and its positions at most.
_TIMED_OPERATIONS, _TIMED_POSITIONS = 2e10, 1024
_PRODUCT: Final = 2048
# Numbers that are rounded to be timed, in rows of so many, and those that are converted.
_ROUNDED, _ROW = 2**20, 1024
_FILLED: Final = 2**24
# Bytes that are read to be timed, so many at once, and the seconds after which that ends.
_READ, _AT_ONCE, _READ_S = 2**28, 2**24, 0.5
_TORCH: Final = Path(torch.__file__).parent / "lib"


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

    def read_bytes(self, *, cached: bool) -> int:
        """In all passes; layers count once where they stay in memory, or the system's cache."""
        often, others = 1 if cached or self.kept else len(self.passes), self.others or {}
        of_others = sum(others.get(run.weights or "", 0) for run, _ in self.every_run)
        return often * self.pass_bytes + of_others

    @property
    def every_run(self) -> list[tuple[BankRun, int]]:
        """Those of every pass, and of how many nonces each is."""
        return [pair for each in self.passes for pair in each.items()]

    @property
    def runs(self) -> Mapping[str, int]:
        """The nonces of each kind of run."""
        found = Counter[str]()
        for run, nonces in self.every_run:
            found[_kind(run)] += nonces
        return found

    def operations(self, nonces: int) -> float:
        """Multiplications and additions of one run of ``nonces``."""
        of_token = sum(each.multiplied + each.attended * self.seq_len for each in self.layers)
        return 2.0 * nonces * self.sequences * self.seq_len * of_token

    @property
    def layer_memory(self) -> int:
        """Bytes of the largest layer in float32, and of a changed copy of it or what fills it."""
        whole = max(each.weights for each in self.layers)
        stacked = max(each.stacked for each in self.layers)
        changed = any(run.weights for run, _ in self.every_run)
        # Experts are read one by one, and then stacked.
        return FLOAT32 * (whole + max(whole if changed else 0, stacked))

    @property
    def state_memory(self) -> int:
        """Bytes of the states of all runs of a pass, and of what a forward makes in a layer."""
        nonces = max(sum(each.values()) for each in self.passes)
        widest = max(each.widest for each in self.layers)
        in_layer = self.forward_batch * (_WIDE_TENSORS * widest + 2 * self.hidden)
        return FLOAT32 * self.sequences * self.seq_len * (nonces * self.hidden + in_layer)

    def seconds(self, rates: Rates, *, cached: bool = False) -> dict[str, float]:
        """Of each kind of work. ``cached``: the system keeps what was read once."""
        emulated = sum(nonces for run, nonces in self.every_run if run.kernels is not None)
        exact = sum(self.runs.values()) - emulated
        weights = sum(each.weights for each in self.layers)
        filled = weights * len(self.passes)
        # Of each suspect in each pass all numbers are rounded.
        others = {None, FP8_CACHE, *(self.others or {})}
        rounded = weights * sum(run.weights not in others for run, _ in self.every_run)
        return {
            "products": self.operations(exact) / rates.products
            + self.operations(emulated) / rates.emulated,
            "rounding suspects": rounded / rates.rounded,
            "reading": self.read_bytes(cached=cached) / rates.read
            + (0.0 if self.kept else filled / rates.filled),
        }

    def lines(self, rates: Rates, *, cached: bool, in_use: int, hashed: int = 0) -> Iterator[str]:
        """The plan in words; ``hashed`` bytes are read once for the digest of the weights."""
        runs = self.runs
        # Those whose true vectors are computed.
        nonces = sum(each.get(PUBLISHED, 0) for each in self.passes)
        yield (
            f"plan: {nonces} {self.about} ({self.sequences * self.seq_len} tokens each),"
            f" in {len(self.passes)} passes through {len(self.layers)} layers"
        )
        often = "once" if self.kept else f"in each of {len(self.passes)} passes"
        cache = ", later from memory" if cached and not self.kept else ""
        digest = f", and {_bytes(hashed)} once for the weights' digest" if hashed else ""
        yield f"plan: reads {_bytes(self.pass_bytes)} {often}{cache}{digest}"
        names = Counter(map(_kind, {run for run, _ in self.every_run}))
        several = {kind: f" (of {count})" for kind, count in names.items() if count > 1}
        kinds = (f"{kind} {runs[kind]}{several.get(kind, '')}" for kind in runs)
        yield f"plan: forwards of a nonce: {', '.join(kinds)}"
        yield f"plan: {self.operations(sum(runs.values())) / 1e12:,.2f} TFLOP in float32"
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
    return "truth" if run == PUBLISHED else _OWN_RUNS


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
    chances, typical = options.chances(), np.array([_OF_A_SKETCH.mean])
    gain = _OF_A_SKETCH.log_clearing(typical, chances.share, chances.kept).min()
    needed = min(sample, math.ceil(chances.clears_at / gain))
    passes, done = list[Pass](), 0
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


def measured_rates(plan: CostPlan, network: Callable[[BankRun], Network], folder: Path) -> Rates:
    """The rates of ``plan``. ``network`` gives what computes a run, the files are in ``folder``."""
    published = network(PUBLISHED)
    if FLOAT32 * plan.layers[0].weights <= _TIMED_LAYER:
        layer = published.checkpoint.of_one_layer()
        exact_rate = _layer_rate(plan, published, layer, _TIMED_OPERATIONS)
        emulated_rate = _emulated_rate(plan, network, layer) or exact_rate
    else:
        matrix = torch.randn(_PRODUCT, _PRODUCT, device=published.device)
        seconds = _seconds(partial(torch.mm, matrix, matrix), published.device)
        exact_rate = emulated_rate = 2 * _PRODUCT**3 / seconds
    stored = torch.ones(_FILLED, dtype=torch.bfloat16)
    # As a layer is: read into memory that the process did not have, and converted into more of it.
    filling = _seconds(lambda: stored.clone().float(), stored.device)
    return Rates(
        exact_rate,
        emulated_rate,
        # Where the checkpoint is not there yet, the disk of torch's own files stands for its disk.
        disk_rate(sorted(folder.glob("*.safetensors")) or sorted(_TORCH.glob("*.so"))),
        _FILLED / filling,
        _rounding_rate(plan, published.device),
    )


def _emulated_rate(
    plan: CostPlan, network: Callable[[BankRun], Network], layer: LayeredCheckpoint
) -> float | None:
    """Of all forwards in emulated kernels, some of which are slow; None for a plan without any."""
    nonces = Counter[BankRun]()
    for run, count in plan.every_run:
        if _kind(run) == _OWN_RUNS:
            nonces[run] += count
    operations = _TIMED_OPERATIONS / max(1, len(nonces))
    rates = (_layer_rate(plan, network(run), layer, operations) for run in nonces)
    seconds = sum(count / rate for count, rate in zip(nonces.values(), rates, strict=True))
    return nonces.total() / seconds if nonces else None


@torch.inference_mode()
def _layer_rate(
    plan: CostPlan, network: Network, layer: LayeredCheckpoint, operations: float
) -> float:
    """Operations a second of a batch in ``layer``, of about so many ``operations``."""
    positions = min(plan.seq_len, _TIMED_POSITIONS)
    alone = replace(plan, layers=plan.layers[:1], seq_len=positions)
    nonces = max(1, min(plan.forward_batch, int(operations / alone.operations(1))))
    shape = (nonces * plan.sequences, positions, plan.hidden)
    forward = NetworkForward(
        replace(network, checkpoint=layer, changes=()), [torch.randn(shape, device=network.device)]
    )
    last_states([forward])
    forward.seconds = 0.0
    last_states([forward])
    return alone.operations(nonces) / forward.seconds


def _rounding_rate(plan: CostPlan, device: torch.device) -> float:
    """Of a suspect that the plan has, on average."""
    values, taken = torch.randn(_ROUNDED // _ROW, _ROW, device=device), list[float]()
    for name in {run.weights for run, _ in plan.every_run if run.weights}:
        # Other checkpoints and caches round no weights.
        with suppress(KeyError):
            rounding = rounding_of(name)
            taken.append(_seconds(partial(rounding, values), device))
    return _ROUNDED * len(taken) / sum(taken) if taken else float("inf")


def _seconds(call: Callable[[], object], device: torch.device) -> float:
    """Of the quickest of three calls; the first one warms the device up."""
    taken = []
    for _ in range(3):
        began = perf_counter()
        call()
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        taken.append(perf_counter() - began)
    return min(taken)


def disk_rate(files: Sequence[Path]) -> float:
    """Bytes a second that the disk gives of ``files``, past the pages that the system keeps."""
    done, began = 0, perf_counter()
    for file in files:
        most, until = _READ - done, began + _READ_S
        try:
            done += _read(file, getattr(os, "O_DIRECT", 0), most, until)
        except OSError:
            # This file system cannot read past the cache.
            done += _read(file, 0, most, until)
    return done / (perf_counter() - began)


def _read(file: Path, flags: int, most: int, until: float) -> int:
    """Read up to ``most`` bytes of ``file`` and return how many; stop at the time ``until``."""
    done, descriptor = 0, os.open(file, os.O_RDONLY | flags)
    # Direct reads need a buffer at the border of a page.
    with os.fdopen(descriptor, "rb", 0), closing(mmap(-1, _AT_ONCE)) as buffer:
        while done < most and perf_counter() < until:
            done += (got := os.preadv(descriptor, [buffer], done))
            if got < _AT_ONCE:
                break
    return done


def plan_lines(
    setup: ValidatorSetup,
    work: Workload,
    forward_batch: int,
    passes_of: Callable[[CheckpointValidator], Sequence[Pass]],
    about: str,
) -> Iterator[str]:
    """What passes with nonces of ``work`` cost; no weights are read or needed, nothing is written.

    Raises CheckpointError, EngineFault for too long sequences, and as ``passes_of``.
    """
    validator = CheckpointValidator(replace(setup, unread=True))
    require_length(work, validator.published)
    checkpoint = validator.published.checkpoint
    sizes = (
        layer_size(layer, checkpoint.config, checkpoint.stored_bytes(index))
        for index, layer in enumerate(checkpoint.shapes)
    )
    plan = CostPlan(
        tuple(sizes),
        checkpoint.config.hidden_size,
        passes_of(validator),
        about,
        work.scheme.sequences_per_nonce,
        work.seq_len,
        forward_batch,
        checkpoint.stays_in_memory,
        {each.name: size_of(each) for each in setup.suspects},
    )
    yield from plan.lines(
        measured_rates(plan, validator.network, setup.model),
        cached=2 * plan.pass_bytes < memory_gib()[1] * GIB,
        in_use=resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024,
        hashed=0 if digest_is_kept(setup.model) else size_of(setup.model) or plan.pass_bytes,
    )
