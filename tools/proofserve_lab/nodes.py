"""What the lab asks of a node beside its validators' calls, and vectors compared and forged."""

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any
from urllib.parse import quote

import httpx
import numpy as np

from proofserve.cli.session import CommandSession
from proofserve.protocol.codec import decode, encode
from proofserve.protocol.verdict.comparison import Claim
from proofserve.remote.http import POLL_S, first, wait_until
from proofserve.remote.node_client import NodeClient
from proofserve.remote.records import AnyWork, Work, record_of, vectors_of
from proofserve.reports import NodeError, TooSlowError
from proofserve.rounds.records import Verdict
from proofserve.rounds.status import EngineGauges
from proofserve.wire import PROOFS, RECEIPTS
from proofserve.wire.records import artifact_record

FIRST_RESULT_S = 60.0
# A node waits half a second for its engine's counters, and a busy engine may need longer.
ENGINE_LOOKS = 4
# The log of receipts has one entry a second.
RECEIPT_S = 30.0
# How long a demo waits while nothing moves. A busy processor without bf16 instructions may take a
# minute for one forward of many nonces.
STILL_S = 180.0


@dataclass(frozen=True, slots=True)
class BareSpeed:
    """The speed of forwards back to back inside the engine, which no round can exceed."""

    nonces_per_second: float
    seconds_per_forward: float
    sequences: int


@dataclass(frozen=True, slots=True)
class NodeStatus:
    """``GET /status``: counts of the current or last round, and the engine's own counters.

    Of the ``processed`` nonces ``found`` were stored: all of them in a round of the artifact
    protocol, the winners in one of the distance protocol. ``rate``: nonces per second since the
    round began. ``of_lane`` has the processed nonces of each lane of a fleet; a node has one lane.
    """

    state: str
    round_id: str | None
    processed: int
    found: int
    failed: int
    rate: float
    engine: EngineGauges | None
    lanes: int = 1
    of_lane: Mapping[int, int] | None = None

    def tried(self) -> list[int]:
        """The nonces with a result, if the round's lane holds every nonce."""
        counts = {0: self.processed} if self.of_lane is None else self.of_lane
        return sorted(
            lane + self.lanes * index for lane, count in counts.items() for index in range(count)
        )

    @classmethod
    def read(cls, body: Mapping[str, Any]) -> "NodeStatus":
        """Read the answer's JSON. A node without a round has no stats."""
        stats = body["stats"] or {}
        gauges = body.get("engine")
        lanes = body.get("lanes") or {"total": 1, "processed": None}
        of_lane = lanes["processed"]
        return cls(
            state=body["status"],
            round_id=body.get("round_id"),
            processed=stats.get("total_processed", 0),
            found=stats.get("total_found", 0),
            failed=stats.get("failed", 0),
            rate=stats.get("nonces_per_second", 0.0),
            engine=record_of(EngineGauges, gauges) if gauges else None,
            lanes=lanes["total"],
            of_lane=None if of_lane is None else {int(n): count for n, count in of_lane.items()},
        )


def status_of(node: NodeClient) -> NodeStatus:
    """The node's status; the engine's counters in it may be older than the call."""
    return NodeStatus.read(node.describe())


def has_chat(node: NodeClient) -> bool:
    """Whether the server has an endpoint for chat: a fleet has none."""
    # A server with the endpoint answers 405 to this method.
    return node.send("GET", "/v1/chat/completions").status_code != httpx.codes.NOT_FOUND


def gauges_of(node: NodeClient) -> EngineGauges:
    return status_with_gauges(node)[1]


def status_with_gauges(node: NodeClient) -> tuple[NodeStatus, EngineGauges]:
    """With counters of now, or the newest of a few looks. Raises NodeError without any."""
    found = None
    for _ in range(ENGINE_LOOKS):
        status = status_of(node)
        if status.engine is not None:
            found = status, status.engine
            if status.engine.age_s == 0:
                break
    if found is None:
        raise NodeError(f"{node.url} shows no engine gauges; is its engine alive?")
    return found


