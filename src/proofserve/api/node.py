"""One deployed server: its objects, and how its rounds, engine, outbox and receipts are read."""

import asyncio
import contextlib
from collections import Counter
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from dataclasses import dataclass, field
from typing import Annotated, Any, TypeVar

from fastapi import Depends, Request

from proofserve.api.access import Access, ApiError, Caller, CallLimits
from proofserve.dashboard.routes import SnapshotFeed
from proofserve.protocol.receipts.record import SigningKey
from proofserve.protocol.sketch import cost_of_few_values
from proofserve.rounds.errors import EngineFault, EngineGone, OutboxUnavailable
from proofserve.rounds.ports import NodeManager, PublishedResults
from proofserve.rounds.receipts import ReceiptService
from proofserve.rounds.records import EngineInfo, Winner
from proofserve.rounds.status import (
    CoreLiveness,
    EngineGauges,
    FleetMembership,
    ReceiptGauges,
    RoundStats,
    Status,
)
from proofserve.wire.status import DeploymentStatus, NodeStatusResponse, PowStatus, RoundConfig

T = TypeVar("T")

# The longest wait for the outbox, in seconds; the engine's answer has its own limit.
OUTBOX_ANSWER_S = 5.0
_NOTHING = RoundStats(0, 0, 0.0, 0.0, 0, 0.0, 0, 0.0, 0)


async def _accept(_url: str) -> str | None:
    return None


@dataclass(frozen=True, slots=True)
class Deployment:
    """The values with which requests are compared.

    ``enabled`` is false when the server was started without proofs. ``scheme``, ``seq_len`` and
    ``k_dim`` are the only values that the server allows, None where it allows any that fit the
    model.
    ``max_body_bytes`` and ``max_nonces`` bound one request, ``max_callbacks`` the callbacks that
    may wait when a job asks for another. ``check_url`` returns a warning about a callback URL,
    None for none, and raises ValueError if no callback may go there.
    """

    engine_info: EngineInfo
    enabled: bool
    scheme: str | None = None
    seq_len: int | None = None
    k_dim: int | None = None
    default_batch_size: int = 32
    max_nonces: int = 100_000
    max_callbacks: int = 10_000
    max_body_bytes: int = 32 * 1024 * 1024
    check_url: Callable[[str], Awaitable[str | None]] = _accept


@dataclass(frozen=True, slots=True)
class Node:
    """One server: its deployment, rounds and outbox, and which clients may call how often.

    ``refusals`` counts the requests that were not served, by status and reason. ``url_warnings``
    has the warning about the newest round's callback URL, if there is one, by round id. Without
    ``receipts`` chat answers get none. ``dashboard`` is set where the page is served. ``liveness``
    says of each engine core whether it makes progress, and of none where nothing watches them.
    ``membership`` shows the fleet that the node joins, None without one. The node signs what it
    answers with its ``key``, nothing without one.
    """

    deployment: Deployment
    manager: NodeManager
    outbox: PublishedResults
    access: Access = field(default_factory=Access)
    call_limits: CallLimits = field(default_factory=CallLimits)
    receipts: ReceiptService | None = None
    dashboard: SnapshotFeed | None = None
    refusals: Counter[tuple[int, str]] = field(default_factory=Counter)
    url_warnings: dict[str, str] = field(default_factory=dict)
    liveness: Callable[[], Sequence[CoreLiveness]] = tuple
    membership: Callable[[], FleetMembership | None] = lambda: None
    key: SigningKey | None = None

    @property
    def stall(self) -> str | None:
        """Why the engine cores that hang do so; None if none hangs."""
        return "; ".join(core.reason for core in self.liveness() if core.reason) or None


def joined(*warnings: str | None) -> str | None:
    return "; ".join(text for text in warnings if text) or None


# Where a guarded route keeps its request's node, and who sent it.
NODE = "proofserve.node"
CALLER = "proofserve.caller"


async def _node_of(request: Request) -> Node:
    node: Node = request.scope[NODE]
    return node


async def _caller_of(request: Request) -> Caller:
    caller: Caller = request.scope[CALLER]
    return caller


ServedNode = Annotated[Node, Depends(_node_of)]
ServedCaller = Annotated[Caller, Depends(_caller_of)]


async def require_engine(node: Node) -> None:
    """Raise EngineGone for a dead engine. One that is slow or reports a fault may still work."""
    with contextlib.suppress(EngineFault):
        await node.manager.engine_gauges()


