"""``vllm.endpoint_plugins``: the proof routes in vLLM's own API server."""

import asyncio
import logging
from argparse import Namespace
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from typing import Any

import uvicorn
from fastapi import FastAPI, Request
from starlette.datastructures import State

from proofserve.api import measure_routes, routes
from proofserve.api.errors import NotEnabled
from proofserve.api.metrics import exposed
from proofserve.api.node import Node
from proofserve.engines.vllm import support
from proofserve.plugin.logs import log_as
from proofserve.rounds.ports import MeasurableEngine, ProofEngine
from proofserve.rounds.records import EngineInfo
from proofserve.settings.node import NodeSettings
from proofserve.settings.process import has_variable
from proofserve.wire.paths import PROOFS
from proofserve.wiring.access import access_of, description, require_access_rule
from proofserve.wiring.node import running_node, versions

_logger = logging.getLogger(__name__)
# If it is set, vLLM's /metrics shows only the files that processes wrote to that folder.
MULTIPROCESS = "PROMETHEUS_MULTIPROC_DIR"
# How long vLLM waits for the end of the round before it ends the engine, seconds.
ROUND_END_S = 15.0
# How long the server then waits for clients to read their open responses, seconds.
RESPONSES_END_S = 10


class ProofEndpoints:
    """The plugin object; vLLM makes one for each API server process."""

    name = "proofserve"
    required_tasks = ("generate",)

    def __init__(self) -> None:
        self._settings = NodeSettings()
        self._running = AsyncExitStack()

    def attach_router(self, app: FastAPI) -> None:
        chosen = self._settings
        has_keys = bool(chosen.api_key or chosen.viewer_key or chosen.api_keys_file)
        app.include_router(routes.router(_node, has_keys))
        if chosen.measure:
            app.include_router(measure_routes.router(_node, _engine, has_keys))
        around = app.router.lifespan_context

        @asynccontextmanager
        async def lifespan(application: FastAPI) -> AsyncIterator[Any]:
            async with around(application) as state:
                _limit_wait_for_clients(application)
                try:
                    _build_page(application)
                    yield state
                finally:
                    # In vLLM's own server the round and the engine have ended by now; in an
                    # embedded application the engine still runs, and the round ends here.
                    await self._running.aclose()

        app.router.lifespan_context = lifespan

    async def init_state(self, engine_client: Any, state: State, args: Namespace) -> None:
        """Build the node.

        Raises UnsupportedEngine, or ValueError for settings that do not say which clients may
        call; either stops the server with the reason.
        """
        log_as("vllm")
        if not self._settings.enabled:
            _logger.info("proofs are off; start with --enable-poc to open %s", PROOFS)
            return
        access = access_of(self._settings)
        require_access_rule(access, args.host, args.uds is not None)
        engine = await self._engine_of(engine_client, args)
        state.proofserve_engine = engine
        node = await self._running.enter_async_context(running_node(engine, self._settings))
        self._running.enter_context(exposed(node))
        # Here, not above: it imports private names, so only after the version check.
        from proofserve.engines.vllm.compat_client import install_orderly_shutdown  # noqa: PLC0415

        install_orderly_shutdown(engine_client, node.manager.aclose, ROUND_END_S)
        state.proofserve_node = node
        if has_variable(MULTIPROCESS):
            _logger.warning(
                "%s is set, so /metrics cannot show the node: unset it for one server", MULTIPROCESS
            )
        _logger.info(
            "proofs are on: %s under %s, outbox %s",
            self._settings.scheme,
            PROOFS,
            self._settings.outbox.absolute(),
        )
        _logger.info("proof endpoints: %s", description(access))

    async def _engine_of(self, engine_client: Any, args: Namespace) -> ProofEngine:
        """Raises UnsupportedEngine."""
        version = support.require_tested_version()
        config = engine_client.vllm_config
        support.require_supported_options(config)
        # After the version check: in another version this import may fail without advice.
        from proofserve.engines.vllm.client import VllmEngine, served_facts  # noqa: PLC0415

        # In a thread, because it may hash the whole checkpoint.
        facts = await asyncio.to_thread(served_facts, config)
        engine_info = EngineInfo(
            model_names=tuple(args.served_model_name or [args.model]),
            facts=facts,
            max_seq_len=config.model_config.max_model_len,
            versions=versions(vllm=version),
        )
        timeout_s = self._settings.rpc_timeout_ms / 1e3
        return VllmEngine(engine_client, engine_info, self._settings.defer_sec, timeout_s)


def _limit_wait_for_clients(application: FastAPI) -> None:
    """Make vLLM's HTTP server end even if a client neither reads nor leaves its open stream.

    The server is uvicorn's, in ``app.state.server`` while it serves; an embedded application
    has none.
    """
    server = getattr(application.state, "server", None)
    if isinstance(server, uvicorn.Server) and server.config.timeout_graceful_shutdown is None:
        server.config.timeout_graceful_shutdown = RESPONSES_END_S


def _build_page(app: FastAPI) -> None:
    """Build the OpenAPI page, which takes seconds under load, before the first client asks."""
    try:
        if app.openapi_url is not None:
            app.openapi()
    except Exception:
        # It describes vLLM's routes too; a fault in it must not stop the server.
        _logger.exception("the OpenAPI page cannot be built")


def _node(request: Request) -> Node:
    node = getattr(request.app.state, "proofserve_node", None)
    if not isinstance(node, Node):
        raise NotEnabled("PoC not enabled")
    return node


def _engine(request: Request) -> MeasurableEngine:
    engine: MeasurableEngine = request.app.state.proofserve_engine
    return engine
