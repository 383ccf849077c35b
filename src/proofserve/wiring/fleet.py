"""Builds the controller of a fleet from its settings and its policy, and serves it."""

import hashlib
import importlib.metadata
import logging
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Iterator, Mapping
from contextlib import AsyncExitStack, ExitStack, asynccontextmanager
from functools import partial
from pathlib import Path
from typing import Any

import uvicorn
import uvloop
from fastapi import FastAPI

from proofserve.api.access import Access, Caller, Role, known_key
from proofserve.api.node import Deployment, Node
from proofserve.api.node_page import NodeHistory
from proofserve.dashboard.routes import SnapshotFeed
from proofserve.fleet.app import FleetParts, create_app
from proofserve.fleet.client import member_http
from proofserve.fleet.dashboard import FleetPage
from proofserve.fleet.job_queues import JobSender
from proofserve.fleet.manager import FleetLimits, FleetManager, FleetResults
from proofserve.fleet.members import Rules
from proofserve.fleet.reconciler import DELETE_EVERY_S, MemberList, Reconciler, delete_delivered
from proofserve.fleet.sources import DnsMembers
from proofserve.fleet.sql.database import database_url, is_sqlite
from proofserve.fleet.sql.locks import Leadership, while_leading
from proofserve.fleet.sql.store import FleetStore
from proofserve.fleet.verification import VerificationControl, VerificationPolicy
from proofserve.fleet.verification_records import DAY_S, AfterConviction, JudgedBy, VerificationRule
from proofserve.fleet.watch import FleetWatch
from proofserve.outbox.allowlist import UrlCheck
from proofserve.outbox.planning import CallbackPolicy
from proofserve.outbox.receipts import signing_key
from proofserve.outbox.sender import CallbackSender, Outward
from proofserve.protocol.errors import ProtocolError
from proofserve.protocol.receipts.record import SigningKey
from proofserve.protocol.scheme import ModelFacts
from proofserve.protocol.verdict.nearness import LEAST_NONCES
from proofserve.receiver.callbacks import SignatureCheck
from proofserve.reports import ReportedError
from proofserve.rounds.records import EngineInfo, Limits
from proofserve.rounds.tasks import beside, delete_for_ever
from proofserve.settings.fleet import FleetSettings, PolicyFile, listed_members
from proofserve.settings.node import read_toml
from proofserve.verifier.calibration_file import threshold_of
from proofserve.verifier.judging import COUNT, PAIRED, TESTS
from proofserve.web import http_parts, is_loopback
from proofserve.wiring.access import access_of, allowlist_of, call_limits, outward_of
from proofserve.wiring.sockets import OrderlyServer, bound_sockets

_logger = logging.getLogger(__name__)

# How long connections may take to close after the last answer, seconds.
_CLOSE_S = 5


@asynccontextmanager
async def running_fleet(settings: FleetSettings, public_url: str) -> AsyncIterator[FastAPI]:
    """The application of a controller that works until the context ends.

    Members reach it at ``public_url``. Raises ValueError for settings that contradict each other,
    and StoreUnavailable.
    """
    outward, listed = outward_of(settings, "FLEET_CALLBACK_ALLOW"), member_list(settings)
    access, policy, key = access_of(settings), policy_of(settings.policy), _signing_key(settings)
    async with (
        await FleetStore.open(settings.database) as store,
        member_http() as http,
        AsyncExitStack() as tasks,
    ):
        kept_out = settings.lost_after_sec, settings.max_clock_offset_sec, settings.weights_digest
        watch = FleetWatch(store, Rules(*kept_out), first_deployment(settings, outward))
        reconciler = Reconciler(store, watch, listed, http, public_url)
        client, wake = reconciler.client, reconciler.wake
        manager = FleetManager(store, watch, client, wake, fleet_limits(settings))
        history = NodeHistory(manager.status, lambda: None)
        page = FleetPage(watch, store, history, policy is not None)
        feed = SnapshotFeed(page.snapshot, lambda: manager.is_closing)
        results = FleetResults(store, watch, client)
        limits = call_limits(settings)
        node = Node(watch.limits, manager, results, access, limits, dashboard=feed, key=key)
        parts = _parts(settings, node, reconciler, policy)
        sending = CallbackPolicy(
            max_retries=settings.callback_max_retries,
            max_concurrent=settings.callback_max_concurrent,
        )
        sender = CallbackSender(store, sending, outward=outward)
        await watch.refresh()
        await tasks.enter_async_context(beside("dashboard", history.watch()))
        await tasks.enter_async_context(beside("dashboard-members", page.measure_for_ever()))
        for what, work in _tasks(parts, manager, sender, settings.keep_results_sec):
            await tasks.enter_async_context(beside(what, work))
        try:
            yield create_app(parts, signature_check(settings))
        finally:
            await manager.aclose()
            # Due callbacks go out for a moment, if this process leads.
            if parts.leadership.held and not await sender.drain(settings.shutdown_flush_sec):
                _logger.warning("some callbacks stay in the database; the next leader sends them")


def _parts(
    settings: FleetSettings, node: Node, reconciler: Reconciler, policy: VerificationPolicy | None
) -> FleetParts:
    store, watch, verification = reconciler.store, reconciler.watch, None
    if policy is not None:
        open_sender = partial(JobSender, settings.database)
        keep_s = settings.keep_verdicts_days * DAY_S
        verification = VerificationControl(store.verdicts, watch, policy, open_sender, keep_s)
    return FleetParts(
        node=node,
        store=store,
        watch=watch,
        reconciler=reconciler,
        join_access=join_access(settings, node.access),
        join_check=join_check(settings),
        leadership=Leadership(settings.database, changed=reconciler.wake),
        verification=verification,
    )


