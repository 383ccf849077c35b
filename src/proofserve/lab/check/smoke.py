"""Smoke checks: chat answers, proofs are valid and repeatable, a round counts correctly."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace

import numpy as np

from proofserve.lab.check.checks import Check, Reporter
from proofserve.lab.check.distance_smoke import distance_smoke
from proofserve.lab.client.chats import chat
from proofserve.lab.client.load import ask_all
from proofserve.lab.client.node_client import NodeClient, wait_until
from proofserve.lab.client.records import AnyWork, DistanceWork, Work
from proofserve.lab.client.vectors import claims_of, distances, vectors_of
from proofserve.protocol import SKETCHES
from proofserve.protocol.errors import MalformedVector
from proofserve.protocol.verdict.comparison import Claim

NONCES = range(12)
# A float16 of a number below 1 is off by 2^-12 at most.
NORM_TOLERANCE = 2e-3
# The length of a sketch is 1 on average. So many standard deviations are improbable.
SKETCH_DEVIATIONS = 6.0
# Unrelated unit vectors are about 1.4 apart; two engines of one model about 0.01.
UNRELATED = 0.2
ROUND_S = 60.0


def smoke(node: NodeClient, works: Sequence[AnyWork], report: Reporter) -> None:
    """Report a check of chat, then the checks of the protocol of each order.

    Raises NodeError if the node refuses a call.
    """
    report(_chat_answers(node, works[0].model))
    for work in works:
        if isinstance(work, DistanceWork):
            distance_smoke(node, work, report)
        else:
            artifact_smoke(node, work, report)


def artifact_smoke(node: NodeClient, work: Work, report: Reporter) -> None:
    ours = claims_of(node.artifacts(work, NONCES))
    report(_vectors_are_valid(ours, work))
    # Order and batch size must not change a single bit.
    again = node.artifacts(replace(work, batch_size=5), tuple(reversed(NONCES)))
    detail = "computed again in reverse order and in other batches"
    report(Check("the same nonce gives the same bits", claims_of(again[::-1]) == ours, detail))
    for what, other in (
        ("another key", replace(work, public_key="another key")),
        ("another block", replace(work, block_hash="another block")),
    ):
        nearest = min(distances(ours, claims_of(node.artifacts(other, NONCES)), work.width))
        detail = f"nearest pair {nearest:.2f} apart"
        report(Check(f"{what} gives other values", nearest > UNRELATED, detail))
    _round_counts(node, work, report)


def _chat_answers(node: NodeClient, model: str) -> Check:
    (reply,) = ask_all(node.url, [chat(model, "Say something.", 8)], 1)
    if reply.error is not None and not node.chats():
        return Check("chat answers", None, "skipped: a fleet proves, its gateway chats")
    detail = reply.error or f"{reply.completion_tokens} tokens in {reply.seconds * 1e3:.0f} ms"
    return Check("chat answers", reply.error is None, detail)


def _vectors_are_valid(claims: Sequence[Claim], work: Work) -> Check:
    name = "vectors are valid"
    if [claim.nonce for claim in claims] != list(NONCES):
        return Check(name, False, f"asked for {list(NONCES)}, got {[c.nonce for c in claims]}")
    try:
        vectors = vectors_of(claims, work.width)
    except MalformedVector as error:
        return Check(name, False, str(error))
    rows = np.concatenate([vector.reshape(-1, work.k_dim) for vector in vectors.values()])
    off = float(np.abs(np.linalg.norm(rows, axis=1) - 1.0).max())
    spread = math.sqrt(1 / (2 * work.k_dim)) if work.scheme in SKETCHES else 0.0
    detail = f"{len(vectors)} of {work.width} finite numbers, length 1 within {off:.1e}"
    return Check(name, off < NORM_TOLERANCE + SKETCH_DEVIATIONS * spread, detail)


def _round_counts(node: NodeClient, work: Work, report: Reporter) -> None:
    after = node.last_seq()
    with node.round(work):
        running = node.status().state
        wait_until(lambda: node.status().processed > 0, "first result of a round", ROUND_S)
    status = node.status()
    rows = [row for row in node.results(after) if row.round_id == status.round_id]
    nonces = [row.nonce for row in rows if row.value is not None]
    counts = f"{status.processed} counted, {len(nonces)} stored, {status.rate:.1f} nonces/s"
    report(Check("a round counts what it stores", 0 < status.processed == len(nonces), counts))
    detail = f"{len(nonces)} of {len(_by_lane(nonces, status.lanes))} lanes"
    report(Check("a round skips no nonce", _is_complete(nonces, status.lanes), detail))
    states = (running, status.state)
    as_expected = states == ("GENERATING", "STOPPED")
    report(Check("a round reports its states", as_expected, ", then ".join(states)))


def _is_complete(nonces: Sequence[int], lanes: int) -> bool:
    """Whether each lane has its first nonces, each once and without a gap."""
    found = _by_lane(nonces, lanes).values()
    return all(sorted(indices) == list(range(len(indices))) for indices in found)


def _by_lane(nonces: Sequence[int], lanes: int) -> Mapping[int, list[int]]:
    found: dict[int, list[int]] = {}
    for nonce in nonces:
        found.setdefault(nonce % lanes, []).append(nonce // lanes)
    return found
