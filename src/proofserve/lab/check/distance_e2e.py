"""End-to-end checks of the distance protocol: honest winners pass, false winners are caught."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial

from proofserve.lab.check.checks import Check, Reporter
from proofserve.lab.check.e2e import Judge
from proofserve.lab.client.errors import NodeError
from proofserve.lab.client.node_client import NodeClient, wait_until
from proofserve.lab.client.records import DistanceWork, Judgement, NodeStatus
from proofserve.rounds.records import Winner

# About 58 of 100 nonces win.
R_TARGET = 1.416
WINNERS = 64
FORGED = WINNERS // 8
# Below the target, and a distance that many honest winners have.
FORGED_DISTANCE = 1.41
# Distances have a standard deviation of 0.008. The same forward in another process differs by far
# less than this.
TOLERANCE = 1e-4
ROUND_S = 120.0


@dataclass(frozen=True, slots=True)
class Found:
    """What a round of ``work`` found: its first winners, and nonces that do not win."""

    work: DistanceWork
    winners: tuple[Winner, ...]
    losers: tuple[int, ...]


def distance_trial(work: DistanceWork, node: NodeClient, report: Reporter) -> Judge:
    """Generate in a round without layer hooks and in one with them."""
    plain = find(node, replace(work, r_target=R_TARGET, layer_hooks=False))
    report(_enough_found("a round finds winners", plain))
    hooked = find(node, replace(work, r_target=R_TARGET, layer_hooks=True))
    report(_enough_found("a round with layer hooks finds winners", hooked))
    return partial(_judge_all, plain, hooked)


def find(node: NodeClient, work: DistanceWork) -> Found:
    after = node.last_seq()
    with node.round(work):
        wait_until(lambda: _has_enough(node.status()), f"{WINNERS} winners", ROUND_S)
    tried, rows = node.status().tried(), node.results(after)
    winners = [Winner(row.nonce, row.distance) for row in rows if row.distance is not None]
    # A nonce that failed has a row too; it is neither a winner nor a loser.
    losers = set(tried) - {row.nonce for row in rows}
    return Found(work, tuple(winners[:WINNERS]), tuple(sorted(losers)))


def _has_enough(status: NodeStatus) -> bool:
    losers = status.processed - status.found
    return status.found >= WINNERS and losers >= FORGED


def _enough_found(name: str, found: Found) -> Check:
    winners, losers = len(found.winners), len(found.losers)
    detail = f"{winners} winners below {R_TARGET:g} read back, {losers} nonces that do not win"
    return Check(name, winners == WINNERS, detail)


def _judge_all(plain: Found, hooked: Found, node: NodeClient, where: str, report: Reporter) -> None:
    work, winners = plain.work, plain.winners
    with node.judging(work):
        report(_accepted(node, plain, f"honest winners are accepted {where}"))
        report(_refused(node, replace(work, block_hash=f"not {work.block_hash}"), winners))
        other_key = replace(work, public_key=f"not {work.public_key}")
        report(_fraud(node, other_key, winners, "winners of another key are fraud"))
        false = forged(plain)
        report(_fraud(node, work, false, "winners an eighth of which do not win are fraud"))
        name = "winners with layer hooks are fraud without them"
        report(_fraud(node, work, hooked.winners, name))
    with node.judging(hooked.work):
        name = f"honest winners with layer hooks are accepted {where}"
        report(_accepted(node, hooked, name))


def forged(found: Found) -> tuple[Winner, ...]:
    """The winners, an eighth of them replaced by losers with a false distance."""
    false = [Winner(nonce, FORGED_DISTANCE) for nonce in found.losers[:FORGED]]
    return (*false, *found.winners[len(false) :])


def _accepted(node: NodeClient, found: Found, name: str) -> Check:
    judgement = node.judge(found.work, found.winners)
    pairs = zip(judgement.computed_distances, found.winners, strict=True)
    off = max(abs(computed - winner.distance) for computed, winner in pairs)
    passed = not judgement.fraud_detected and off <= TOLERANCE
    return Check(name, passed, f"{_verdict(judgement)}, off by at most {off:.1e}")


def _fraud(node: NodeClient, work: DistanceWork, winners: Sequence[Winner], name: str) -> Check:
    judgement = node.judge(work, winners)
    return Check(name, judgement.fraud_detected, _verdict(judgement))


def _refused(node: NodeClient, work: DistanceWork, winners: Sequence[Winner]) -> Check:
    name = "winners of another block are refused"
    try:
        judgement = node.judge(work, winners)
    except NodeError as error:
        return Check(name, ": 409 " in str(error), str(error))
    return Check(name, False, f"the node judged them: {_verdict(judgement)}")


def _verdict(judgement: Judgement) -> str:
    called = "fraud" if judgement.fraud_detected else "honest"
    counts = f"{judgement.n_invalid} of {len(judgement.computed_distances)} invalid"
    return f"{called}: {counts}, p = {judgement.probability_honest:.2g}"