def _tasks(
    parts: FleetParts, manager: FleetManager, sender: CallbackSender, keep_s: float
) -> Iterator[tuple[str, Coroutine[Any, Any, None]]]:
    """What runs always, and what runs while this process leads."""
    yield "fleet-view", parts.watch.run()
    yield "fleet-rounds", manager.follow()
    yield "fleet-leadership", parts.leadership.run()
    leading = {
        "fleet-reconciler": parts.reconciler.run,
        "callbacks": sender.run,
        "jobs": manager.jobs.compute_for_ever,
    }
    if keep_s:
        delete, what = partial(delete_delivered, parts.store, keep_s), "delivered results"
        leading["deletion"] = partial(delete_for_ever, delete, keep_s, what, DELETE_EVERY_S)
    if parts.verification is not None:
        leading["verification"] = parts.verification.run
    for what, work in leading.items():
        yield what, while_leading(parts.leadership, work)


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
        if http_parts(public_url) is None:
            raise ValueError(f"--public-url: {public_url!r} is not a URL like http://HOST:7100")
        text = "the fleet listens on %s, port %d; members reach it at %s"
        _logger.info(text, settings.host, port, public_url)

        async def serve() -> None:
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

        uvloop.run(serve())


def _own_url(host: str, port: int) -> str:
    if host in ("", "0.0.0.0", "::"):  # noqa: S104 - refused here
        raise ValueError(
            f"no callback can be sent to {host or 'all addresses'}: give --public-url"
            " http://HOST:PORT, as members reach the fleet"
        )
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


def _signing_key(settings: FleetSettings) -> SigningKey | None:
    """What the fleet signs answers with as one node. Raises ValueError for an unusable file."""
    database, file = database_url(settings.database), settings.key_file
    if file is None and is_sqlite(database):
        file = Path(str(database.database)).with_suffix(".key.pem")
    if file is None:
        # A key of its own for each controller would make one fleet look like several nodes.
        _logger.info("answers are not signed: give every controller the same FLEET_KEY_FILE")
        return None
    return signing_key(file, "FLEET_KEY_FILE")


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


# -- the policy ------------------------------------------------------------------------------------

_ABOUT_WEIGHTS = ("tests", "calibration", "dist_threshold", "p_mismatch")
# These fields belong together: a table that names one of them takes none from [default].
_TOGETHER = (("every_s", "every_nonces"), ("calibration", "dist_threshold", "p_mismatch"))


def policy_of(file: Path | None) -> VerificationPolicy | None:
    """The policy in ``file`` with its calibrations. Raises ValueError naming table and field."""
    if file is None:
        return None
    read, calibrations = read_toml(file, PolicyFile), dict[str, str]()
    if read.default is None and not read.member and not read.model:
        raise ValueError(f"{file}: it has no rule: give [default], [[member]] or [[model]]")
    first = read.default.given() if read.default else {}

    def rule(table: str, own: Mapping[str, Any]) -> VerificationRule:
        inherited = dict(first)
        for group in _TOGETHER:
            if not own.keys().isdisjoint(group):
                inherited = {n: value for n, value in inherited.items() if n not in group}
        fields = {**inherited, **own}
        if "calibration" in fields:
            # Paths in the file are from its own folder.
            fields["calibration"] = file.parent / fields["calibration"]
        if problem := next(_problems(fields), None):
            raise ValueError(f"{file}: {table}: {problem}")
        if "calibration" in fields:
            content = fields["calibration"].read_text("utf-8")
            fields["calibration"] = digest = hashlib.sha256(content.encode()).hexdigest()
            calibrations[digest] = content
        return VerificationRule(**fields)

    default = rule("[default]", {}) if read.default else None
    members = {each.key: rule(f"[[member]] {each.key}", each.given()) for each in read.member}
    models = {each.name: rule(f"[[model]] {each.name}", each.given()) for each in read.model}
    return VerificationPolicy(default, members, models, calibrations)


def _problems(fields: Mapping[str, Any]) -> Iterator[str]:
    """What is wrong with the fields of a rule; later problems may follow from earlier ones."""
    tests, calibration = fields.get("tests", ()), fields.get("calibration")
    if fields.get("by") is JudgedBy.MEMBERS:
        if used := next((name for name in _ABOUT_WEIGHTS if name in fields), None):
            yield f'{used}: it is about weights, and by = "members" has none'
        if fields.get("nonces", LEAST_NONCES) < LEAST_NONCES:
            yield f'nonces: by = "members" needs {LEAST_NONCES} at least'
    if "nonces" not in fields:
        yield "nonces: is needed: the size of a sample"
    if fields.keys().isdisjoint(_TOGETHER[0]):
        yield "every_sec: is needed, or every_nonces: how often a sample is taken"
    if unknown := next((test for test in tests if test not in TESTS), None):
        yield f"tests: {unknown!r} is none of {', '.join(TESTS)}"
    callback = fields.get("conviction") is AfterConviction.CALLBACK
    if callback is not ("callback_url" in fields):
        yield 'callback_url: is needed with conviction = "callback", and only there'
    if PAIRED in tests and calibration is None:
        yield f"calibration: the test {PAIRED} needs the file of `calibrate noise`"
    try:
        given = fields.get("dist_threshold"), calibration, fields.get("p_mismatch")
        threshold_of(*given, needed=COUNT in tests)
    except (ReportedError, ProtocolError) as error:
        named = "dist_threshold" if calibration is None else "calibration"
        yield f"{named}: {error}"
