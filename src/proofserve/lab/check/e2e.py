"""Does an honest proof survive a restart, and is every kind of forgery caught?"""

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from functools import partial

from proofserve.lab.check.checks import Check, Tell
from proofserve.lab.client.node_client import NodeClient
from proofserve.lab.client.records import Work
from proofserve.lab.client.vectors import claims_of, tampered
from proofserve.lab.client.waiting import wait_until
from proofserve.protocol.comparison import Claim
from proofserve.rounds.records import Artifact

NONCES = 64
ROUND_S = 120.0
TAMPER_EVERY = 8

StartNode = Callable[[], AbstractContextManager[NodeClient]]
# Judges what was generated before; the text says on which server, to end the name of a check.
Judge = Callable[[NodeClient, str, Tell], None]
# Generates proofs of one protocol, and gives what will judge them.
Trial = Callable[[NodeClient, Tell], Judge]
# Computes the claims of another checkpoint.
Foreign = Callable[[Sequence[int]], Sequence[Claim]]


@dataclass(frozen=True, slots=True)
class CheckStage:
    """Where the checks take place.

    ``start`` is entered once for each start of the server, twice if it ``restarts``.
    """

    start: StartNode
    restarts: bool


def end_to_end(stage: CheckStage, trials: Sequence[Trial], tell: Tell) -> None:
    """Generate everything, restart once if we may, then judge everything and forgeries of it."""
    with stage.start() as node:
        judges = [trial(node, tell) for trial in trials]
        if not stage.restarts:
            tell(Check("restart", None, "skipped: this server is not ours to restart"))
            for judge in judges:
                judge(node, "on the same server", tell)
    if stage.restarts:
        with stage.start() as node:
            for judge in judges:
                judge(node, "after a restart", tell)


def artifact_trial(work: Work, foreign: Foreign | None, node: NodeClient, tell: Tell) -> Judge:
    """Generate in a round. ``foreign`` is None if there is no other checkpoint to be had."""
    claims = generate(node, work)
    tell(Check("a round fills the results", True, f"{len(claims)} vectors read back"))
    return partial(_judge_all, work, foreign, claims)


def generate(node: NodeClient, work: Work) -> list[Claim]:
    """The first results of a new round, as many as a judgement needs."""
    after = node.last_seq()
    with node.round(work):
        wait_until(lambda: node.status().processed >= NONCES, f"{NONCES} results", ROUND_S)
    rows = node.results(after, NONCES)
    return claims_of([Artifact(row.nonce, row.value) for row in rows if row.value is not None])


def _judge_all(
    work: Work,
    foreign: Foreign | None,
    claims: Sequence[Claim],
    node: NodeClient,
    where: str,
    tell: Tell,
) -> None:
    tell(judged(node, work, claims, f"an honest proof is accepted {where}", fraud=False))
    other_block = replace(work, block_hash=f"not {work.block_hash}")
    tell(judged(node, other_block, claims, "a proof for another block is fraud"))
    other_key = replace(work, public_key=f"not {work.public_key}")
    tell(judged(node, other_key, claims, "a proof of another key is fraud"))
    altered = tampered(claims, work.k_dim, TAMPER_EVERY)
    tell(judged(node, work, altered, "a proof with an eighth of its vectors altered is fraud"))
    name = "the proof of another checkpoint is fraud"
    if foreign is None:
        tell(Check(name, None, "skipped: the server's checkpoint is not known here"))
    else:
        tell(judged(node, work, foreign([claim.nonce for claim in claims]), name))


def judged(
    node: NodeClient, work: Work, claims: Sequence[Claim], name: str, fraud: bool = True
) -> Check:
    """Let ``node`` judge ``claims``; whether its verdict is the expected one."""
    verdict = node.validate(work, claims)
    called = "fraud" if verdict.fraud_detected else "honest"
    counts = f"{verdict.n_mismatch} of {verdict.n_total} differ"
    detail = f"{called}: {counts}, p = {verdict.p_value:.2g}"
    return Check(name, verdict.fraud_detected is fraud and verdict.n_total == len(claims), detail)
