"""Builds the gateway from the settings, and runs it."""

import logging
import math
import os
import re
import resource
import shlex
import socket
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from functools import partial
from urllib.parse import urlsplit

import uvicorn
from fastapi import FastAPI
from starlette.types import ASGIApp
from uvicorn.supervisors import Multiprocess

from proofserve.gateway.app import build
from proofserve.gateway.gateway import Gateway
from proofserve.gateway.limits import redis_client
from proofserve.gateway.protocol import GatewayProtocol
from proofserve.gateway.records import BackendSpec, GatewayPlan, Timeouts
from proofserve.gateway.tracing import exported
from proofserve.settings.gateway import GatewaySettings, client_keys
from proofserve.settings.node import EngineSettings
from proofserve.settings.process import export, has_variable, plugin_list, trace_export
from proofserve.web import http_parts
from proofserve.wire import PROOFS, RECEIPTS
from proofserve.wiring.launch import SERVICE_NAME, runner_choice, trace_options, trace_variables
from proofserve.wiring.sockets import OrderlyServer, bound_sockets, cannot_listen, on_unix_socket

# uvicorn's: a logger of this package has no handler in this process.
log = logging.getLogger("uvicorn.error")
# Longest pause between two requests of a connection, seconds; nginx closes after 75 s as well.
KEEP_ALIVE_S = 75
# How long connections may take to close after the last answer, seconds.
CLOSE_S = 5
# A worker that is silent for so long counts as dead, seconds. A new worker is silent while it
# imports, which on a busy machine takes longer than uvicorn's five seconds.
WORKER_SILENCE_S = 60
# Files that a process may have open. Each request in flight has two connections.
OPEN_FILES = 65_536
# Before the URL of a backend: each address of its host is a backend.
DNS = "dns:"
# Of OpenTelemetry's variables. A gateway whose collector is gone must still end in time.
TRACE_DEFAULTS = {SERVICE_NAME: "proofserve-gateway", "OTEL_EXPORTER_OTLP_TIMEOUT": "3"}
# The exit code of a gateway that did not start, or that has lost the engine in its process.
FAILED = 3


