"""Builds the controller of a fleet from its settings, and serves it."""

import logging
import socket
import time
from collections.abc import AsyncIterator, Coroutine, Iterator
from contextlib import AsyncExitStack, ExitStack, asynccontextmanager, contextmanager
from functools import partial
from typing import Any

import uvicorn
import uvloop
from fastapi import FastAPI

from proofserve.api.access import Access
from proofserve.api.node import Challenges, Node, Rates, Waits
from proofserve.api.node_page import NodeHistory
from proofserve.dashboard.routes import SnapshotFeed
from proofserve.fleet.dashboard import FleetPage, MemberHistory
from proofserve.fleet.manager import FleetManager, FleetResults
from proofserve.fleet.members.client import MemberClient, member_http
from proofserve.fleet.reconciler import MemberActions, Reconciler, delete_for_ever
from proofserve.fleet.routes.app import ServedFleet, create_app
from proofserve.fleet.routes.operators import FleetParts
from proofserve.fleet.sql.locks import Leadership, while_leading
from proofserve.fleet.sql.store import FleetStore
from proofserve.fleet.verification.control import VerificationControl, VerificationPolicy
from proofserve.fleet.verification.durable import JobSender
from proofserve.fleet.watch import FleetWatch
from proofserve.outbox.post import Outward
from proofserve.outbox.sender import CallbackSender
from proofserve.rounds.tasks import beside
from proofserve.settings.fleet import FleetSettings
from proofserve.web import is_loopback
from proofserve.wiring.access import access_of
from proofserve.wiring.controller.records import (
    callback_policy,
    first_deployment,
    fleet_limits,
    join_access,
    join_check,
    member_list,
    member_rules,
    outward_of,
    signature_check,
)
from proofserve.wiring.listen import bound_sockets
from proofserve.wiring.verification.policy import policy_of

_logger = logging.getLogger(__name__)

# How long connections may take to close after the last answer, seconds.
_CLOSE_S = 5
_DAY_S = 86_400.0


@asynccontextmanager
async def running_fleet(settings: FleetSettings, public_url: str) -> AsyncIterator[FastAPI]:
    """The application of a controller that works until the context ends.

    ``public_url`` is where members reach it. Raises ValueError for settings that contradict each
    other, NewerDatabase and StoreUnavailable.
    """
    outward, listed = outward_of(settings), member_list(settings)
    access, policy = access_of(settings), policy_of(settings.policy)
    async with (
        await FleetStore.open(settings.database) as store,
        member_http() as http,
        AsyncExitStack() as tasks,
    ):
        acting = MemberActions(store, listed, http, public_url)
        controller = _Controller(settings, acting, outward, policy)
        await controller.watch.refresh()
        for what, work in controller.tasks():
            await tasks.enter_async_context(beside(what, work))
        try:
            yield controller.app(access)
        finally:
            await controller.finish()


