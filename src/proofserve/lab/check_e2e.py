"""Does an honest proof survive a restart, and is every kind of forgery caught?"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import replace

from proofserve.lab.checks import Check
from proofserve.lab.node_client import NodeClient
from proofserve.lab.records import Work
from proofserve.lab.vectors import claims_of, tampered
from proofserve.lab.waiting import wait_until
from proofserve.protocol.comparison import Claim
from proofserve.rounds.records import Artifact

NONCES = 64
ROUND_S = 120.0
TAMPER_EVERY = 8

StartNode = Callable[[], AbstractContextManager[NodeClient]]


def end_to_end(
    start: StartNode, work: Work, restarts: bool, foreign: Callable[[Sequence[int]], Sequence[Claim]] | None
) -> Iterator[Check]:
    """Generate in a round, then judge what it stored. ``start`` is entered twice if ``restarts``.

    ``foreign`` computes the artifacts of another checkpoint, None if there is none to be had.
    """
    with start() as node:
        claims = generate(node, work)
        yield Check("a round fills the results", True, f"{len(claims)} vectors read back")
        if not restarts:
            yield Check("restart", None, "skipped: this server is not ours to restart")
            yield from _judge_all(node, work, claims, "on the same server", foreign)
    if restarts:
        with start() as node:
            yield from _judge_all(node, work, claims, "after a restart", foreign)


def generate(node: NodeClient, work: Work) -> list[Claim]:
    """The first results of a new round, as many as a judgement needs."""
    after = node.last_seq()
    with node.round(work):
        wait_until(lambda: node.status().processed >= NONCES, f"{NONCES} results", ROUND_S)
    rows = node.results(after, NONCES)
    return claims_of([Artifact(row.nonce, row.value) for row in rows if row.value is not None])


def _judge_all(
    node: NodeClient,
    work: Work,
    claims: Sequence[Claim],
    where: str,
    foreign: Callable[[Sequence[int]], Sequence[Claim]] | None,
) -> Iterator[Check]:
    yield judged(node, work, claims, f"an honest proof is accepted {where}", fraud=False)
    other_block = replace(work, block_hash=f"not {work.block_hash}")
    yield judged(node, other_block, claims, "a proof for another block is fraud")
    other_key = replace(work, public_key=f"not {work.public_key}")
    yield judged(node, other_key, claims, "a proof of another key is fraud")
    altered = tampered(claims, work.k_dim, TAMPER_EVERY)
    yield judged(node, work, altered, "a proof with an eighth of its vectors altered is fraud")
    name = "the proof of another checkpoint is fraud"
    if foreign is None:
        yield Check(name, None, "skipped: the server's checkpoint is not known here")
    else:
        theirs = foreign([claim.nonce for claim in claims])
        yield judged(node, work, theirs, name)


def judged(
    node: NodeClient, work: Work, claims: Sequence[Claim], name: str, fraud: bool = True
) -> Check:
    """Let ``node`` judge ``claims``; whether its verdict is the expected one."""
    verdict = node.validate(work, claims)
    called = "fraud" if verdict.fraud_detected else "honest"
    detail = f"{called}: {verdict.n_mismatch} of {verdict.n_total} differ, p = {verdict.p_value:.2g}"
    return Check(name, verdict.fraud_detected is fraud and verdict.n_total == len(claims), detail)
