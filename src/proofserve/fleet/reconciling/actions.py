"""Carries out one action of a plan on one member. Each may be repeated."""

import logging
from dataclasses import dataclass

import httpx

from proofserve.fleet.members.client import MemberClient, MemberError
from proofserve.fleet.members.conditions import MemberCondition
from proofserve.fleet.members.member_list import MemberList
from proofserve.fleet.members.member_status import read_status
from proofserve.fleet.orders import round_order
from proofserve.fleet.reconciling.plan import (
    Action,
    AdoptLane,
    ContinueLane,
    EndLane,
    StartLane,
    StopMember,
)
from proofserve.fleet.records import Desired, FleetRound, Lane
from proofserve.fleet.sql.store import FleetStore
from proofserve.wire.paths import FLEET

_logger = logging.getLogger(__name__)


def callback_url(public_url: str, lane: Lane) -> str:
    """Where the member that has ``lane`` sends the callbacks of its round."""
    place = f"members/{lane.member_id}/lanes/{lane.round_id}/{lane.lane}"
    return f"{public_url.rstrip('/')}{FLEET}/{place}"


@dataclass(frozen=True, slots=True)
class Acting:
    """Changes members, and notes it in ``store``. Members reach the fleet at ``public_url``."""

    store: FleetStore
    listed: MemberList
    http: httpx.AsyncClient
    public_url: str

    async def carry_out(
        self, action: Action, condition: MemberCondition, desired: Desired
    ) -> str | None:
        """What went wrong, None if nothing did. Raises StoreUnavailable and Refused."""
        client = self.listed.client(self.http, condition.member.url)
        name = condition.member.name
        try:
            match action:
                case StartLane():
                    if desired.round is not None:
                        return await self._start(client, condition, desired.round)
                case ContinueLane():
                    await client.go_on()
                    _logger.info("member %s continues lane %d", name, action.lane.lane)
                case AdoptLane():
                    await self.store.lane_started(action.lane, action.member_round_id)
                case StopMember():
                    await client.stop()
                    _logger.info("member %s is stopped: %s", name, action.reason)
                case EndLane():
                    await self.store.end_lane(action.lane, action.reason)
                    _logger.info("lane %d of %s ends: %s", action.lane.lane, name, action.reason)
        except MemberError as error:
            return str(error)
        return None

    async def _start(
        self, client: MemberClient, condition: MemberCondition, round_: FleetRound
    ) -> str | None:
        member, deployed = condition.member, condition.deployment
        if deployed is None:
            raise AssertionError("only a member that says what is deployed is ready")
        lane = await self.store.give_lane(round_.id, member.id)
        nonces = round_.nonces_of(lane.lane)
        url = callback_url(self.public_url, lane)
        try:
            await client.start(round_order(round_.spec, nonces, deployed, url))
        except MemberError as error:
            if error.status is not None:
                await self.store.end_lane(lane, f"the member did not start it: {error}")
            # Without an answer it may have started: a later look decides.
            return f"lane {lane.lane} was not started: {error}"
        try:
            status = read_status((await client.status()).body)
        except ValueError as error:
            return f"answered nonsense to GET /status: {error}"
        if status.config is None or not status.config.is_of(round_.spec, nonces):
            return f"lane {lane.lane} was started, and the member proves something else"
        if status.round_id is not None:
            await self.store.lane_started(lane, status.round_id)
        _logger.info("member %s proves lane %d", member.name, lane.lane)
        return None
