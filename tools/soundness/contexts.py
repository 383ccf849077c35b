"""What longer contexts change: a published model by ``seq_len``, honest and with smaller KV caches.

Each nonce reads more tokens, which an attention over rounded keys and values has more of, too. One
kernel is emulated for all nodes and for our own runs, and nothing is calibrated.
"""

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Final

import numpy as np

from proofserve.engines.reference.suspects import FP8_CACHE
from proofserve.models.trained import SMOLLM2
from proofserve.protocol import SKETCH_2
from proofserve.reports import Progress
from proofserve.verifier.judges import BankRun, Chances, Vectors
from proofserve.verifier.populations import uncalibrated
from proofserve.verifier.simulation import draws, node_figures, simulated
from soundness.runs import KeptRuns
from soundness.subjects import BY_NAME
from soundness.trying import POWER, OwnRuns

# Nonces by ``seq_len``: as many as some minutes allow on two cores.
NONCES: Final[Mapping[int, int]] = {256: 24, 1024: 12, 4096: 5}
CHEATS: Final = (FP8_CACHE, "KV cache in int8")
# The bank has no other of these, so only the footprint speaks against it.
SUSPECTS: Final = (FP8_CACHE,)
KERNEL: Final = "vLLM on x86 with bfloat16"
RUNS, MOST = 10_000, 1000


@dataclass(frozen=True, slots=True)
class Node:
    """``weights`` or cache of a node, "honest" for the published ones.

    ``distance`` (L2) and ``footprint`` are a mean error and its mean cosine with our own run's.
    ``ended`` counts verifications by how they end, ``after`` says when 50 and 99.9 % of them did.
    """

    weights: str
    distance: float
    footprint: float
    convicted: int
    cleared: int
    after: tuple[int | None, int | None]


@dataclass(frozen=True, slots=True)
class Context:
    """``seconds`` are those of a nonce in float32; None if it was computed before."""

    seq_len: int
    nonces: int
    seconds: float
    nodes: Sequence[Node]


def tried_context(seq_len: int, progress: Progress) -> Context:
    """Honest and cheating nodes on the first nonces of ``seq_len`` tokens. Raises EngineFault."""
    at_once = max(1, 1024 // seq_len)
    subject = replace(
        BY_NAME[SMOLLM2.name], seq_len=seq_len, nonces=NONCES[seq_len], at_once=at_once
    )
    runs = KeptRuns(subject, SKETCH_2, kernels=(KERNEL,), names=SUSPECTS)
    progress.step(f"{seq_len} tokens", 5 + len(SUSPECTS) + len(CHEATS))

    def made(vectors: Vectors) -> Vectors:
        progress.advance()
        return vectors

    began = time.monotonic()
    made(runs.truth(subject.judged))
    seconds = (time.monotonic() - began) / len(subject.judged)
    honest, one, again = (
        made(runs.errors(BankRun(kernels=KERNEL, order=order), subject.judged))
        for order in (None, 1, 2)
    )
    nodes = {"honest": honest}
    for name in CHEATS:
        nodes[name] = made(runs.cheat_errors(BankRun(name, KERNEL), subject.judged))
    predicted = {name: made(runs.predictions(name, subject.judged)) for name in SUSPECTS}
    ours = OwnRuns(subject.judged, {KERNEL: one}, {KERNEL: again}, predicted)
    found = [_judged(name, errors, ours, runs) for name, errors in nodes.items()]
    return Context(seq_len, len(subject.judged), seconds, found)


def _judged(name: str, errors: Vectors, ours: OwnRuns, runs: KeptRuns) -> Node:
    width = runs.work.scheme.width
    known = uncalibrated(KERNEL, width).expecting(ours.twins(KERNEL), width)
    shown = ours.figures(errors)
    node = node_figures(shown, ours.every, known, ours.measuring.lengths)
    ended = simulated(node, known, Chances().of_vectors(width), draws(len(node), RUNS, MOST))
    first = np.minimum(ended.convicted_at, ended.cleared_at)
    return Node(
        weights=name,
        distance=float(shown.lengths.mean()),
        footprint=float(shown.footprints[KERNEL].mean()),
        convicted=ended.convicted,
        cleared=ended.cleared,
        after=(ended.nonces_to(first, 0.5), ended.nonces_to(first, POWER)),
    )


HEAD: Final = (
    "| tokens | nonces tried | seconds a nonce | node | distance | footprint |"
    f" convicted | cleared | after |\n|{' --- |' * 9}"
)


def rows(context: Context) -> str:
    """Those below ``HEAD``."""
    lines = []
    for node in context.nodes:
        after = ", ".join("-" if each is None else str(each) for each in node.after)
        lines.append(
            f"| {context.seq_len:,} | {context.nonces} | {context.seconds:.1f} | {node.weights}"
            f" | {node.distance:.4f} | {node.footprint:.2f} | {node.convicted / RUNS:.1%}"
            f" | {node.cleared / RUNS:.1%} | {after} |"
        )
    return "\n".join(lines)
