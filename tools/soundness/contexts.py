"""What longer contexts change: a published model by ``seq_len``, honest and with smaller KV caches.

Each nonce reads more tokens, which an attention over rounded keys and values has more of, too. One
kernel is emulated for all nodes and for our own runs, and nothing is calibrated.
"""

import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
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


HEAD: Final = (
    *("tokens", "nonces tried", "seconds a nonce", "node", "distance", "footprint"),
    *("convicted", "cleared", "after"),
)


def rows(seq_len: int, progress: Progress) -> list[Sequence[str]]:
    """Of honest and cheating nodes on the first nonces of ``seq_len`` tokens. Raises EngineFault.

    Distances (L2) and footprints are means, footprints of cosines with our own run's errors.
    ``after`` says when 50 and 99.9 % of the verifications had ended.
    """
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
    own = f"{seq_len:,}", str(len(subject.judged)), f"{seconds:.1f}"
    return [(*own, name, *_judged(errors, ours, runs)) for name, errors in nodes.items()]


def _judged(errors: Vectors, ours: OwnRuns, runs: KeptRuns) -> list[str]:
    width = runs.work.scheme.width
    known = uncalibrated(KERNEL, width).expecting(ours.between_orders(KERNEL), width)
    shown = ours.figures(errors)
    node = node_figures(shown, ours.every, known, ours.measuring.lengths)
    ended = simulated(node, known, Chances().of_vectors(width), draws(len(node), RUNS, MOST))
    first = np.minimum(ended.convicted_at, ended.cleared_at)
    after = (ended.nonces_to(first, share) for share in (0.5, POWER))
    return [
        *(f"{shown.lengths.mean():.4f}", f"{shown.footprints[KERNEL].mean():.2f}"),
        *(f"{ended.convicted / RUNS:.1%}", f"{ended.cleared / RUNS:.1%}"),
        ", ".join("-" if each is None else str(each) for each in after),
    ]
