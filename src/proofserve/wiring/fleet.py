"""Builds the controller of a fleet from its settings and its policy, and serves it."""

import hashlib
import importlib.metadata
import logging
import socket
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Iterator, Mapping
from contextlib import AsyncExitStack, ExitStack, asynccontextmanager
from functools import partial
from pathlib import Path
from typing import Any

import uvicorn
import uvloop
from fastapi import FastAPI

from proofserve.api.access import Access, Caller, Role, known_key
from proofserve.api.node import CallLimits, Deployment, Node
from proofserve.api.node_page import NodeHistory
from proofserve.dashboard.routes import SnapshotFeed
from proofserve.fleet.client import member_http
from proofserve.fleet.conditions import Rules
from proofserve.fleet.dashboard import FleetPage
from proofserve.fleet.job_queues import JobSender
from proofserve.fleet.manager import FleetLimits, FleetManager, FleetResults
from proofserve.fleet.reconciler import MemberList, Reconciler, delete_for_ever
from proofserve.fleet.routes.app import ServedFleet, create_app
from proofserve.fleet.routes.operators import FleetParts
from proofserve.fleet.sources import DnsMembers
from proofserve.fleet.sql.locks import Leadership, while_leading
from proofserve.fleet.sql.store import FleetStore
from proofserve.fleet.verification import VerificationControl, VerificationPolicy
from proofserve.fleet.verification_records import AfterConviction, VerificationRule
from proofserve.fleet.watch import FleetWatch
from proofserve.lab.report import LabError
from proofserve.outbox.callbacks import CallbackPolicy
from proofserve.outbox.post import Outward, UrlCheck
from proofserve.outbox.sender import CallbackSender
from proofserve.protocol.errors import ProtocolError
from proofserve.protocol.scheme import ModelFacts
from proofserve.receiver.callbacks import SignatureCheck
from proofserve.rounds.records import EngineInfo, Limits
from proofserve.rounds.tasks import beside
from proofserve.settings.fleet import FleetSettings, listed_members, read_policy
from proofserve.verifier.judging import OF_A_CALIBRATION, TESTS, threshold_of
from proofserve.web import is_loopback
from proofserve.wiring.access import access_of, allowlist_of, outward_of
from proofserve.wiring.sockets import OrderlyServer, bound_sockets

_logger = logging.getLogger(__name__)

# How long connections may take to close after the last answer, seconds.
_CLOSE_S = 5
_DAY_S = 86_400.0