@contextmanager
def computing_round(node: NodeClient, work: AnyWork) -> Iterator[None]:
    """A round that has stored a result when the context begins, and that ends with it."""
    with node.round(work):
        wait_until(lambda: status_of(node).processed > 0, "first result of a round", FIRST_RESULT_S)
        yield


def last_seq(node: NodeClient, after: int = 0) -> int:
    """The number of the newest stored result."""
    while rows := node.results(after):
        after = rows[-1].seq
    return after


def bare_speed(node: NodeClient, work: AnyWork, forwards: int) -> BareSpeed:
    """Bare forwards back to back, timed inside the engine; needs ``--poc-measure``."""
    body = {
        "block_hash": work.block_hash,
        "public_key": work.public_key,
        **work.measure_fields,
        "batch_size": work.batch_size,
        "forwards": forwards,
    }
    return record_of(BareSpeed, node.ask("POST", f"{PROOFS}/measure", body))


def validated(node: NodeClient, work: Work, claims: Sequence[Claim]) -> Verdict:
    """Have the node recompute ``claims`` and judge them by its default test."""
    body = {
        **work.body,
        "nonces": [claim.nonce for claim in claims],
        "wait": True,
        "validation": {"artifacts": [artifact_record(c.nonce, c.vector_b64) for c in claims]},
    }
    return record_of(Verdict, node.ask("POST", f"{PROOFS}/generate", body))


def receipts_of(node: NodeClient, response_id: str) -> int:
    """How many receipts the node has of an answer that has ended, once its log has them.

    Raises NodeError, or TooSlowError after ``RECEIPT_S`` seconds.
    """

    def count() -> int | None:
        try:
            return len(node.ask("GET", f"{RECEIPTS}/{quote(response_id, safe='')}")["receipts"])
        except NodeError as error:
            if error.status == httpx.codes.TOO_EARLY:
                return None
            if error.status not in {httpx.codes.NOT_FOUND, httpx.codes.GONE}:
                raise
            return 0

    if (found := first(count, RECEIPT_S, POLL_S)) is None:
        raise TooSlowError(f"the receipt of {response_id}: not within {RECEIPT_S:g} s")
    return found


def wait_while_moving(
    session: CommandSession,
    what: str,
    condition: Callable[[], bool],
    reached: Callable[[], str],
    still_s: float = STILL_S,
) -> None:
    """Poll ``condition`` until it holds, and show what is ``reached``, however slowly.

    Raises TooSlowError, which names ``what``, once ``reached`` was the same for ``still_s``
    seconds; what both functions raise; and SystemExit after a signal.
    """
    before, moved_at = reached(), time.monotonic()
    session.line.reached(before)
    while not condition():
        session.interrupts.check()
        now = reached()
        if now != before:
            before, moved_at = now, time.monotonic()
            session.line.reached(now)
        if time.monotonic() - moved_at > still_s:
            raise TooSlowError(f"{what}: nothing has moved for {still_s:g} s ({before})")
        time.sleep(POLL_S)


# -- vectors ---------------------------------------------------------------------------------------


def distances(some: Sequence[Claim], others: Sequence[Claim], k_dim: int) -> list[float]:
    ours, theirs = vectors_of(some, k_dim), vectors_of(others, k_dim)
    return [float(np.linalg.norm(ours[nonce] - theirs[nonce])) for nonce in ours]


def tampered(claims: Sequence[Claim], k_dim: int, every: int) -> list[Claim]:
    """Every ``every``-th vector with its first two values swapped: still finite and of length 1."""
    made = list(claims)
    for index in range(0, len(made), every):
        vector = decode(made[index].vector_b64, k_dim)
        vector[[0, 1]] = vector[[1, 0]]
        made[index] = Claim(made[index].nonce, encode(vector[np.newaxis])[0])
    return made
