"""The members of a fleet as one engine: the nonces of a call are divided among them."""

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager

import numpy as np

from proofserve.fleet.errors import NoMemberReady
from proofserve.fleet.jobs.shares import ShareRows, compute_share
from proofserve.fleet.jobs.sharing import MOST_OF_SHARE, Sharing
from proofserve.fleet.members.client import MemberClient
from proofserve.fleet.members.conditions import MemberCondition
from proofserve.fleet.watch import FleetWatch
from proofserve.protocol.distance import DistanceScheme
from proofserve.rounds.errors import EngineFault
from proofserve.rounds.records import EngineInfo, ProofBatch, Workload
from proofserve.rounds.status import EngineGauges

# Makes the client of a member's URL.
NewClient = Callable[[str], MemberClient]


class FleetEngine:
    """Proves on the ready members of ``watch``; the calls of jobs wait while a round runs.

    That is while ``no_round`` is not set; a call that runs when it is cleared begins again later.
    """

    def __init__(self, watch: FleetWatch, client: NewClient, no_round: asyncio.Event) -> None:
        self._watch = watch
        self._client = client
        self._no_round = no_round
        self.cores = 1

    @property
    def engine_info(self) -> EngineInfo:
        """Raises NoMemberReady before the first member has answered."""
        overview = self._watch.current
        if overview.deployment is None:
            raise NoMemberReady(overview.why_not_ready or "no member has answered yet")
        return overview.deployment.engine_info

    @property
    def nonces_of_call(self) -> int:
        """How many nonces one call should have, so that no ready member is idle."""
        return MOST_OF_SHARE * max(1, len(self._watch.current.ready))

    @asynccontextmanager
    async def session(
        self,
        work: Workload,
        core: int | None = None,  # noqa: ARG002 - as the port
    ) -> AsyncIterator["FleetSession"]:
        yield FleetSession(self._watch, self._client, self._no_round, work)

    async def gauges(self) -> EngineGauges:
        """The sums over all ready members, and the longest durations. Raises NoMemberReady."""
        overview = self._watch.current
        if reason := overview.why_not_ready:
            raise NoMemberReady(reason)
        engines = [e.status.engine for e in overview.ready if e.status and e.status.engine]

        def longest(name: str) -> float:
            return max((getattr(each, name) for each in engines), default=0.0)

        return EngineGauges(
            forwards=sum(each.forwards for each in engines),
            busy_s=sum(each.busy_s for each in engines),
            deferred_s=sum(each.deferred_s for each in engines),
            last_forward_s=longest("last_forward_s"),
            longest_chat_wait_s=longest("longest_chat_wait_s"),
            longest_chat_wait_batches=longest("longest_chat_wait_batches"),
            resume_ms=(),
            leased_blocks=sum(each.leased_blocks for each in engines),
            free_blocks=sum(each.free_blocks for each in engines),
            unfinished_requests=sum(each.unfinished_requests for each in engines),
        )

    async def self_check(self) -> float:
        """The seconds of a forward on the slowest ready member.

        Raises NoMemberReady, and EngineFault with reasons if no member could run one.
        """
        overview = self._watch.current
        if reason := overview.why_not_ready:
            raise NoMemberReady(reason)
        calls = (self._client(each.member.url).self_check() for each in overview.ready)
        answers = await asyncio.gather(*calls, return_exceptions=True)
        if seconds := [each for each in answers if isinstance(each, float)]:
            return max(seconds)
        reasons = [
            f"{condition.member.name}: {answer}"
            for condition, answer in zip(overview.ready, answers, strict=True)
        ]
        raise EngineFault("; ".join(reasons[:3]))


class FleetSession:
    """The calls about ``work``."""

    def __init__(
        self, watch: FleetWatch, client: NewClient, no_round: asyncio.Event, work: Workload
    ) -> None:
        self._watch = watch
        self._client = client
        self._no_round = no_round
        self._work = work

    async def prove(self, nonces: Sequence[int]) -> ProofBatch:
        """The proofs of ``nonces``, whichever members compute them.

        Raises NoMemberReady, and EngineFault with the reasons of the members that failed.
        """
        if isinstance(self._work.scheme, DistanceScheme):
            # Members judge during a round, too.
            return self._batch(nonces, await Sharing(self._watch, self._share, nonces).run())
        while True:
            await self._no_round.wait()
            proving = asyncio.create_task(Sharing(self._watch, self._share, nonces).run())
            # A member proves no job while it has a round. Without this the call would wait inside
            # the member for the round's end, hours later.
            interrupted = asyncio.create_task(self._round_begins())
            try:
                await asyncio.wait({proving, interrupted}, return_when=asyncio.FIRST_COMPLETED)
                if proving.done():
                    return self._batch(nonces, proving.result())
            finally:
                proving.cancel()
                interrupted.cancel()
                await asyncio.gather(proving, interrupted, return_exceptions=True)

    async def _round_begins(self) -> None:
        while self._no_round.is_set():
            await self._watch.next_change()

    async def _share(self, member: MemberCondition, nonces: Sequence[int]) -> ShareRows:
        deployed = member.deployment
        if deployed is None:
            raise AssertionError("only a member that says what is deployed is ready")
        client = self._client(member.member.url)
        return await compute_share(client, self._work, nonces, deployed)

    def _batch(self, nonces: Sequence[int], done: ShareRows) -> ProofBatch:
        proved = tuple(nonce for nonce in nonces if nonce not in done.failed)
        values = np.empty((len(proved), self._work.scheme.width), np.float32)
        for place, nonce in enumerate(proved):
            values[place] = done.rows[nonce]
        failed = tuple(nonce for nonce in nonces if nonce in done.failed)
        return ProofBatch(proved, values, failed)