def plan_of(chosen: GatewaySettings) -> GatewayPlan:
    """The plan of the settings.

    Raises ValueError: a URL, a weight, a path or a file of keys is wrong.
    """
    timeouts = Timeouts(
        queue=chosen.queue_wait_timeout_seconds,
        connect=chosen.connect_timeout_seconds,
        first_byte=chosen.first_byte_timeout_seconds,
        stall=chosen.stall_timeout_seconds or chosen.request_timeout_seconds,
        total=chosen.request_timeout_seconds,
    )
    if chosen.shared_limits is not None:
        # Before the gateway starts, so that a wrong URL is told at once.
        redis_client(chosen.shared_limits)
    embedded = chosen.use_embedded_engine
    backends, names = ((), ()) if embedded else backends_of(chosen.backend_url)
    file = chosen.client_keys_file
    return GatewayPlan(
        backends=backends,
        names=names,
        clients=() if file is None else client_keys(file),
        # Each worker has its share, so that all of them together keep the limit.
        max_concurrent=max(1, chosen.max_concurrent_requests // chosen.gateway_workers),
        queue_limit=chosen.max_queued_requests // chosen.gateway_workers,
        max_body_bytes=chosen.max_body_bytes,
        timeouts=timeouts,
        affinity=chosen.prefix_affinity,
        probe_interval=chosen.probe_interval_seconds,
        drain=chosen.drain_timeout_seconds,
        backend_key=chosen.backend_api_key,
        admin_key=chosen.gateway_admin_key,
        receipts_path=RECEIPTS,
        remembered_answers=chosen.remembered_answers,
        dashboard=chosen.dashboard,
        processes=chosen.gateway_workers,
        shared_limits=chosen.shared_limits,
        other_paths=other_paths(chosen.other_paths),
        cors_origins=tuple(filter(None, map(str.strip, chosen.cors_origins.split(",")))),
    )


def backends_of(text: str) -> tuple[tuple[BackendSpec, ...], tuple[BackendSpec, ...]]:
    """The backends of ``http://a:8001*2,http://b:8001``, and the names of ``dns:http://c:8001``.

    Raises ValueError if it is not valid.
    """
    parts = [part.strip() for part in text.split(",") if part.strip()]
    names, specs = list[BackendSpec](), list[BackendSpec]()
    for part in parts:
        spec = _backend(part.removeprefix(DNS))
        if part.startswith(DNS) and not spec.url.startswith("http://"):
            raise ValueError(
                f"VLLM_BACKEND_URL: {part!r}: backends that DNS finds need http://, because they"
                " are called by address, for which no certificate is valid"
            )
        (names if part.startswith(DNS) else specs).append(spec)
    if not parts:
        raise ValueError("VLLM_BACKEND_URL names no backend")
    if len({spec.url for spec in (*names, *specs)}) < len(parts):
        raise ValueError("VLLM_BACKEND_URL names a backend twice; give it a weight instead: URL*2")
    return tuple(specs), tuple(names)


def other_paths(text: str) -> tuple[bytes, ...]:
    """The paths of ``/classify,/pooling``. Raises ValueError if one is not a path to relay."""
    paths = tuple(filter(None, map(str.strip, text.split(","))))
    for path in paths:
        if not re.fullmatch(r"/[\w.~/-]+", path, re.ASCII) or path.startswith("/admin"):
            raise ValueError(
                f"VLLM_OTHER_PATHS: {path!r} is not a path like /classify, or is the gateway's own"
            )
    return tuple(path.encode() for path in paths)


def _backend(text: str) -> BackendSpec:
    url, _, weight = text.partition("*")
    parts = http_parts(url)
    if url.startswith("unix:"):
        is_backend = bool(urlsplit(url).path)
    else:
        # A path, as in http://host:8001/v1, would be ignored: requests have their own. The URL is a
        # label of the metrics, so it must not hold a password.
        is_backend = parts is not None and parts.path in {"", "/"} and parts.username is None
    if not is_backend:
        raise ValueError(f"VLLM_BACKEND_URL: {url!r} is not a URL like http://127.0.0.1:8001")
    try:
        share = float(weight or 1)
    except ValueError:
        share = 0.0
    if not 0 < share < math.inf:
        wrong = f"VLLM_BACKEND_URL: {weight!r} is not a weight of {url}"
        raise ValueError(f"{wrong}: give a number above 0")
    return BackendSpec(url.rstrip("/"), share)


def application() -> FastAPI:
    """The application of this process's environment; uvicorn calls it in every worker."""
    chosen = GatewaySettings()
    plan = plan_of(chosen)
    traces = None
    if trace_export() is not None:
        export({n: value for n, value in TRACE_DEFAULTS.items() if not has_variable(n)})
        traces = exported()
    if not chosen.use_embedded_engine:
        return build(plan, traces=traces)
    own = replace(plan, self_guarded=(f"{PROOFS}/", f"{RECEIPTS}/log"))
    return build(own, partial(_engine, chosen), traces=traces)


@asynccontextmanager
async def _engine(chosen: GatewaySettings) -> AsyncIterator[tuple[BackendSpec, ASGIApp]]:
    # A gateway without an embedded engine saves two seconds of imports.
    from proofserve.engines.vllm.inprocess import vllm_app  # noqa: PLC0415

    changes = {"VLLM_PLUGINS": plugin_list(), **runner_choice(), **trace_variables()}
    if chosen.receipts:
        changes["POC_RECEIPTS"] = "1"
    # vLLM warns of variables that it does not know, and would use VLLM_PORT for its processes.
    export(changes, drop=chosen.variables())
    # Ctrl-C in a terminal reaches the engine core too, which must not end before the gateway.
    drain = ["--shutdown-timeout", str(math.ceil(chosen.drain_timeout_seconds))]
    # vLLM does not listen on this host. Its plugins learn from it which machines can reach them.
    given = shlex.split(chosen.engine_options)
    options = [*drain, *given, *trace_options(given), "--host", chosen.host]
    engine = vllm_app(chosen.model or "", options, EngineSettings().unvetted)
    async with engine as app, on_unix_socket(app) as socket:
        yield BackendSpec(f"unix:{socket}"), app


def run_gateway(chosen: GatewaySettings) -> None:
    """Serve until a signal; returns when all accepted requests have their answers.

    Raises ValueError, which names a wrong setting, and SystemExit if it did not start or the engine
    in this process died.
    """
    plan_of(chosen)
    export(chosen.variables())
    if chosen.use_embedded_engine and (not chosen.model or chosen.gateway_workers > 1):
        raise ValueError("an embedded engine needs VLLM_MODEL, and VLLM_GATEWAY_WORKERS=1")
    config = uvicorn.Config(
        "proofserve.wiring.gateway:application",
        factory=True,
        host=chosen.host,
        port=chosen.port,
        workers=chosen.gateway_workers,
        http=GatewayProtocol,
        ws="none",
        lifespan="on",
        access_log=False,
        server_header=False,
        timeout_keep_alive=KEEP_ALIVE_S,
        timeout_graceful_shutdown=CLOSE_S,
        timeout_worker_healthcheck=WORKER_SILENCE_S,
    )
    _allow_open_files()
    sockets = _sockets_of(chosen)
    log.info(
        "An answer may take %g s; models that reason need more, 1800 or so"
        " (VLLM_REQUEST_TIMEOUT_SECONDS, VLLM_FIRST_BYTE_TIMEOUT_SECONDS)",
        min(chosen.request_timeout_seconds, chosen.first_byte_timeout_seconds),
    )
    if config.workers > 1:
        Multiprocess(config, sockets=sockets).run()
        return
    server = _Server(config)
    server.run(sockets)
    if not server.started or (chosen.use_embedded_engine and not server.has_backend):
        sys.exit(FAILED)


def _sockets_of(chosen: GatewaySettings) -> list[socket.socket]:
    try:
        sockets = bound_sockets(chosen.host, chosen.port)
    except OSError as error:
        log.error(error)  # noqa: TRY400 - one line is enough
        sys.exit(FAILED)
    # vLLM may fork its engine core, which must not keep the port when this process has ended.
    for each in sockets:
        os.register_at_fork(after_in_child=each.close)
        host, port = each.getsockname()[:2]
        shown = f"[{host}]" if ":" in host else host
        log.info("The gateway listens on http://%s:%d once it is started", shown, port)
    return sockets


def _allow_open_files() -> None:
    """Raise the limit of open files as far as allowed: the usual 1024 can be too few."""
    allowed, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = OPEN_FILES if most == resource.RLIM_INFINITY else min(OPEN_FILES, most)
    if resource.RLIM_INFINITY != allowed < wanted:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, most))


class _Server(OrderlyServer):
    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Start, or end with one line if another server has taken the port."""
        try:
            await super().startup(sockets)
        except OSError as error:
            # Two servers may bind a port while neither accepts connections.
            log.error(cannot_listen(self.config.host, self.config.port, error))  # noqa: TRY400
            await self.lifespan.shutdown()
            sys.exit(FAILED)

    @property
    def has_backend(self) -> bool:
        gateway: Gateway = self.lifespan.state["gateway"]
        return any(backend.healthy for backend in gateway.pool.backends)
