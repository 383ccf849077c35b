"""Are distances sound, and does a round store exactly the nonces that win?"""

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from statistics import median

from proofserve.lab.check.checks import Check, Tell
from proofserve.lab.client.node_client import NodeClient
from proofserve.lab.client.records import DistanceWork, NodeStatus
from proofserve.lab.client.waiting import wait_until
from proofserve.protocol.distance import is_winner
from proofserve.rounds.records import Winner

NONCES = range(12)
# Points on a sphere of radius 1 are no further apart; a float32 may say a little more.
LARGEST = 2.0 + 1e-6
# Distances are spread by 0.008, so unrelated ones differ by 0.007 in the middle pair.
UNRELATED = 5e-4
# About a third of the nonces win: enough to see some, and to see the others left out.
R_TARGET = 1.41
# So many of a round's nonces are computed again.
RECOMPUTED = 64
ROUND_S = 60.0
STATES = ("IDLE", "GENERATING", "VALIDATING", "STOPPED")


@dataclass(frozen=True, slots=True)
class Life:
    """A round from its configuration to its end.

    ``counted`` is what the node said when it no longer generated, ``winners`` what it had stored,
    ``computed`` the distances of the round's first nonces, recomputed by the round itself.
    """

    states: tuple[str, ...]
    counted: NodeStatus
    winners: Mapping[int, float]
    computed: Mapping[int, float]


def distance_smoke(node: NodeClient, work: DistanceWork, tell: Tell) -> None:
    """Tell each check as it is made; a node that refuses a call is a NodeError."""
    ours = _distances(node, work, NONCES)
    tell(_valid(ours))
    again = _distances(node, replace(work, batch_size=5), reversed(NONCES))
    detail = "asked again, backwards, in other groups"
    tell(Check("the same nonce gives the same distance", again == ours, detail))
    for what, other in (
        ("another key", replace(work, public_key="another key")),
        ("another block", replace(work, block_hash="another block")),
    ):
        tell(_others(what, ours, _distances(node, other, NONCES)))
    life = live(node, replace(work, r_target=R_TARGET))
    tell(_counts(life))
    tell(_below_target(life))
    tell(_complete(life))
    tell(Check("the states of a distance round are true", life.states == STATES, _then(life)))


def live(node: NodeClient, work: DistanceWork) -> Life:
    """Lead a round through all its states."""
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
        computed = _recomputed(node, work, range(RECOMPUTED))
    finally:
        node.stop()
    states += [counted.state, node.status().state]
    winners = {row.nonce: row.distance for row in rows if row.distance is not None}
    return Life(tuple(states), counted, winners, computed)


def _has_enough(status: NodeStatus) -> bool:
    return status.processed >= RECOMPUTED and status.found > 0


def _distances(node: NodeClient, work: DistanceWork, nonces: Iterable[int]) -> Mapping[int, float]:
    with node.judging(work):
        return _recomputed(node, work, nonces)


def _recomputed(node: NodeClient, work: DistanceWork, nonces: Iterable[int]) -> Mapping[int, float]:
    """What the configured round says of ``nonces``; what we claim about them is of no interest."""
    claims = [Winner(nonce, 0.0) for nonce in nonces]
    computed = node.judge(work, claims).computed
    return {claim.nonce: distance for claim, distance in zip(claims, computed, strict=True)}


def _valid(ours: Mapping[int, float]) -> Check:
    least, most = min(ours.values()), max(ours.values())
    passed = all(math.isfinite(d) and 0.0 <= d <= LARGEST for d in ours.values())
    return Check("distances are valid", passed, f"{len(ours)} from {least:.4f} to {most:.4f}")


def _others(what: str, ours: Mapping[int, float], theirs: Mapping[int, float]) -> Check:
    # Two unrelated numbers may be close by chance; half of a dozen pairs are not.
    middle = median(abs(ours[nonce] - theirs[nonce]) for nonce in ours)
    detail = f"{middle:.4f} apart in the middle pair"
    return Check(f"{what} gives other distances", middle > UNRELATED, detail)


def _counts(life: Life) -> Check:
    counted, stored = life.counted, len(life.winners)
    detail = (
        f"{counted.found} of {counted.processed} counted, {stored} stored,"
        f" {counted.rate:.1f} nonces/s"
    )
    within = 0 < counted.found <= counted.processed
    return Check("a round counts the winners it stores", within and counted.found == stored, detail)


def _below_target(life: Life) -> Check:
    above = [n for n, distance in life.winners.items() if not is_winner(distance, R_TARGET)]
    farthest = max(life.winners.values(), default=math.nan)
    detail = f"{len(above)} are not; the farthest is at {farthest:.4f}"
    return Check(f"every winner is below {R_TARGET:g}", not above, detail)


def _complete(life: Life) -> Check:
    stored = {nonce: d for nonce, d in life.winners.items() if nonce in life.computed}
    ought = {nonce: d for nonce, d in life.computed.items() if is_winner(d, R_TARGET)}
    detail = (
        f"{len(ought)} of nonces 0 to {RECOMPUTED - 1} when computed again, {len(stored)} stored"
    )
    return Check("a round stores exactly its winners", bool(ought) and stored == ought, detail)


def _then(life: Life) -> str:
    return ", then ".join(life.states)
