"""Which order a device's ``torch.topk`` gives to the dimensions that ``artifact-v1`` picks.

The network's code asks for the k largest negated hashes, unsorted, so the device decides their
order, and ``artifact-v1`` fixes the order that was read from NVIDIA's kernels (ADR 7). Here it is
compared with what the device does. If they differ, the rule that every row follows is named, and
rows are recorded from which anyone can derive another.
"""

import itertools
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from gpu.report import step_parser, write_record
from proofserve.protocol.draws import hash_keys, seed_bits
from proofserve.protocol.identity import Challenge, seed
from proofserve.protocol.network_schemes import pick, pick_by_score

# Hidden sizes of served models, and one beyond the single-block kernels.
HIDDEN_SIZES = (256, 1024, 2048, 4096, 5120, 8192, 16384)
K_DIMS = (1, 2, 12, 64)
# Rows of a batch, and whether each row has a call of its own, without a batch dimension: the
# network's code has done both.
CALLS = ((1, False), (32, False), (256, False), (32, True))
OURS = "cuda order (k-1 smallest by index, then the k-th)"
EXAMPLES = 5

# From indices in score order [rows, k] to the order that a device may give.
Rule = Callable[[Tensor], Tensor]


def _by_index(by_score: Tensor) -> Tensor:
    return by_score.sort(dim=1).values


def _last_first(by_score: Tensor) -> Tensor:
    """The k-th smallest first, then the others by index."""
    return torch.cat((by_score[:, -1:], _by_index(by_score[:, :-1])), dim=1)


# The orders that a top-k kernel has a reason to give, apart from ours.
RULES: Mapping[str, Rule] = {
    "by index": _by_index,
    "by score": lambda by_score: by_score,
    "by score, from the largest": lambda by_score: by_score.flip(1),
    "by index, from the largest": lambda by_score: _by_index(by_score).flip(1),
    "the k-th first, then by index": _last_first,
}


@dataclass(slots=True)
class Comparison:
    """What was seen of all rows so far: how many follow which rule, and rows that are not ours."""

    rows: int = 0
    other_sets: int = 0
    unstable: int = 0
    follow: dict[str, int] = field(default_factory=lambda: dict.fromkeys((OURS, *RULES), 0))
    shapes: list[dict[str, Any]] = field(default_factory=list)
    examples: list[dict[str, Any]] = field(default_factory=list)

    @property
    def corrected(self) -> str | None:
        """The one rule that every row follows; None if no rule, or more than one, does."""
        fitting = [name for name, count in self.follow.items() if count == self.rows]
        return OURS if OURS in fitting else fitting[0] if len(fitting) == 1 else None


def seeds_of(rows: int, k: int, start: int) -> list[int]:
    """Seeds as a round of ``artifact-v1`` has them, of the nonces from ``start`` on."""
    challenge = Challenge("pick-order", "key")
    return [seed(challenge.pick_string(nonce, k)) for nonce in range(start, start + rows)]


def scores_of(seeds: Sequence[int], hidden: int, device: torch.device) -> Tensor:
    """The network's scores: the hashes as int64 [rows, hidden], on ``device``."""
    keys = torch.arange(hidden, dtype=torch.int32, device=device)
    hashes = hash_keys(seed_bits(seeds, device), keys)
    return hashes.to(torch.int64) & 0xFFFFFFFF


def device_order(scores: Tensor, k: int, *, alone: bool) -> Tensor:
    """The device's order of the picked indices, int64 [rows, k]; ``alone``: a call for each row."""
    if alone:
        return torch.stack([device_order(row, k, alone=False) for row in scores])
    return torch.topk(-scores, k=k, largest=True, sorted=False).indices


def compare(found: Comparison, seeds: Sequence[int], hidden: int, k: int, order: Tensor) -> None:
    """Add the rows of ``order`` [rows, k] to ``found``. The truth is computed on the processor."""
    cpu, seen = torch.device("cpu"), order.cpu()
    ours, by_score = pick(seeds, hidden, k, cpu), pick_by_score(seeds, hidden, k, cpu)
    follows = {OURS: ours, **{name: rule(by_score) for name, rule in RULES.items()}}
    fits = {name: (seen == rows).all(dim=1) for name, rows in follows.items()}
    found.rows += len(seeds)
    found.other_sets += int((seen.sort(dim=1).values != _by_index(by_score)).any(dim=1).sum())
    for name, fit in fits.items():
        found.follow[name] += int(fit.sum())
    for row in (~fits[OURS]).nonzero()[:, 0].tolist()[: EXAMPLES - len(found.examples)]:
        found.examples.append(
            {
                "seed": seeds[row],
                "hidden": hidden,
                "device": seen[row].tolist(),
                "by_score": by_score[row].tolist(),
            }
        )


def measure(device: torch.device, rows: int) -> Comparison:
    """About ``rows`` rows of every shape. A batch is computed twice: the order must not change."""
    found, start = Comparison(), 0
    calls = [(batch, alone) for batch, alone in CALLS if batch <= rows]
    for hidden, k, (batch, alone) in itertools.product(HIDDEN_SIZES, K_DIMS, calls):
        before = found.follow[OURS], found.rows
        for _ in range(max(1, rows // (len(HIDDEN_SIZES) * len(K_DIMS) * batch))):
            seeds = seeds_of(batch, k, start)
            start += batch
            scores = scores_of(seeds, hidden, device)
            order = device_order(scores, k, alone=alone)
            again = device_order(scores, k, alone=alone)
            found.unstable += int((order != again).any(dim=1).sum())
            compare(found, seeds, hidden, k, order)
        of = {"hidden": hidden, "k": k, "batch": batch, "alone": alone}
        ours = found.follow[OURS] - before[0]
        found.shapes.append({**of, "rows": found.rows - before[1], "in_our_order": ours})
    return found


def main() -> int:
    """0 if every row has the order that ``artifact-v1`` defines, 1 if not."""
    parser = step_parser(__doc__)
    parser.add_argument("--device", required=True)
    parser.add_argument("--rows", type=int, default=4096)
    options = parser.parse_args()
    found = measure(torch.device(options.device), options.rows)
    differing = found.rows - found.follow[OURS]
    figures: dict[str, float | None] = {
        "rows": found.rows,
        "in_another_order": differing,
        "other_dimensions": found.other_sets,
        "not_repeatable": found.unstable,
    }
    setup = {"device": options.device, "torch": torch.__version__, "ours": OURS}
    proof = {"follow": found.follow, "corrected_order": found.corrected}
    windows = {**proof, "shapes": found.shapes, "examples": found.examples}
    failed = ["in_another_order"] if differing else []
    write_record(options.json, figures, setup=setup, windows=windows, failed=failed)
    print(_sentence(found, differing))
    return 1 if differing else 0


def _sentence(found: Comparison, differing: int) -> str:
    if not differing:
        return f"all {found.rows} rows have the order of artifact-v1"
    if found.corrected is None:
        return f"{differing} of {found.rows} rows have another order, by none of the known rules"
    return f"{differing} of {found.rows} rows differ; all follow: {found.corrected}"


if __name__ == "__main__":
    sys.exit(main())
