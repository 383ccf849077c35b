"""Keeps the members of the database equal to the lists that name them, and makes their clients."""

import logging
from collections.abc import Sequence

import aiohttp

from proofserve.fleet.errors import FleetFull
from proofserve.fleet.members.client import CallTimes, MemberClient
from proofserve.fleet.members.conditions import MemberCondition
from proofserve.fleet.members.sources import Address, DnsMembers
from proofserve.fleet.records import MemberSource
from proofserve.fleet.sql.store import FleetStore
from proofserve.fleet.watch import Overview

_logger = logging.getLogger(__name__)

# A member that joined by itself and has not answered for so long is forgotten. Seconds.
FORGOTTEN_AFTER_S = 24 * 3600.0


class MemberList:
    """The members that settings name: ``listed``, and those of ``dns``.

    ``key`` is the API key of members without one of their own.
    """

    def __init__(
        self,
        listed: Sequence[Address] = (),
        dns: DnsMembers | None = None,
        key: str | None = None,
        times: CallTimes | None = None,
    ) -> None:
        self._listed = tuple(listed)
        self._dns = dns
        self._key = key
        self._keys = {each.url: each.key for each in listed if each.key is not None}
        self._times = times or CallTimes()
        self._dns_known = dns is None

    def client(self, http: aiohttp.ClientSession, url: str) -> MemberClient:
        return MemberClient(http, url, self._keys.get(url, self._key), self._times)

    async def settle(self, store: FleetStore, overview: Overview) -> bool:
        """Add members that are named and not known, and remove those named no more.

        A member that left the DNS or the list is removed only once it does not answer, and one that
        joined by itself after a day of silence. Returns whether the database was changed. Raises
        StoreUnavailable.
        """
        wanted = {each.url: each for each in (*await self._of_dns(), *self._listed)}
        known = {each.member.url: each for each in overview.members}
        changed = False
        for url, each in wanted.items():
            if url not in known:
                changed |= await self._add(store, each)
        for url, condition in known.items():
            member = condition.member
            if url not in wanted and (reason := self._why_gone(condition, overview.view.at)):
                _logger.info("member %s is removed: %s", member.name, reason)
                await store.remove_member(member.id, reason)
                changed = True
        return changed

    def _why_gone(self, condition: MemberCondition, now: float) -> str | None:
        """Why a member that is not named is removed; None if it stays."""
        member = condition.member
        if condition.answered:
            return None
        if member.source is not MemberSource.JOINED:
            return "its address is named no more" if self._dns_known else None
        silent_s = now - (member.seen.at if member.seen else member.added_at)
        return "it was silent for a day" if silent_s > FORGOTTEN_AFTER_S else None

    async def _add(self, store: FleetStore, each: Address) -> bool:
        try:
            member = await store.put_member(each.url, each.name, each.source)
        except FleetFull as error:
            _logger.error("member %s is not added: %s", each.name, error)  # noqa: TRY400
            return False
        _logger.info("member %s (%s) is in the fleet", member.name, member.url)
        return True

    async def _of_dns(self) -> Sequence[Address]:
        if self._dns is None:
            return ()
        try:
            found = await self._dns.addresses()
        except OSError as error:
            # The members stay: a resolver that fails says nothing about them.
            self._dns_known = False
            _logger.warning("%s cannot be looked up: %s", self._dns.host, error)
            return ()
        self._dns_known = True
        return found
