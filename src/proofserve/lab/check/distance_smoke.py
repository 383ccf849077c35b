"""Smoke checks of the distance protocol: distances are valid, a round stores its winners only."""

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from statistics import median

from proofserve.lab.check.checks import Check, Reporter
from proofserve.lab.client.node_client import NodeClient, wait_until
from proofserve.lab.client.records import DistanceWork, NodeStatus
from proofserve.protocol.distance import is_winner
from proofserve.rounds.records import Winner

NONCES = range(12)
# The diameter of a sphere of radius 1, and the rounding error of a float32.
LARGEST = 2.0 + 1e-6
# Distances have a standard deviation of 0.008, so the median difference of unrelated ones is 0.007.
UNRELATED = 5e-4
# About a third of the nonces win, so that a round has winners and others.
R_TARGET = 1.41
# How many of the round's nonces are computed again.
RECOMPUTED = 64
ROUND_S = 60.0
STATES = ("IDLE", "GENERATING", "VALIDATING", "STOPPED")


@dataclass(frozen=True, slots=True)
class ObservedRound:
    """What one round showed from its configuration to its end.

    ``counted`` is the node's status after it stopped generating, ``winners`` holds the distance of
    each stored nonce, and ``computed`` the recomputed distances of the round's first nonces.
    """

    states: tuple[str, ...]
    counted: NodeStatus
    winners: Mapping[int, float]
    computed: Mapping[int, float]


def distance_smoke(node: NodeClient, work: DistanceWork, report: Reporter) -> None:
    """Report the checks of the distance protocol. Raises NodeError if the node refuses a call."""
    ours = _distances(node, work, NONCES)
    report(_valid(ours))
    again = _distances(node, replace(work, batch_size=5), reversed(NONCES))
    detail = "computed again in reverse order and in other batches"
    report(Check("the same nonce gives the same distance", again == ours, detail))
    for what, other in (
        ("another key", replace(work, public_key="another key")),
        ("another block", replace(work, block_hash="another block")),
    ):
        report(_others(what, ours, _distances(node, other, NONCES)))
    seen = observe_round(node, replace(work, r_target=R_TARGET))
    report(_counts(seen))
    report(_below_target(seen))
    report(_complete(seen))
    states = ", then ".join(seen.states)
    report(Check("a distance round reports its states", seen.states == STATES, states))


def observe_round(node: NodeClient, work: DistanceWork) -> ObservedRound:
    after = node.last_seq()
    states = []
    node.init(work)
    try:
        states.append(node.status().state)
        node.phase_generate()
        states.append(node.status().state)
        wait_until(lambda: _has_enough(node.status()), "first winners of a round", ROUND_S)
        node.phase_validate()
        counted = node.status()
        rows = [row for row in node.results(after) if row.round_id == counted.round_id]
        computed = _recomputed(node, work, counted.tried()[:RECOMPUTED])
    finally:
        node.stop()
    states += [counted.state, node.status().state]
    winners = {row.nonce: row.distance for row in rows if row.distance is not None}
    return ObservedRound(tuple(states), counted, winners, computed)


def _has_enough(status: NodeStatus) -> bool:
    return status.processed >= RECOMPUTED and status.found > 0


def _distances(node: NodeClient, work: DistanceWork, nonces: Iterable[int]) -> Mapping[int, float]:
    with node.judging(work):
        return _recomputed(node, work, nonces)


def _recomputed(node: NodeClient, work: DistanceWork, nonces: Iterable[int]) -> Mapping[int, float]:
    """The distances that the configured round computes for ``nonces``; our claims do not matter."""
    claims = [Winner(nonce, 0.0) for nonce in nonces]
    computed = node.judge(work, claims).computed_distances
    return {claim.nonce: distance for claim, distance in zip(claims, computed, strict=True)}


def _valid(ours: Mapping[int, float]) -> Check:
    least, most = min(ours.values()), max(ours.values())
    passed = all(math.isfinite(d) and 0.0 <= d <= LARGEST for d in ours.values())
    return Check("distances are valid", passed, f"{len(ours)} from {least:.4f} to {most:.4f}")


def _others(what: str, ours: Mapping[int, float], theirs: Mapping[int, float]) -> Check:
    # Two unrelated numbers may be close by chance; half of a dozen pairs are not.
    middle = median(abs(ours[nonce] - theirs[nonce]) for nonce in ours)
    detail = f"the median difference is {middle:.4f}"
    return Check(f"{what} gives other distances", middle > UNRELATED, detail)


def _counts(seen: ObservedRound) -> Check:
    counted, stored = seen.counted, len(seen.winners)
    counts = f"{counted.found} of {counted.processed} counted, {stored} stored"
    detail = f"{counts}, {counted.rate:.1f} nonces/s"
    within = 0 < counted.found <= counted.processed
    return Check("a round counts the winners it stores", within and counted.found == stored, detail)


def _below_target(seen: ObservedRound) -> Check:
    above = [n for n, distance in seen.winners.items() if not is_winner(distance, R_TARGET)]
    farthest = max(seen.winners.values(), default=math.nan)
    detail = f"{len(above)} are not; the largest distance is {farthest:.4f}"
    return Check(f"every winner is below {R_TARGET:g}", not above, detail)


def _complete(seen: ObservedRound) -> Check:
    stored = {nonce: d for nonce, d in seen.winners.items() if nonce in seen.computed}
    winning = {nonce: d for nonce, d in seen.computed.items() if is_winner(d, R_TARGET)}
    detail = f"of the first {RECOMPUTED}, {len(winning)} win when recomputed, {len(stored)} stored"
    return Check("a round stores exactly its winners", bool(winning) and stored == winning, detail)