class _Controller:
    """The objects of a controller."""

    def __init__(
        self,
        settings: FleetSettings,
        acting: MemberActions,
        outward: Outward,
        policy: VerificationPolicy | None,
    ) -> None:
        self._settings = settings
        self._acting = acting
        self._limits = first_deployment(settings, outward)
        store = acting.store
        self.watch = FleetWatch(store, member_rules(settings), self._limits)
        self._reconciler = Reconciler(store, self.watch, acting.listed, acting)
        wake = self._reconciler.wake
        self._leadership = Leadership(settings.database, changed=wake)
        self._manager = FleetManager(store, self.watch, self._client, wake, fleet_limits(settings))
        self._round_history = NodeHistory(self._manager.status, lambda: None)
        self._member_history = MemberHistory(self.watch)
        self._sender = CallbackSender(store, callback_policy(settings), outward=outward)
        self._verification = _verification(settings, acting.store, self.watch, policy)

    def tasks(self) -> Iterator[tuple[str, Coroutine[Any, Any, None]]]:
        leadership = self._leadership
        yield "fleet-view", self.watch.run()
        yield "fleet-rounds", self._manager.follow()
        yield "fleet-leadership", leadership.run()
        yield "dashboard", self._round_history.watch()
        yield "dashboard-members", self._member_history.measure_for_ever()
        yield "fleet-reconciler", while_leading(leadership, self._reconciler.run)
        yield "callbacks", while_leading(leadership, self._sender.run)
        yield "jobs", while_leading(leadership, self._manager.jobs.compute_for_ever)
        if keep_s := self._settings.keep_results_sec:
            deleting = partial(delete_for_ever, self._acting.store, keep_s)
            yield "deletion", while_leading(leadership, deleting)
        if self._verification is not None:
            yield "verification", while_leading(leadership, self._verification.run)

    def app(self, access: Access) -> FastAPI:
        settings, store = self._settings, self._acting.store
        results = FleetResults(store, self.watch, self._client)
        rates, waits = Rates(settings.requests_per_minute), Waits(settings.max_open_waits)
        limits = rates, waits, Challenges(settings.challenge_nonces_per_hour)
        histories, verifies = (self._round_history, self._member_history), self._verification
        page = FleetPage(self.watch, results, *histories, verifies is not None)
        feed = SnapshotFeed(page.snapshot, lambda: self._manager.is_closing)
        node = Node(self._limits, self._manager, results, access, *limits, dashboard=feed)
        parts = FleetParts(
            store=store,
            watch=self.watch,
            manager=self._manager,
            wake=self._reconciler.wake,
            clock=time.time,
            join_access=join_access(settings, access),
            join_check=join_check(settings),
            client=self._client,
            leadership=self._leadership,
            passes=self._reconciler.times,
            verification=self._verification,
        )
        served = ServedFleet(self.watch, node)
        return create_app(parts, served, signature_check(settings), bool(access.names))

    async def finish(self) -> None:
        """Refuse new work, and send due callbacks for a moment if this process leads."""
        await self._manager.aclose()
        seconds = self._settings.shutdown_flush_sec
        if self._leadership.held and not await self._sender.drain(seconds):
            _logger.warning("some callbacks stay in the database; the next leader sends them")

    def _client(self, url: str) -> MemberClient:
        return self._acting.listed.client(self._acting.http, url)


def run_fleet(settings: FleetSettings) -> None:
    """Serve until a signal. Raises ValueError, OSError, NewerDatabase and StoreUnavailable."""
    _require_safe(settings)
    policy_of(settings.policy)
    with ExitStack() as bound:
        sockets = bound_sockets(settings.host, settings.port)
        for each in sockets:
            bound.callback(each.close)
        port = sockets[0].getsockname()[1]
        public_url = settings.public_url or _own_url(settings.host, port)
        text = "the fleet listens on %s, port %d; members reach it at %s"
        _logger.info(text, settings.host, port, public_url)
        uvloop.run(_serve(settings, public_url, sockets))


async def _serve(settings: FleetSettings, public_url: str, sockets: list[socket.socket]) -> None:
    async with running_fleet(settings, public_url) as app:
        config = uvicorn.Config(
            app,
            ws="none",
            lifespan="off",
            access_log=False,
            server_header=False,
            timeout_graceful_shutdown=_CLOSE_S,
        )
        await _FleetServer(config).serve(sockets)


class _FleetServer(uvicorn.Server):
    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Do not raise the signal again at the end: the exit code of an ordered end is 0."""
        with super().capture_signals():
            yield
            self._captured_signals.clear()


def _own_url(host: str, port: int) -> str:
    if host in ("", "0.0.0.0", "::"):  # noqa: S104 - refused here
        raise ValueError(
            f"no callback can be sent to {host or 'all addresses'}: give --public-url"
            " http://HOST:PORT, as members reach the fleet"
        )
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


def _require_safe(settings: FleetSettings) -> None:
    """Raise ValueError for a controller that other machines reach, without keys or a secret."""
    if settings.host == "localhost" or is_loopback(settings.host) or settings.allow_anonymous:
        return
    access = access_of(settings)
    if not access.names:
        raise ValueError(
            f"the fleet would listen on {settings.host} and has no key: set FLEET_API_KEY (or"
            " --api-key, FLEET_API_KEYS_FILE), or listen with --host 127.0.0.1, or allow every"
            " client with --allow-anonymous"
        )
    if settings.member_secret is None:
        raise ValueError(
            f"the fleet would listen on {settings.host} and take results of any sender: set"
            " FLEET_MEMBER_SECRET, and POC_CALLBACK_SECRET of every member to the same"
        )


def _verification(
    settings: FleetSettings, store: FleetStore, watch: FleetWatch, policy: VerificationPolicy | None
) -> VerificationControl | None:
    if policy is None:
        return None
    open_sender = partial(JobSender, settings.database)
    keep_s = settings.keep_verdicts_days * _DAY_S
    return VerificationControl(store.verdicts, watch, policy, open_sender, keep_s)
