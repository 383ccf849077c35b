"""Divides the nonces of one call among ready members, and passes the share of one that fails on."""

import asyncio
from collections import deque
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from proofserve.fleet.errors import NoMemberReady
from proofserve.fleet.jobs.shares import ShareRows
from proofserve.fleet.members.client import MemberError, Unreachable
from proofserve.fleet.members.conditions import MemberCondition
from proofserve.fleet.watch import FleetWatch
from proofserve.rounds.computation import chunks
from proofserve.rounds.errors import EngineFault

# Nonces of one call to a member: some forwards, beside which the call itself takes little time.
MOST_OF_SHARE = 256
_LEAST_OF_SHARE = 16
# A share that failed on so many members fails the call.
_MOST_TRIES = 3

Compute = Callable[[MemberCondition, Sequence[int]], Coroutine[Any, Any, ShareRows]]


@dataclass(slots=True, eq=False)
class _Share:
    nonces: tuple[int, ...]
    tried: set[str] = field(default_factory=set)


class Sharing:
    """Computes ``nonces`` once, by ``compute`` on the ready members of ``watch``."""

    def __init__(self, watch: FleetWatch, compute: Compute, nonces: Sequence[int]) -> None:
        self._watch = watch
        self._compute = compute
        ready = max(1, len(watch.current.ready))
        size = min(MOST_OF_SHARE, max(_LEAST_OF_SHARE, -(-len(nonces) // ready)))
        self._waiting = deque(_Share(each) for each in chunks(nonces, size))
        self._running: dict[str, tuple[_Share, asyncio.Task[ShareRows]]] = {}
        self._reasons: dict[str, str] = {}
        self._reached = False
        self._rows: dict[int, NDArray[np.float32]] = {}
        self._failed: set[int] = set()

    async def run(self) -> ShareRows:
        """Raises NoMemberReady, and EngineFault with the reasons of the members that failed."""
        try:
            while self._waiting or self._running:
                self._assign()
                if not self._running:
                    raise self._nobody_left()
                await self._until_something_ends()
                self._settle()
        finally:
            tasks = [task for _, task in self._running.values()]
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
        return ShareRows(self._rows, frozenset(self._failed))

    def _assign(self) -> None:
        """Give each ready member without a share one that it has not failed."""
        for member in self._watch.current.ready:
            id_ = member.member.id
            if id_ in self._running:
                continue
            share = next((each for each in self._waiting if id_ not in each.tried), None)
            if share is None:
                continue
            self._waiting.remove(share)
            task = asyncio.create_task(self._compute(member, share.nonces))
            self._running[id_] = (share, task)

    async def _until_something_ends(self) -> None:
        """Wait for the end of a share, or for news of the members."""
        change = asyncio.create_task(self._watch.next_change())
        try:
            tasks = {task for _, task in self._running.values()}
            await asyncio.wait({change, *tasks}, return_when=asyncio.FIRST_COMPLETED)
        finally:
            change.cancel()
            await asyncio.gather(change, return_exceptions=True)

    def _settle(self) -> None:
        ready = {member.member.id: member for member in self._watch.current.members}
        for id_, (share, task) in list(self._running.items()):
            member = ready.get(id_)
            if task.done():
                del self._running[id_]
                self._take(id_, member.member.name if member else id_, share, task)
            elif member is None or not member.is_ready:
                del self._running[id_]
                task.cancel()
                state = f"is {member.state}: {member.reason}" if member else "was removed"
                self._reasons[id_] = f"{member.member.name if member else id_} {state}"
                self._waiting.appendleft(share)

    def _take(self, id_: str, name: str, share: _Share, task: "asyncio.Task[ShareRows]") -> None:
        try:
            done = task.result()
        except MemberError as error:
            share.tried.add(id_)
            self._reached |= not isinstance(error, Unreachable)
            self._reasons[id_] = f"{name}: {error}"
            if len(share.tried) >= _MOST_TRIES:
                raise self._nobody_left() from error
            self._waiting.appendleft(share)
            return
        self._rows.update(done.rows)
        self._failed |= done.failed

    def _nobody_left(self) -> EngineFault | NoMemberReady:
        reasons = "; ".join(list(self._reasons.values())[:3])
        if reason := self._watch.current.why_not_ready:
            return NoMemberReady(f"{reason}; {reasons}" if reasons else reason)
        text = f"no member could compute a share: {reasons}"
        return EngineFault(text) if self._reached else NoMemberReady(text)
