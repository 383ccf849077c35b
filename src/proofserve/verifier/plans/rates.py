"""How fast this machine computes a checkpoint: measured in about a second, without its weights."""

import os
import resource
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, suppress
from dataclasses import replace
from functools import partial
from mmap import mmap
from pathlib import Path
from time import perf_counter
from typing import Final

import torch

from proofserve.engines.checkpoints import digest_is_kept
from proofserve.engines.reference.checkpoint import LayeredCheckpoint
from proofserve.engines.reference.engine import require_length
from proofserve.engines.reference.forward import NetworkForward, last_states
from proofserve.engines.reference.network import Network
from proofserve.engines.reference.suspects import rounding_of
from proofserve.host import GIB, memory_gib
from proofserve.rounds.records import Workload
from proofserve.verifier.judges import PUBLISHED, BankRun
from proofserve.verifier.plans.costs import FLOAT32, CostPlan, Pass, Rates, layer_size
from proofserve.verifier.validator import CheckpointValidator, ValidatorSetup, size_of

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
    for each in plan.passes:
        emulated = (run for run in each if run.kernels is not None and run.weights is None)
        nonces.update({run: each[run] for run in emulated})
    operations = _TIMED_OPERATIONS / max(1, len(nonces))
    rates = {run: _layer_rate(plan, network(run), layer, operations) for run in nonces}
    seconds = sum(count / rates[run] for run, count in nonces.items())
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
    names = {run.weights for each in plan.passes for run in each if run.weights}
    values = torch.randn(_ROUNDED // _ROW, _ROW, device=device)
    taken = []
    for name in names:
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
    plan = CostPlan(
        tuple(
            layer_size(layer, checkpoint.config, checkpoint.stored_bytes(index))
            for index, layer in enumerate(checkpoint.shapes)
        ),
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