@asynccontextmanager
async def running_fleet(settings: FleetSettings, public_url: str) -> AsyncIterator[FastAPI]:
    """The application of a controller that works until the context ends.

    ``public_url`` is where members reach it. Raises ValueError for settings that contradict each
    other, and StoreUnavailable.
    """
    outward, listed = outward_of(settings, "FLEET_CALLBACK_ALLOW"), member_list(settings)
    access, policy = access_of(settings), policy_of(settings.policy)
    async with (
        await FleetStore.open(settings.database) as store,
        member_http() as http,
        AsyncExitStack() as tasks,
    ):
        watch = FleetWatch(store, member_rules(settings), first_deployment(settings, outward))
        reconciler = Reconciler(store, watch, listed, http, public_url)
        controller = _Controller(settings, reconciler, outward, policy)
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
        reconciler: Reconciler,
        outward: Outward,
        policy: VerificationPolicy | None,
    ) -> None:
        self._settings = settings
        self._reconciler = reconciler
        self.watch, store, wake = reconciler.watch, reconciler.store, reconciler.wake
        self._leadership = Leadership(settings.database, changed=wake)
        limits = fleet_limits(settings)
        self._manager = FleetManager(store, self.watch, reconciler.client, wake, limits)
        self._round_history = NodeHistory(self._manager.status, lambda: None)
        self._page = FleetPage(self.watch, store, self._round_history, policy is not None)
        self._sender = CallbackSender(store, callback_policy(settings), outward=outward)
        self._verification = _verification(settings, store, self.watch, policy)

    def tasks(self) -> Iterator[tuple[str, Coroutine[Any, Any, None]]]:
        leadership = self._leadership
        yield "fleet-view", self.watch.run()
        yield "fleet-rounds", self._manager.follow()
        yield "fleet-leadership", leadership.run()
        yield "dashboard", self._round_history.watch()
        yield "dashboard-members", self._page.measure_for_ever()
        yield "fleet-reconciler", while_leading(leadership, self._reconciler.run)
        yield "callbacks", while_leading(leadership, self._sender.run)
        yield "jobs", while_leading(leadership, self._manager.jobs.compute_for_ever)
        if keep_s := self._settings.keep_results_sec:
            deleting = partial(delete_for_ever, self._reconciler.store, keep_s)
            yield "deletion", while_leading(leadership, deleting)
        if self._verification is not None:
            yield "verification", while_leading(leadership, self._verification.run)

    def app(self, access: Access) -> FastAPI:
        settings, store = self._settings, self._reconciler.store
        results = FleetResults(store, self.watch, self._reconciler.client)
        limits = CallLimits(
            settings.requests_per_minute,
            settings.max_open_waits,
            settings.challenge_nonces_per_hour,
        )
        feed = SnapshotFeed(self._page.snapshot, lambda: self._manager.is_closing)
        node = Node(self.watch.limits, self._manager, results, access, limits, dashboard=feed)
        parts = FleetParts(
            store=store,
            watch=self.watch,
            manager=self._manager,
            reconciler=self._reconciler,
            join_access=join_access(settings, access),
            join_check=join_check(settings),
            leadership=self._leadership,
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


def run_fleet(settings: FleetSettings) -> None:
    """Serve until a signal. Raises ValueError, OSError and StoreUnavailable."""
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
        await OrderlyServer(config).serve(sockets)


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


def member_list(settings: FleetSettings) -> MemberList:
    key = settings.member_key
    return MemberList(
        listed_members(settings),
        None if settings.dns is None else DnsMembers(settings.dns),
        None if key is None else key.get_secret_value(),
        settings.look_sec,
    )


def fleet_limits(settings: FleetSettings) -> FleetLimits:
    return FleetLimits(
        lanes=settings.lanes,
        start_wait_s=settings.start_wait_sec,
        stop_wait_s=settings.stop_wait_sec,
        jobs=Limits(max_queued_nonces=settings.max_queued_nonces),
    )


def member_rules(settings: FleetSettings) -> Rules:
    return Rules(
        lost_after_s=settings.lost_after_sec,
        max_clock_offset_s=settings.max_clock_offset_sec,
        weights_digest=settings.weights_digest,
    )


def first_deployment(settings: FleetSettings, outward: Outward) -> Deployment:
    """The deployment while no member is known: no model, and the fleet's own limits."""
    nothing = EngineInfo(
        model_names=(),
        facts=ModelFacts(1),
        max_seq_len=1,
        versions={"proofserve": importlib.metadata.version("proofserve")},
    )
    return Deployment(
        engine_info=nothing,
        enabled=True,
        default_batch_size=settings.batch_size_default,
        max_nonces=settings.max_queued_nonces,
        max_callbacks=settings.callback_queue_size,
        max_body_bytes=settings.max_body_bytes,
        check_url=UrlCheck(outward.allowlist, outward.resolve),
    )


def signature_check(settings: FleetSettings) -> SignatureCheck | None:
    secret = settings.member_secret
    return None if secret is None else SignatureCheck(secret.get_secret_value().encode())


def join_access(settings: FleetSettings, access: Access) -> Access:
    """The operators' keys and those for joining; without any key, as for every other call."""
    if not settings.join_key:
        return access
    joining = [
        known_key(key.get_secret_value(), Caller(f"join-{number}", Role.OPERATOR))
        for number, key in enumerate(settings.join_key, 1)
    ]
    return access.with_more(joining)


def join_check(settings: FleetSettings) -> Callable[[str], Awaitable[str | None]]:
    check = UrlCheck(allowlist_of(settings.join_allow, "FLEET_JOIN_ALLOW"))

    async def refusal(url: str) -> str | None:
        try:
            await check(url)
        except ValueError:
            allowed = ", ".join(settings.join_allow)
            return f"members may join from {allowed} only; --join-allow adds to that"
        return None

    return refusal


def callback_policy(settings: FleetSettings) -> CallbackPolicy:
    return CallbackPolicy(
        max_retries=settings.callback_max_retries, max_concurrent=settings.callback_max_concurrent
    )


# -- the policy ------------------------------------------------------------------------------------

# What the file calls otherwise, because it says the unit.
_RENAMED = {"every_sec": "every_s", "timeout_sec": "timeout_s"}
# These fields belong together: a table that names one of them takes none from [default].
_TOGETHER = (("every_sec", "every_nonces"), ("calibration", "dist_threshold", "p_mismatch"))


def policy_of(file: Path | None) -> VerificationPolicy | None:
    """The policy in ``file``, with the calibrations that it names; None for None.

    Raises ValueError naming the file, the table and the field.
    """
    if file is None:
        return None
    read = read_policy(file)
    made = _Rules(file, read.default.given() if read.default else {})
    default = made.rule("[default]", {}) if read.default else None
    members, models = {}, {}
    for member in read.member:
        members[member.key] = made.rule(f"[[member]] {member.key}", member.given())
    for model in read.model:
        models[model.name] = made.rule(f"[[model]] {model.name}", model.given())
    if default is None and not members and not models:
        raise ValueError(f"{file}: it has no rule: give [default], [[member]] or [[model]]")
    return VerificationPolicy(default, members, models, made.calibrations)


class _Rules:
    def __init__(self, file: Path, default: Mapping[str, Any]) -> None:
        self._file = file
        self._default = default
        self.calibrations: dict[str, str] = {}

    def rule(self, table: str, own: Mapping[str, Any]) -> VerificationRule:
        inherited = dict(self._default)
        for group in _TOGETHER:
            if not own.keys().isdisjoint(group):
                inherited = {n: value for n, value in inherited.items() if n not in group}
        fields = {**inherited, **own}
        if problem := self._problem(fields):
            raise ValueError(f"{self._file}: {table}: {problem}")
        if (path := fields.pop("calibration", None)) is not None:
            content = self._path(path).read_text("utf-8")
            digest = hashlib.sha256(content.encode()).hexdigest()
            self.calibrations[digest] = content
            fields["calibration"] = digest
        return VerificationRule(**{_RENAMED.get(n, n): value for n, value in fields.items()})

    def _problem(self, fields: Mapping[str, Any]) -> str | None:
        tests = fields.get("tests", ())
        if "nonces" not in fields:
            return "nonces: is needed: the size of a sample"
        if fields.keys().isdisjoint(_TOGETHER[0]):
            return "every_sec: is needed, or every_nonces: how often a sample is taken"
        if unknown := next((test for test in tests if test not in TESTS), None):
            return f"tests: {unknown!r} is none of {', '.join(TESTS)}"
        callback = fields.get("conviction") is AfterConviction.CALLBACK
        if callback is not ("callback_url" in fields):
            return 'callback_url: is needed with conviction = "callback", and only there'
        return self._problem_of_threshold(fields)

    def _problem_of_threshold(self, fields: Mapping[str, Any]) -> str | None:
        tests, path = fields.get("tests", ()), fields.get("calibration")
        needing = sorted(OF_A_CALIBRATION.intersection(tests))
        if needing and path is None:
            return f"calibration: the test {needing[0]} needs the file of `calibrate noise`"
        given = fields.get("dist_threshold"), path and self._path(path), fields.get("p_mismatch")
        try:
            threshold_of(tests, *given)
        except (LabError, ProtocolError) as error:
            named = "dist_threshold" if path is None else "calibration"
            return f"{named}: {error}"
        return None

    def _path(self, path: Path) -> Path:
        """Paths in the file are from its own folder."""
        return self._file.parent / path
