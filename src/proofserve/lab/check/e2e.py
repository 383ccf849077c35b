"""End-to-end checks: honest proofs are accepted after a restart, every forgery is caught."""

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import replace
from functools import partial

from proofserve.lab.check.checks import Check, Reporter
from proofserve.lab.client.errors import LabError
from proofserve.lab.client.node_client import NodeClient, wait_until
from proofserve.lab.client.records import Work
from proofserve.lab.client.vectors import claims_of, tampered
from proofserve.protocol.verdict.comparison import Claim
from proofserve.rounds.records import Artifact

NONCES = 64
ROUND_S = 120.0
TAMPER_EVERY = 8

StartNode = Callable[[], AbstractContextManager[NodeClient]]
# Has a node judge proofs that were generated before. The text ends the names of checks and says
# on which server this happens.
Judge = Callable[[NodeClient, str, Reporter], None]
# Generates proofs of one protocol and returns the function that judges them later.
Trial = Callable[[NodeClient, Reporter], Judge]
# Computes the claims of another checkpoint for these nonces. Raises LabError if it cannot.
Foreign = Callable[[Sequence[int]], Sequence[Claim]]


def end_to_end(start: StartNode, restarts: bool, trials: Sequence[Trial], report: Reporter) -> None:
    """Run every trial, restart the server if ``restarts``, then judge proofs and forgeries.

    ``start`` gives a running server; its context is entered a second time for the restart.
    """
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
) -> Judge:
    """Generate in a round. ``foreign`` is None if the server's checkpoint is not known here."""
    claims = generate(node, work)
    report(Check("a round fills the results", True, f"{len(claims)} vectors read back"))
    return partial(_judge_all, work, foreign, claims)


def generate(node: NodeClient, work: Work) -> list[Claim]:
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
    except LabError as error:
        report(Check(name, None, f"skipped: {error}"))
        return
    report(judged(node, work, foreign_claims, name))


def judged(
    node: NodeClient, work: Work, claims: Sequence[Claim], name: str, fraud: bool = True
) -> Check:
    verdict = node.validate(work, claims)
    called = "fraud" if verdict.fraud_detected else "honest"
    counts = f"{verdict.n_mismatch} of {verdict.n_total} differ"
    detail = f"{called}: {counts}, p = {verdict.p_value:.2g}"
    return Check(name, verdict.fraud_detected is fraud and verdict.n_total == len(claims), detail)
