"""Looks at all members, plans, and acts; again and again, in the one controller that leads."""

import asyncio
import logging
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

import aiohttp

from proofserve.fleet.errors import StoreUnavailable
from proofserve.fleet.members.conditions import MemberCondition
from proofserve.fleet.members.looking import look
from proofserve.fleet.reconciling import plan as planning
from proofserve.fleet.reconciling.actions import Acting
from proofserve.fleet.reconciling.member_list import MemberList
from proofserve.fleet.reconciling.plan import Action
from proofserve.fleet.records import Desired, Lane, Member, Seen
from proofserve.fleet.sql.store import FleetStore
from proofserve.fleet.watch import FleetWatch, Overview
from proofserve.rounds.errors import Refused, RoundsError

_logger = logging.getLogger(__name__)

# How often the members are looked at, and the pause after a pass that changed something. Seconds.
PASS_EVERY_S = 1.0
_AGAIN_S = 0.1
# A pass waits so long for looks and for actions; slower ones are part of a later pass.
_GATHER_S = 0.8
# The pause after an action that failed, doubled by each failure in a row up to the longest.
_FIRST_REST_S = 1.0
_LONGEST_REST_S = 30.0


@dataclass(slots=True)
class PassTimes:
    """How long passes over all members took, seconds; 0 before the first one."""

    last_s: float = 0.0
    longest_s: float = 0.0

    def add(self, seconds: float) -> None:
        self.last_s, self.longest_s = seconds, max(self.longest_s, seconds)


@dataclass(slots=True)
class _Trouble:
    failures: int = 0
    until: float = 0.0


class Reconciler:
    """Brings members to the desired state of the database. ``clock`` gives wall-clock seconds.

    Run one at a time: ``run`` must be cancelled when the process leads no more. Whatever is
    interrupted, a later pass of any controller repairs.
    """

    def __init__(
        self,
        store: FleetStore,
        watch: FleetWatch,
        listed: MemberList,
        acting: Acting,
        clock: Callable[[], float] = time.time,
    ) -> None:
        self._store = store
        self._watch = watch
        self._listed = listed
        self._acting = acting
        self._clock = clock
        self.times = PassTimes()
        self._wake = asyncio.Event()
        self._looks: dict[str, asyncio.Task[Seen]] = {}
        self._actions: dict[str, asyncio.Task[None]] = {}
        self._troubles: dict[str, _Trouble] = {}

    @property
    def http(self) -> aiohttp.ClientSession:
        return self._acting.http

    def wake(self) -> None:
        """Begin the next pass now."""
        self._wake.set()

    async def run(self) -> None:
        """Reconcile until cancelled."""
        try:
            while True:
                self._wake.clear()
                acted, began = False, time.monotonic()
                try:
                    acted = await self.reconcile()
                    self.times.add(time.monotonic() - began)
                except StoreUnavailable as error:
                    _logger.warning("members are not reconciled: %s", error)
                except Exception:
                    # The next pass may succeed; without passes the fleet would be dead.
                    _logger.exception("a pass over the members failed")
                await self._pause(_AGAIN_S if acted else PASS_EVERY_S)
        finally:
            tasks = [*self._looks.values(), *self._actions.values()]
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            self._looks.clear()
            self._actions.clear()

    async def reconcile(self) -> bool:
        """One pass. Returns whether anything was to be done. Raises StoreUnavailable."""
        overview = await self._watch.refresh()
        if await self._listed.settle(self._store, overview):
            overview = await self._watch.refresh()
        looked_at = await self._look(overview)
        overview = await self._watch.refresh()
        held = {each.member.id for each in overview.members} - looked_at
        held |= self._actions.keys() | self._resting()
        actions = planning.plan(
            overview.desired, overview.members, overview.lanes, held, self._clock()
        )
        if actions:
            await self._act(overview, actions)
            await self._watch.refresh()
        return bool(actions)

    async def _look(self, overview: Overview) -> set[str]:
        """Look at the members that no action is about. Returns the ids of those that were seen."""
        members = {each.member.id: each.member for each in overview.members}
        for member in members.values():
            # What a member does while an action changes it would be out of date at once.
            if member.id not in self._looks and member.id not in self._actions:
                looking = self._look_at(member)
                self._looks[member.id] = asyncio.create_task(looking)
        if self._looks:
            await asyncio.wait(self._looks.values(), timeout=_GATHER_S)
        done = {id_: task for id_, task in self._looks.items() if task.done()}
        for id_ in done:
            del self._looks[id_]
        reports = {id_: task.result() for id_, task in done.items() if id_ in members}
        if reports:
            await self._store.seen(reports)
        return set(reports)

    async def _look_at(self, member: Member) -> Seen:
        """A fault of ours in one look must not hide the other members."""
        client = self._listed.client(self.http, member.url)
        try:
            return await look(client, member.seen, self._clock())
        except Exception as error:
            _logger.exception("the look at %s failed", member.name)
            text = f"internal error ({type(error).__name__}), see the fleet's log"
            before = member.seen or Seen(self._clock(), answered=False)
            return replace(before, answered=False, error=text)

    async def _act(self, overview: Overview, actions: Sequence[Action]) -> None:
        await self._acting.note(actions)
        given = await self._acting.give(overview.desired, overview.served, actions)
        conditions = {each.member.id: each for each in overview.members}
        by_member: dict[str, list[Action]] = {}
        for action in actions:
            by_member.setdefault(action.member_id, []).append(action)
        began = [
            asyncio.create_task(self._call(conditions[id_], overview.desired, own, given))
            for id_, own in by_member.items()
        ]
        self._actions.update(zip(by_member, began, strict=True))
        await asyncio.wait(began, timeout=_GATHER_S)

    async def _call(
        self,
        condition: MemberCondition,
        desired: Desired,
        actions: Sequence[Action],
        given: Mapping[str, Lane | Refused],
    ) -> None:
        """Make the calls of one member, one after another."""
        id_, name = condition.member.id, condition.member.name
        try:
            for action in actions:
                if error := await self._acting.call(action, condition, desired, given):
                    _logger.warning("member %s: %s", name, error)
                    self._rest(id_)
                    return
            self._troubles.pop(id_, None)
        except RoundsError as error:
            # The database is gone, or another controller has changed it meanwhile.
            _logger.warning("member %s: %s", name, error)
            self._rest(id_)
        except Exception:
            _logger.exception("an action on member %s failed", name)
            self._rest(id_)
        finally:
            del self._actions[id_]

    def _rest(self, id_: str) -> None:
        trouble = self._troubles.setdefault(id_, _Trouble())
        pause_s = min(_FIRST_REST_S * 2.0**trouble.failures, _LONGEST_REST_S)
        trouble.failures = min(trouble.failures + 1, 10)
        trouble.until = self._clock() + pause_s

    def _resting(self) -> set[str]:
        now = self._clock()
        return {id_ for id_, trouble in self._troubles.items() if now < trouble.until}

    async def _pause(self, seconds: float) -> None:
        try:
            async with asyncio.timeout(seconds):
                await self._wake.wait()
        except TimeoutError:
            return
