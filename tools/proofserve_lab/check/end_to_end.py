"""End-to-end checks: honest proofs are accepted after a restart, every forgery is caught."""

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from functools import partial

from proofserve.protocol.verdict.comparison import Claim
from proofserve.remote.http import wait_until
from proofserve.remote.node_client import NodeClient
from proofserve.remote.records import DistanceWork, Judgement, Work
from proofserve.reports import NodeError, ReportedError
from proofserve.rounds.records import Winner
from proofserve_lab.check.checks import Check, Reporter
from proofserve_lab.nodes import last_seq, status_of, tampered, validated

NONCES = 64
ROUND_S = 120.0
TAMPER_EVERY = 8

StartNode = Callable[[], AbstractContextManager[NodeClient]]
# Has a node judge proofs that were generated before. The text ends the names of checks and says
# on which server this happens.
Judging = Callable[[NodeClient, str, Reporter], None]
# Generates proofs of one protocol and returns the function that judges them later.
Trial = Callable[[NodeClient, Reporter], Judging]
# Computes the claims of another checkpoint for these nonces. Raises ReportedError if it cannot.
Foreign = Callable[[Sequence[int]], Sequence[Claim]]
# About 58 of 100 nonces win.
R_TARGET = 1.416
WINNERS = 64
FORGED = WINNERS // 8
# Below the target, and a distance that many honest winners have.
FORGED_DISTANCE = 1.41
# Distances have a standard deviation of 0.008. The same forward in another process differs by far
# less than this.
TOLERANCE = 1e-4


def end_to_end(start: StartNode, restarts: bool, trials: Sequence[Trial], report: Reporter) -> None:
    """Run every trial, restart the server if ``restarts``, then judge proofs and forgeries."""
    with start() as node:
        judges = [trial(node, report) for trial in trials]
        if not restarts:
            report(Check("restart", None, "skipped: --url names a server that we did not start"))
            for judge in judges:
                judge(node, "on the same server", report)
    if restarts:
        with start() as node:
            for judge in judges:
                judge(node, "after a restart", report)


def artifact_trial(
    work: Work, foreign: Foreign | None, node: NodeClient, report: Reporter
) -> Judging:
    """Generate in a round. ``foreign`` is None if the server's checkpoint is not known here."""
    after = last_seq(node)
    with node.round(work):
        wait_until(lambda: status_of(node).processed >= NONCES, f"{NONCES} results", ROUND_S)
    rows = node.results(after, NONCES)
    claims = [Claim(row.nonce, row.value) for row in rows if row.value is not None]
    report(Check("a round fills the results", True, f"{len(claims)} vectors read back"))
    return partial(_judge_artifacts, work, foreign, claims)


def _judge_artifacts(
    work: Work,
    foreign: Foreign | None,
    claims: Sequence[Claim],
    node: NodeClient,
    where: str,
    report: Reporter,
) -> None:
    report(judged(node, work, claims, f"an honest proof is accepted {where}", fraud=False))
    other_block = replace(work, block_hash=f"not {work.block_hash}")
    report(judged(node, other_block, claims, "a proof for another block is fraud"))
    other_key = replace(work, public_key=f"not {work.public_key}")
    report(judged(node, other_key, claims, "a proof of another key is fraud"))
    altered = tampered(claims, work.width, TAMPER_EVERY)
    report(judged(node, work, altered, "a proof with an eighth of its vectors altered is fraud"))
    name = "the proof of another checkpoint is fraud"
    if foreign is None:
        report(Check(name, None, "skipped: the server's checkpoint is not known here"))
        return
    try:
        foreign_claims = foreign([claim.nonce for claim in claims])
    except ReportedError as error:
        report(Check(name, None, f"skipped: {error}"))
        return
    report(judged(node, work, foreign_claims, name))


def judged(
    node: NodeClient, work: Work, claims: Sequence[Claim], name: str, fraud: bool = True
) -> Check:
    verdict = validated(node, work, claims)
    called = "fraud" if verdict.fraud_detected else "honest"
    counts = f"{verdict.n_mismatch} of {verdict.n_total} differ"
    detail = f"{called}: {counts}, p = {verdict.p_value:.2g}"
    return Check(name, verdict.fraud_detected is fraud and verdict.n_total == len(claims), detail)


