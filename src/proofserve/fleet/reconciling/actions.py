"""Carries out the actions of a plan: what is stored for all at once, calls one by one."""

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import aiohttp

from proofserve.fleet.errors import RoundOver
from proofserve.fleet.members.client import MemberClient, MemberError
from proofserve.fleet.members.conditions import MemberCondition
from proofserve.fleet.orders import round_order
from proofserve.fleet.reconciling.member_list import MemberList
from proofserve.fleet.reconciling.plan import (
    Action,
    AdoptLane,
    ContinueLane,
    EndLane,
    StartLane,
    StopMember,
)
from proofserve.fleet.records import Desired, FleetRound, Lane, Served
from proofserve.fleet.sql.store import FleetStore
from proofserve.rounds.errors import Refused
from proofserve.wire.paths import FLEET

_logger = logging.getLogger(__name__)


def callback_url(public_url: str, lane: Lane) -> str:
    """Where the member that has ``lane`` sends the callbacks of its round."""
    place = f"members/{lane.member_id}/lanes/{lane.round_id}/{lane.lane}"
    return f"{public_url.rstrip('/')}{FLEET}/{place}"


@dataclass(frozen=True, slots=True)
class Acting:
    """Changes members, and notes it in ``store``. Members reach the fleet at ``public_url``.

    A transaction for each member would make the disk the limit: ``note`` and ``give`` are for all.
    """

    store: FleetStore
    listed: MemberList
    http: aiohttp.ClientSession
    public_url: str

    async def note(self, actions: Sequence[Action]) -> None:
        """Store which lanes members have started, and which ended. Raises StoreUnavailable."""
        started, ended = {}, {}
        for each in actions:
            if isinstance(each, AdoptLane):
                started[each.lane] = each.member_round_id
            elif isinstance(each, EndLane):
                ended[each.lane] = each.reason
                text = "lane %d of member %s ends: %s"
                _logger.info(text, each.lane.lane, each.member_id, each.reason)
        if started or ended:
            await self.store.note_lanes(started, ended)

    async def give(
        self, desired: Desired, served: Served, actions: Sequence[Action]
    ) -> dict[str, Lane | Refused]:
        """The new lane of each member that shall start, or why it gets none.

        ``served`` is what the fleet serves now. Raises StoreUnavailable.
        """
        ids = [each.member_id for each in actions if isinstance(each, StartLane)]
        if not ids or desired.round is None:
            return {}
        try:
            found = await self.store.give_lanes(desired.round.id, ids, served)
        except RoundOver as error:
            # Another controller has stopped it meanwhile.
            return dict.fromkeys(ids, error)
        return dict(zip(ids, found, strict=True))

    async def call(
        self,
        action: Action,
        condition: MemberCondition,
        desired: Desired,
        given: Mapping[str, Lane | Refused],
    ) -> str | None:
        """What went wrong, None if nothing did. Raises StoreUnavailable."""
        client = self.listed.client(self.http, condition.member.url)
        name = condition.member.name
        try:
            match action:
                case StartLane():
                    lane = given[action.member_id]
                    if isinstance(lane, Refused):
                        return str(lane)
                    if desired.round is not None:
                        return await self._start(client, condition, desired.round, lane)
                case ContinueLane():
                    await client.go_on()
                    _logger.info("member %s continues lane %d", name, action.lane.lane)
                case StopMember():
                    await client.stop()
                    _logger.info("member %s is stopped: %s", name, action.reason)
                case AdoptLane() | EndLane():
                    pass  # noted before
        except MemberError as error:
            return str(error)
        return None

    async def _start(
        self, client: MemberClient, condition: MemberCondition, round_: FleetRound, lane: Lane
    ) -> str | None:
        member, deployed = condition.member, condition.deployment
        if deployed is None:
            raise AssertionError("only a member that says what is deployed is ready")
        nonces = round_.nonces_of(lane.lane)
        url = callback_url(self.public_url, lane)
        try:
            await client.start(round_order(round_.spec, nonces, deployed, url))
        except MemberError as error:
            if error.status is not None:
                await self.store.end_lane(lane, f"the member did not start it: {error}")
            # Without an answer it may have started: a later look decides.
            return f"lane {lane.lane} was not started: {error}"
        # The next look tells the member's id of the round, which adopts the lane.
        _logger.info("member %s starts lane %d", member.name, lane.lane)
        return None
