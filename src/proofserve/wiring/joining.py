"""Tells a fleet that this node is there: once the server is up, and again every half a minute.

A fleet that cannot be reached, or refuses the node, never keeps it from serving.
"""

import asyncio
import logging
import socket
import time
from contextlib import suppress
from dataclasses import dataclass

import httpx

from proofserve.rounds.status import FleetMembership
from proofserve.settings.node import NodeSettings
from proofserve.web import http_parts
from proofserve.wire import FLEET, PROOFS

_logger = logging.getLogger(__name__)

MEMBERS = f"{FLEET}/members"
# Seconds between two signs of life, and the most that the fleet may take for one.
EVERY_S = 30.0
ANSWER_S = 10.0
# How long this node may take to answer under its own address before it joins all the same: some
# networks do not lead a machine back to itself.
UP_S = 30.0
LOOK_S = 0.5
# The most of a refusal that is read and shown, bytes.
SHOWN = 200


def joining_of(settings: NodeSettings) -> "FleetJoining | None":
    """How the settings have this node join a fleet; None for a node without a fleet.

    Raises ValueError, naming the variable, for a URL that is none and for a missing one or key.
    """
    if settings.fleet is None:
        return None
    key = settings.fleet_key.get_secret_value() if settings.fleet_key else ""
    if not key:
        raise ValueError("POC_FLEET_KEY: the fleet that POC_FLEET names lets no node join without")
    if settings.fleet_address is None:
        raise ValueError(
            "POC_FLEET_ADDRESS: give the URL under which the fleet reaches this node, such as"
            " http://10.0.0.5:8000"
        )
    fleet = _url("POC_FLEET", settings.fleet)
    address = _url("POC_FLEET_ADDRESS", settings.fleet_address)
    return FleetJoining(fleet, key, settings.fleet_name or socket.gethostname(), address)


def _url(variable: str, text: str) -> str:
    parts = http_parts(text)
    if parts is None or parts.username or parts.query or parts.fragment:
        raise ValueError(
            f"{variable} must be a URL such as http://fleet.example:9100, without user, query and"
            " fragment"
        )
    return text.rstrip("/")


@dataclass(eq=False, repr=False)
class FleetJoining:
    """Joins again and again while ``run`` runs. Both URLs are without a slash at the end."""

    fleet: str
    _key: str
    name: str
    address: str
    _joined_at: float | None = None
    _error: str | None = "not asked yet"

    def status(self) -> FleetMembership:
        since = None if self._joined_at is None else time.monotonic() - self._joined_at
        return FleetMembership(self.fleet, self.name, self.address, since, self._error)

    async def run(self) -> None:
        # No proxy of the environment: fleet and node are of one network.
        async with httpx.AsyncClient(timeout=ANSWER_S, trust_env=False) as http:
            await self._until_up(http)
            while True:
                began = time.monotonic()
                known, self._error = self._error, await self._refusal(http)
                if self._error is None:
                    self._joined_at = time.monotonic()
                    if known is not None:
                        _logger.info("a member of the fleet %s as %s", self.fleet, self.name)
                elif self._error != known:
                    text = "not in the fleet, the node serves all the same: %s"
                    _logger.warning(text, self._error)
                await asyncio.sleep(max(0.0, EVERY_S - (time.monotonic() - began)))

    async def _until_up(self, http: httpx.AsyncClient) -> None:
        """Wait until this node answers under the address that the fleet will use."""
        deadline = time.monotonic() + UP_S
        live = f"{self.address}{PROOFS}/health/live"
        while time.monotonic() < deadline:
            with suppress(httpx.HTTPError):
                if (await http.get(live, timeout=LOOK_S)).is_success:
                    return
            await asyncio.sleep(LOOK_S)
        text = "%s does not answer here; does POC_FLEET_ADDRESS lead the fleet to this node?"
        _logger.warning(text, live)

    async def _refusal(self, http: httpx.AsyncClient) -> str | None:
        """Send one sign of life. Returns why the fleet did not take it, None if it did."""
        url = f"{self.fleet}{MEMBERS}"
        body = {"url": self.address, "name": self.name}
        headers = {"Authorization": f"Bearer {self._key}"}
        try:
            async with (
                asyncio.timeout(ANSWER_S),
                http.stream("POST", url, json=body, headers=headers) as answer,
            ):
                if answer.is_success:
                    return None
                read = b""
                async for part in answer.aiter_bytes(SHOWN):
                    read += part
                    if len(read) >= SHOWN:
                        break
                beginning = read[:SHOWN].decode(errors="replace")
                return f"{url} answers {answer.status_code}: {beginning}"
        except TimeoutError:
            return f"{url} did not answer within {ANSWER_S:g} s"
        except httpx.HTTPError as error:
            return f"{url} cannot be asked: {error or type(error).__name__}"