@dataclass(frozen=True, slots=True)
class RoundWinners:
    """What a round of ``work`` found: its first winners, and nonces that do not win."""

    work: DistanceWork
    winners: tuple[Winner, ...]
    losers: tuple[int, ...]


def distance_trial(work: DistanceWork, node: NodeClient, report: Reporter) -> Judging:
    plain = find(node, replace(work, r_target=R_TARGET, layer_hooks=False))
    report(_enough_found("a round finds winners", plain))
    hooked = find(node, replace(work, r_target=R_TARGET, layer_hooks=True))
    report(_enough_found("a round with layer hooks finds winners", hooked))
    return partial(_judge_winners, plain, hooked)


def find(node: NodeClient, work: DistanceWork) -> RoundWinners:
    def has_enough() -> bool:
        status = status_of(node)
        return status.found >= WINNERS and status.processed - status.found >= FORGED

    after = last_seq(node)
    with node.round(work):
        wait_until(has_enough, f"{WINNERS} winners", ROUND_S)
    tried, rows = status_of(node).tried(), node.results(after)
    winners = [Winner(row.nonce, row.distance) for row in rows if row.distance is not None]
    # A nonce that failed has a row too; it is neither a winner nor a loser.
    losers = set(tried) - {row.nonce for row in rows}
    return RoundWinners(work, tuple(winners[:WINNERS]), tuple(sorted(losers)))


def _enough_found(name: str, found: RoundWinners) -> Check:
    winners, losers = len(found.winners), len(found.losers)
    detail = f"{winners} winners below {R_TARGET:g} read back, {losers} nonces that do not win"
    return Check(name, winners == WINNERS, detail)


def _judge_winners(
    plain: RoundWinners, hooked: RoundWinners, node: NodeClient, where: str, report: Reporter
) -> None:
    work, winners = plain.work, plain.winners
    other_key = replace(work, public_key=f"not {work.public_key}")
    with node.judging(work):
        report(_accepted(node, plain, f"honest winners are accepted {where}"))
        name = "winners of another block are refused"
        try:
            judgement = node.judge(replace(work, block_hash=f"not {work.block_hash}"), winners)
            report(Check(name, False, f"the node judged them: {_verdict(judgement)}"))
        except NodeError as error:
            report(Check(name, ": 409 " in str(error), str(error)))
        for name, frauds in {
            "winners of another key are fraud": (other_key, winners),
            "winners an eighth of which do not win are fraud": (work, forged(plain)),
            "winners with layer hooks are fraud without them": (work, hooked.winners),
        }.items():
            judgement = node.judge(*frauds)
            report(Check(name, judgement.fraud_detected, _verdict(judgement)))
    with node.judging(hooked.work):
        name = f"honest winners with layer hooks are accepted {where}"
        report(_accepted(node, hooked, name))


def forged(found: RoundWinners) -> tuple[Winner, ...]:
    """The winners, an eighth of them replaced by losers with a false distance."""
    false = [Winner(nonce, FORGED_DISTANCE) for nonce in found.losers[:FORGED]]
    return (*false, *found.winners[len(false) :])


def _accepted(node: NodeClient, found: RoundWinners, name: str) -> Check:
    judgement = node.judge(found.work, found.winners)
    pairs = zip(judgement.computed_distances, found.winners, strict=True)
    off = max(abs(computed - winner.distance) for computed, winner in pairs)
    passed = not judgement.fraud_detected and off <= TOLERANCE
    return Check(name, passed, f"{_verdict(judgement)}, off by at most {off:.1e}")


def _verdict(judgement: Judgement) -> str:
    called = "fraud" if judgement.fraud_detected else "honest"
    counts = f"{judgement.n_invalid} of {len(judgement.computed_distances)} invalid"
    return f"{called}: {counts}, p = {judgement.probability_honest:.2g}"