async def while_connected(request: Request, work: Coroutine[Any, Any, T]) -> T:
    """The result of ``work``, or ApiError once the client leaves. The body must be read before."""
    working = asyncio.create_task(work)
    leaving = asyncio.create_task(_left(request))
    try:
        await asyncio.wait({working, leaving}, return_when=asyncio.FIRST_COMPLETED)
        if not working.done():
            raise ApiError("client_gone", "Client closed request")
        return working.result()
    finally:
        working.cancel()
        leaving.cancel()
        await asyncio.gather(working, leaving, return_exceptions=True)


async def _left(request: Request) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        continue


# -- reading ---------------------------------------------------------------------------------------


async def status_of(node: Node) -> NodeStatusResponse:
    """Takes as long as the slowest of engine and outbox."""
    status = node.manager.status()
    of_outbox = answer_of_outbox(node.outbox.gauges())
    of_engine, of_receipts = read_engine(node), read_receipts(node)
    parts = await asyncio.gather(pow_status(node, status), of_outbox, of_engine, of_receipts)
    of_round, (outbox, outbox_error), (engine, engine_error), (receipts, receipts_error) = parts
    spec = status.spec
    of_url = node.url_warnings.get(spec.round_id) if spec else None
    return NodeStatusResponse(
        status=status.state,
        **dict(of_round),
        config=RoundConfig.of(spec) if spec else None,
        stats=status.stats,
        round_id=spec.round_id if spec else None,
        scheme=node.deployment.scheme,
        paused_reason=status.paused_reason,
        error=status.error,
        warning=joined(
            of_url,
            cost_of_few_values(spec.work.scheme) if spec else None,
            engine.warning if engine else None,
        ),
        cores=list(status.cores),
        lanes=status.lanes,
        queue=status.queue,
        outbox=outbox,
        outbox_error=outbox_error,
        engine=engine,
        engine_error=engine_error,
        liveness=list(node.liveness()),
        fleet=node.membership(),
        receipts=receipts,
        receipts_error=receipts_error,
        deployment=_deployment(node.deployment),
    )


def _deployment(deployment: Deployment) -> DeploymentStatus:
    engine_info = deployment.engine_info
    facts = engine_info.facts
    return DeploymentStatus(
        models=list(engine_info.model_names),
        max_seq_len=engine_info.max_seq_len,
        hidden_size=facts.hidden_size,
        weights_digest=facts.weights_digest,
        token_ids=len(facts.tokens) if facts.tokens else 0,
        scheme=deployment.scheme,
        seq_len=deployment.seq_len,
        k_dim=deployment.k_dim,
        max_nonces=deployment.max_nonces,
        versions=dict(engine_info.versions),
    )


async def pow_status(node: Node, status: Status) -> PowStatus:
    """The fields that clients of the distance protocol expect in every state."""
    spec, stats = status.spec, status.stats
    winners: Sequence[Winner] | None = []
    r_target: float | None = None
    if spec is None or stats is None or spec.target is None:
        stats = _NOTHING
    else:
        r_target = spec.target.r_target
        try:
            # Older ones are in GET /results.
            winners = await node.outbox.winners(spec.round_id, 100)
        except OutboxUnavailable:
            winners = None
    return PowStatus(
        state=status.state,
        valid_nonces=None if winners is None else [winner.nonce for winner in winners],
        valid_distances=None if winners is None else [winner.distance for winner in winners],
        total_checked=stats.total_processed,
        total_valid=stats.total_found,
        elapsed_seconds=stats.elapsed_s,
        rate_per_second=stats.nonces_per_second,
        r_target=r_target,
    )


async def read_receipts(node: Node) -> tuple[ReceiptGauges | None, str | None]:
    """The counts of receipts, or None and the reason; no reason if answers get none."""
    if node.receipts is None:
        return None, None
    return await answer_of_outbox(node.receipts.gauges())


async def read_engine(node: Node) -> tuple[EngineGauges | None, str | None]:
    """The engine's newest gauges, or None and why not; an engine that hangs is not waited for."""
    asked = asyncio.ensure_future(node.manager.engine_gauges())
    try:
        while not asked.done():
            if (reason := node.stall) is not None:
                return None, reason
            await asyncio.wait({asked}, timeout=0.25)
        engine = asked.result()
    except EngineFault as error:
        return None, node.stall or str(error)
    except EngineGone as error:
        return None, str(error)
    finally:
        asked.cancel()
    if engine.age_s and (reason := node.stall) is not None:
        return None, reason
    return engine, None


async def answer_of_outbox(call: Awaitable[T]) -> tuple[T | None, str | None]:
    """The result of a call to the outbox, or None and the reason why it has none."""
    try:
        async with asyncio.timeout(OUTBOX_ANSWER_S):
            return await call, None
    except TimeoutError:
        return None, f"the outbox did not answer within {OUTBOX_ANSWER_S:g} s"
    except OutboxUnavailable as error:
        return None, str(error)
