"""Does the node prove anything at all, and is what it proves worth the name?"""

from collections.abc import Iterator
from dataclasses import replace

import numpy as np

from proofserve.lab.chats import chat
from proofserve.lab.checks import Check
from proofserve.lab.load import ask_all
from proofserve.lab.node_client import NodeClient
from proofserve.lab.records import Work
from proofserve.lab.vectors import claims_of, distances, vectors_of
from proofserve.lab.waiting import wait_until
from proofserve.protocol.errors import MalformedVector

NONCES = range(12)
# A float16 of a number below 1 is off by 2^-12 at most.
NORM_TOLERANCE = 2e-3
# Unrelated unit vectors are about 1.4 apart; two engines of one model about 0.01.
UNRELATED = 0.2
ROUND_S = 60.0


def smoke(node: NodeClient, work: Work) -> Iterator[Check]:
    """Each check as it is made; a node that refuses a call is a NodeError."""
    yield _chat_answers(node, work)
    yield _vectors_are_valid(node, work)
    yield _same_again(node, work)
    yield _other_values("another key", node, work, replace(work, public_key="another key"))
    yield _other_values("another block", node, work, replace(work, block_hash="another block"))
    yield from _round_counts(node, work)


def _chat_answers(node: NodeClient, work: Work) -> Check:
    (reply,) = ask_all(node.url, [chat(work.model, "Say something.", 8)], 1)
    detail = reply.error or f"{reply.completion_tokens} tokens in {reply.seconds * 1e3:.0f} ms"
    return Check("chat answers", reply.error is None, detail)


def _vectors_are_valid(node: NodeClient, work: Work) -> Check:
    name = "vectors are valid"
    claims = claims_of(node.artifacts(work, NONCES))
    if [claim.nonce for claim in claims] != list(NONCES):
        return Check(name, False, f"asked for {list(NONCES)}, got {[c.nonce for c in claims]}")
    try:
        vectors = vectors_of(claims, work.k_dim)
    except MalformedVector as error:
        return Check(name, False, str(error))
    off = max(abs(float(np.linalg.norm(vector)) - 1.0) for vector in vectors.values())
    detail = f"{len(vectors)} of {work.k_dim} finite numbers, length 1 within {off:.1e}"
    return Check(name, off < NORM_TOLERANCE, detail)


def _same_again(node: NodeClient, work: Work) -> Check:
    """Asked again backwards and in other groups: neither may be seen in the bits."""
    once = claims_of(node.artifacts(work, NONCES))
    regrouped = replace(work, batch_size=5)
    again = claims_of(node.artifacts(regrouped, tuple(reversed(NONCES))))
    same = {c.nonce: c.vector_b64 for c in once} == {c.nonce: c.vector_b64 for c in again}
    return Check(
        "the same nonce gives the same bits", same, "asked again, backwards, in other groups"
    )


def _other_values(what: str, node: NodeClient, work: Work, other: Work) -> Check:
    ours = claims_of(node.artifacts(work, NONCES))
    theirs = claims_of(node.artifacts(other, NONCES))
    nearest = min(distances(ours, theirs, work.k_dim))
    return Check(
        f"{what} gives other values", nearest > UNRELATED, f"nearest pair {nearest:.2f} apart"
    )


def _round_counts(node: NodeClient, work: Work) -> Iterator[Check]:
    after = node.last_seq()
    with node.round(work):
        generating = node.status().state
        wait_until(lambda: node.status().processed > 0, "first result of a round", ROUND_S)
    status = node.status()
    rows = [row for row in node.results(after) if row.round_id == status.round_id]
    nonces = [row.nonce for row in rows if row.value is not None]
    yield Check(
        "a round counts what it stores",
        0 < status.processed == len(nonces),
        f"{status.processed} counted, {len(nonces)} stored, {status.rate:.1f} nonces/s",
    )
    yield Check(
        "a round leaves no nonce out", nonces == list(range(len(nonces))), f"0 to {len(nonces) - 1}"
    )
    states = (generating, status.state)
    yield Check(
        "the states are true", states == ("GENERATING", "STOPPED"), f"{generating}, then {states[1]}"
    )
