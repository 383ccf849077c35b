"""The one controller that leads: settles who is a member, looks at all, plans, and acts."""

import asyncio
import logging
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property

import aiohttp

from proofserve.fleet.client import LOOK_S, MemberClient, MemberError, look, round_order
from proofserve.fleet.members import MemberCall, MemberChange, MemberCondition, plan
from proofserve.fleet.records import (
    FleetRound,
    Lane,
    Member,
    MemberLook,
    MemberSource,
    StoreUnavailable,
)
from proofserve.fleet.sources import Address, DnsMembers
from proofserve.fleet.sql.store import FleetStore
from proofserve.fleet.watch import FleetWatch, Overview
from proofserve.rounds.errors import Refused, RoundsError
from proofserve.rounds.tasks import woken
from proofserve.wire import FLEET

_logger = logging.getLogger(__name__)
# How often the members are looked at, and the pause after a pass that changed something. Seconds.
PASS_EVERY_S = 1.0
_AGAIN_S = 0.1
# A pass waits so long for looks and for actions; slower ones are part of a later pass.
_GATHER_S = 0.8
# The pause after an action that failed, doubled by each failure in a row up to the longest.
_FIRST_REST_S = 1.0
_LONGEST_REST_S = 30.0
# A member that joined by itself and has not answered for so long is forgotten. Seconds.
FORGOTTEN_AFTER_S = 24 * 3600.0
# How often old results are deleted, and the pause between two steps, so that new results have most
# of the database's time. Seconds.
DELETE_EVERY_S = 60.0
_PAUSE_S = 0.05


@dataclass(frozen=True, eq=False, repr=False)
class MemberList:
    """The members that settings name: those listed, and those of a name in the DNS.

    ``_key`` is the API key of members without one of their own, ``_look_s`` how long a look may
    take.
    """

    _listed: Sequence[Address] = ()
    _dns: DnsMembers | None = None
    _key: str | None = None
    _look_s: float = LOOK_S

    @cached_property
    def _keys(self) -> Mapping[str, str]:
        return {each.url: each.key for each in self._listed if each.key is not None}

    def client(self, http: aiohttp.ClientSession, url: str) -> MemberClient:
        return MemberClient(http, url, self._keys.get(url, self._key), self._look_s)

    async def settle(self, store: FleetStore, overview: Overview) -> bool:
        """Add members that are named and not known, and remove those named no more.

        A member that left the DNS or the list is removed only once it does not answer, and one that
        joined by itself after a day of silence. Returns whether the database was changed. Raises
        StoreUnavailable.
        """
        of_dns = await self._dns.addresses() if self._dns else ()
        wanted = {each.url: each for each in (*(of_dns or ()), *self._listed)}
        known = {each.member.url: each for each in overview.members}
        changed = False
        for each in (each for url, each in wanted.items() if url not in known):
            try:
                member = await store.put_member(each.url, each.name, each.source)
            except Refused as error:
                _logger.error("member %s is not added: %s", each.name, error)  # noqa: TRY400
            else:
                _logger.info("member %s (%s) is in the fleet", member.name, member.url)
                changed = True
        for url, condition in known.items():
            member = condition.member
            if url in wanted or condition.answered:
                continue
            silent_s = overview.view.at - (member.seen.at if member.seen else member.added_at)
            if member.source is MemberSource.JOINED:
                reason = "it was silent for a day" if silent_s > FORGOTTEN_AFTER_S else None
            else:
                # A resolver that fails says nothing about the members.
                reason = None if of_dns is None else "its address is named no more"
            if reason is not None:
                _logger.info("member %s is removed: %s", member.name, reason)
                await store.remove_member(member.id, reason)
                changed = True
        return changed


