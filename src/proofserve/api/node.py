"""What the routes work with: one deployed server, its objects, and the limits of its callers."""

import asyncio
import contextlib
from collections import Counter
from collections.abc import Awaitable, Callable, Coroutine, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Annotated, Any, TypeVar

from fastapi import Depends, Request

from proofserve.api.access import Access, ApiError, Caller, Role
from proofserve.dashboard.routes import SnapshotFeed
from proofserve.protocol.errors import ProtocolError
from proofserve.protocol.receipts.record import SigningKey
from proofserve.rounds.errors import EngineFault
from proofserve.rounds.ports import NodeManager, PublishedResults
from proofserve.rounds.receipts import ReceiptService
from proofserve.rounds.records import EngineInfo
from proofserve.rounds.status import CoreLiveness, FleetMembership
from proofserve.web import HOUR_S, FixedWindow

T = TypeVar("T")

# Retry-After when too many calls wait: few of them end sooner. Seconds.
_WAIT_ENDS_S = 5.0


@dataclass(slots=True, eq=False)
class CallLimits:
    """How much clients may ask: requests a minute, calls that wait, and validators' challenges."""

    per_minute: int = 6000
    open_waits: int = 64
    nonces_per_hour: int = 1000
    _waiting: int = 0
    _minutes: dict[str, FixedWindow] = field(default_factory=dict)
    _hours: dict[str, FixedWindow] = field(default_factory=dict)
    # The validators whose challenge waits for its answer: a key has one at a time.
    _challenging: set[str] = field(default_factory=set)

    def count(self, caller: Caller) -> None:
        """Count one request. Raises ApiError for one beyond the caller's limit."""
        limit = caller.requests_per_minute or self.per_minute
        window = self._minutes.setdefault(caller.name, FixedWindow(limit))
        if not window.take():
            raise ApiError(
                "too_many",
                f"{caller.name} may send {limit} requests a minute"
                " (POC_REQUESTS_PER_MINUTE, or the key's own limit)",
                window.seconds_left,
            )

    @contextmanager
    def waiting(self) -> Iterator[None]:
        """Count one call until the context ends. Raises ApiError if the limit is reached."""
        if self._waiting >= self.open_waits:
            raise ApiError(
                "too_many",
                f"{self._waiting} calls wait for their answer, limit is {self.open_waits}"
                " (POC_MAX_OPEN_WAITS); a job without wait needs no open connection",
                _WAIT_ENDS_S,
            )
        self._waiting += 1
        try:
            yield
        finally:
            self._waiting -= 1

    @contextmanager
    def challenge(self, caller: Caller, nonces: int) -> Iterator[None]:
        """Count a call about ``nonces`` until the context ends; an operator's is not counted.

        The nonces count from now on, whatever becomes of the call: a client that leaves before the
        answer has used the engine. Raises ApiError beyond the key's budget of an hour and beside
        another open call of it, and ProtocolError for more nonces than an hour has.
        """
        if caller.role is not Role.VALIDATOR:
            yield
            return
        if caller.name in self._challenging:
            raise ApiError(
                "too_many",
                f"a challenge of {caller.name} waits for its answer, and a validator's key has one"
                " at a time",
                _WAIT_ENDS_S,
            )
        limit = caller.nonces_per_hour or self.nonces_per_hour
        if nonces > limit:
            raise ProtocolError(
                "nonces", f"{nonces} are more than the {limit} that {caller.name} has in an hour"
            )
        window = self._hours.setdefault(caller.name, FixedWindow(limit, seconds=HOUR_S))
        if not window.take(nonces):
            raise ApiError(
                "too_many",
                f"{caller.name} may have {limit} nonces computed in an hour"
                f" (POC_CHALLENGE_NONCES_PER_HOUR, or the key's own limit); {window.left} are left,"
                f" and all of them again in {window.seconds_left:.0f} s",
                window.seconds_left,
            )
        self._challenging.add(caller.name)
        try:
            yield
        finally:
            self._challenging.remove(caller.name)


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
