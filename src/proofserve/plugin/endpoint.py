"""``vllm.endpoint_plugins``: the proof routes in vLLM's own API server."""

import logging
from argparse import Namespace
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from typing import Any

from fastapi import FastAPI, Request
from starlette.datastructures import State

from proofserve.api import measure_routes, routes
from proofserve.api.errors import NotEnabled
from proofserve.api.metrics import exposed
from proofserve.api.node import Node
from proofserve.engines.vllm import vetting
from proofserve.plugin.logs import log_as
from proofserve.rounds.ports import MeasurableEngine
from proofserve.rounds.records import EngineInfo
from proofserve.settings.node import NodeSettings
from proofserve.settings.process import has_variable
from proofserve.wiring.access import access_of, description, require_access_rule
from proofserve.wiring.node import running_node, versions

_logger = logging.getLogger(__name__)
# With it vLLM shows only what processes have left in that folder.
MULTIPROCESS = "PROMETHEUS_MULTIPROC_DIR"
# How long the end of the engine waits for that of the round, seconds.
ROUND_END_S = 15.0


class ProofEndpoints:
    """The plugin object that vLLM makes, one for each API server process."""

    name = "proofserve"
    required_tasks = ("generate",)

    def __init__(self) -> None:
        self._settings = NodeSettings()
        self._running = AsyncExitStack()

    def attach_router(self, app: FastAPI) -> None:
        """Add the routes, and our shutdown to the application's lifespan."""
        app.include_router(routes.router(_node))
        if self._settings.measure:
            app.include_router(measure_routes.router(_node, _engine))
        around = app.router.lifespan_context

        @asynccontextmanager
        async def lifespan(application: FastAPI) -> AsyncIterator[Any]:
            async with around(application) as state:
                try:
                    yield state
                finally:
                    # vLLM's own server has ended its engine by now, and rounds before it; where
                    # an application is embedded the engine still runs, and they end here.
                    await self._running.aclose()

        app.router.lifespan_context = lifespan

    async def init_state(self, engine_client: Any, state: State, args: Namespace) -> None:
        """Build the node.

        Raises UnsupportedEngine, or ValueError for settings by which nobody can tell who may
        call; either stops the server with the reason.
        """
        log_as("vllm")
        if not self._settings.enabled:
            _logger.info("proofs are off; start with --enable-poc to open /api/v1/pow")
            return
        access = access_of(self._settings)
        require_access_rule(access, args.host, args.uds is not None)
        version = vetting.require_vetted_version()
        config = engine_client.vllm_config
        vetting.require_one_owner(config)
        vetting.require_model_runner(config)
        # Not before the vetting: names that moved would fail here without a word of advice.
        from proofserve.engines.vllm import compat  # noqa: PLC0415
        from proofserve.engines.vllm.client import VllmEngine  # noqa: PLC0415

        engine_info = EngineInfo(
            model_names=tuple(args.served_model_name or [args.model]),
            hidden_size=config.model_config.get_hidden_size(),
            max_seq_len=config.model_config.max_model_len,
            versions=versions(vllm=version),
        )
        engine = VllmEngine(
            engine_client,
            engine_info,
            self._settings.defer_sec,
            self._settings.rpc_timeout_ms / 1e3,
        )
        state.proofserve_engine = engine
        node = await self._running.enter_async_context(running_node(engine, self._settings))
        self._running.enter_context(exposed(node))
        compat.before_shutdown(engine_client, node.manager.aclose, ROUND_END_S)
        state.proofserve_node = node
        if has_variable(MULTIPROCESS):
            _logger.warning(
                "%s is set, so /metrics cannot show the node: unset it for one server", MULTIPROCESS
            )
        _logger.info(
            "proofs are on: %s under /api/v1/pow, outbox %s",
            self._settings.scheme,
            self._settings.outbox.absolute(),
        )
        _logger.info("proof endpoints: %s", description(access))


def _node(request: Request) -> Node:
    node = getattr(request.app.state, "proofserve_node", None)
    if not isinstance(node, Node):
        raise NotEnabled("PoC not enabled")
    return node


def _engine(request: Request) -> MeasurableEngine:
    engine: MeasurableEngine = request.app.state.proofserve_engine
    return engine