@dataclass(eq=False, repr=False)
class Reconciler:
    """Brings members to the desired state of the database. They reach the fleet at ``public_url``.

    Run one at a time: ``run`` must be cancelled when the process leads no more. Whatever is
    interrupted, a later pass of any controller repairs. A transaction for each member would make
    the disk the limit: one is for all.
    """

    store: FleetStore
    watch: FleetWatch
    _listed: MemberList
    _http: aiohttp.ClientSession
    _public_url: str
    pass_s: float = field(default=0.0, init=False)
    """How long the last pass over all members took, seconds; 0 before the first one."""
    longest_pass_s: float = field(default=0.0, init=False)
    _wake: asyncio.Event = field(default_factory=asyncio.Event, init=False)
    _looks: dict[str, asyncio.Task[MemberLook]] = field(default_factory=dict, init=False)
    _actions: dict[str, asyncio.Task[None]] = field(default_factory=dict, init=False)
    # How often actions on a member failed in a row, and until when it is left alone.
    _troubles: dict[str, tuple[int, float]] = field(default_factory=dict, init=False)

    def client(self, url: str) -> MemberClient:
        return self._listed.client(self._http, url)

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
                    self.pass_s = time.monotonic() - began
                    self.longest_pass_s = max(self.longest_pass_s, self.pass_s)
                except StoreUnavailable as error:
                    _logger.warning("members are not reconciled: %s", error)
                except Exception:
                    # The next pass may succeed; without passes the fleet would be dead.
                    _logger.exception("a pass over the members failed")
                await woken(self._wake, _AGAIN_S if acted else PASS_EVERY_S)
        finally:
            tasks = [*self._looks.values(), *self._actions.values()]
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            self._looks.clear()
            self._actions.clear()

    async def reconcile(self) -> bool:
        """One pass. Returns whether anything was to be done. Raises StoreUnavailable."""
        overview = await self.watch.refresh()
        if await self._listed.settle(self.store, overview):
            overview = await self.watch.refresh()
        looked_at = await self._look(overview)
        overview = await self.watch.refresh()
        now, held = time.time(), overview.by_id.keys() - looked_at
        held |= self._actions.keys()
        held |= {id_ for id_, (_, until) in self._troubles.items() if now < until}
        changes = plan(overview.desired, overview.members, overview.lanes, held, now)
        if changes:
            await self._act(overview, changes)
            await self.watch.refresh()
        return bool(changes)

    async def _look(self, overview: Overview) -> set[str]:
        """Look at the members that no action is about. Returns the ids of those that were seen."""
        for id_, condition in overview.by_id.items():
            # What a member does while an action changes it would be out of date at once.
            if id_ not in self._looks and id_ not in self._actions:
                looking = self._look_at(condition.member)
                self._looks[id_] = asyncio.create_task(looking)
        if self._looks:
            await asyncio.wait(self._looks.values(), timeout=_GATHER_S)
        done = {id_: task for id_, task in self._looks.items() if task.done()}
        for id_ in done:
            del self._looks[id_]
        reports = {id_: task.result() for id_, task in done.items() if id_ in overview.by_id}
        if reports:
            await self.store.add_looks(reports)
        return set(reports)

    async def _look_at(self, member: Member) -> MemberLook:
        """A fault of ours in one look must not hide the other members."""
        client = self.client(member.url)
        try:
            return await look(client, member.seen, time.time())
        except Exception as error:
            _logger.exception("the look at %s failed", member.name)
            text = f"internal error ({type(error).__name__}), see the fleet's log"
            before = member.seen or MemberLook(time.time(), answered=False)
            return replace(before, answered=False, error=text)

    async def _act(self, overview: Overview, changes: Sequence[MemberChange]) -> None:
        started = {lane: id_ for each in changes for lane, id_ in each.adopted.items()}
        ended = {lane: reason for each in changes for lane, reason in each.ended.items()}
        for lane, reason in ended.items():
            _logger.info("lane %d of member %s ends: %s", lane.lane, lane.member_id, reason)
        if started or ended:
            await self.store.note_lanes(started, ended)
        round_, given = overview.desired.round, dict[str, Lane | Refused]()
        starting = [each.member_id for each in changes if each.call is MemberCall.START]
        if starting and round_ is not None:
            found = await self.store.give_lanes(round_.id, starting, *overview.served)
            given = dict(zip(starting, found, strict=True))
        calls = {
            each.member_id: asyncio.create_task(
                self._call(overview.by_id[each.member_id], each, round_, given.get(each.member_id))
            )
            for each in changes
            if each.call is not None
        }
        for each in changes:
            if each.call is None:
                self._troubles.pop(each.member_id, None)
        self._actions |= calls
        if calls:
            await asyncio.wait(calls.values(), timeout=_GATHER_S)

    async def _call(
        self,
        condition: MemberCondition,
        change: MemberChange,
        round_: FleetRound | None,
        given: Lane | Refused | None,
    ) -> None:
        id_, name = condition.member.id, condition.member.name
        client = self.client(condition.member.url)
        try:
            if change.call is MemberCall.CONTINUE:
                await client.change("/phase/generate")
                _logger.info("member %s continues %s", name, change.why)
            elif change.call is MemberCall.STOP:
                await client.change("/stop")
                _logger.info("member %s is stopped: %s", name, change.why)
            elif round_ is not None and given is not None:
                await self._start(client, condition, round_, given)
            self._troubles.pop(id_, None)
        except (MemberError, RoundsError) as error:
            # RoundsError: the database is gone, or another controller has changed it meanwhile.
            _logger.warning("member %s: %s", name, error)
            self._rest(id_)
        except Exception:
            _logger.exception("an action on member %s failed", name)
            self._rest(id_)
        finally:
            del self._actions[id_]

    async def _start(
        self,
        client: MemberClient,
        condition: MemberCondition,
        round_: FleetRound,
        lane: Lane | Refused,
    ) -> None:
        """Raises MemberError, StoreUnavailable, and the refusal of a lane."""
        if isinstance(lane, Refused):
            raise lane
        member, deployed = condition.member, condition.deployment
        if deployed is None:
            raise AssertionError("only a member that says what is deployed is ready")
        nonces = round_.nonces_of(lane.lane)
        # Where the member sends the callbacks of its round.
        place = f"members/{lane.member_id}/lanes/{lane.round_id}/{lane.lane}"
        url = f"{self._public_url.rstrip('/')}{FLEET}/{place}"
        try:
            await client.change("/init/generate", round_order(round_.spec, nonces, deployed, url))
        except MemberError as error:
            if error.status is not None:
                why = f"the member did not start it: {error}"
                await self.store.note_lanes({}, {lane: why})
            # Without an answer it may have started: a later look decides.
            text = f"lane {lane.lane} was not started: {error}"
            raise MemberError(text, error.status) from error
        # The next look tells the member's id of the round, which adopts the lane.
        _logger.info("member %s starts lane %d", member.name, lane.lane)

    def _rest(self, id_: str) -> None:
        failures, _ = self._troubles.get(id_, (0, 0.0))
        pause_s = min(_FIRST_REST_S * 2.0**failures, _LONGEST_REST_S)
        self._troubles[id_] = (min(failures + 1, 10), time.time() + pause_s)


async def delete_delivered(store: FleetStore, keep_s: float) -> None:
    """Delete all that was delivered ``keep_s`` seconds ago. Raises StoreUnavailable."""
    found = True
    while found:
        found = await store.delete_delivered(keep_s)
        await asyncio.sleep(_PAUSE_S)
