"""``vllm.endpoint_plugins``: the proof routes in vLLM's own API server."""

import asyncio
import logging
from argparse import Namespace
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from functools import partial
from typing import TYPE_CHECKING, Any

import uvicorn
import vllm
from fastapi import APIRouter, FastAPI, Request
from starlette.datastructures import State

from proofserve.api import node_page, proof_routes, routes
from proofserve.api.access import ApiError
from proofserve.api.metrics import exposed
from proofserve.api.node import Node
from proofserve.engines.vetting import features
from proofserve.engines.vetting.start import require_vetted, require_vetted_runner
from proofserve.engines.vllm import support
from proofserve.host import processor_here
from proofserve.protocol import SKETCH_2
from proofserve.rounds.ports import AnsweringEngine, Measure
from proofserve.rounds.records import EngineInfo
from proofserve.rounds.tasks import beside
from proofserve.settings.node import NodeSettings, require_proofs_for_receipts
from proofserve.settings.process import has_variable
from proofserve.wire import PROOFS
from proofserve.wiring.access import access_of, description, require_access_rule
from proofserve.wiring.node import running_node, versions
from proofserve.wiring.owner import ForwardingRoute, Ownership, this_server

if TYPE_CHECKING:
    from proofserve.engines.liveness.watch import LivenessWatch
    from proofserve.engines.vllm.client import VllmEngine

_logger = logging.getLogger(__name__)
ROOT = "proofserve"
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
        self._ownership: Ownership | None = None

    def attach_router(self, app: FastAPI) -> None:
        chosen = self._settings
        if chosen.enabled:
            access, limit = access_of(chosen), chosen.max_body_bytes
            app.router.routes.append(ForwardingRoute(lambda: self._ownership, access, limit))
        for router in self._routers(_node, _measure):
            app.include_router(router)
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

    def _routers(
        self, get_node: Callable[[Request], Node], measure_of: Callable[[Request], Measure]
    ) -> list[APIRouter]:
        chosen = self._settings
        keys = (chosen.api_key, chosen.validator_key, chosen.viewer_key, chosen.api_keys_file)
        has_keys = any(keys)
        made = [routes.router(get_node, has_keys)]
        if chosen.measure:
            made.append(proof_routes.measure_router(get_node, measure_of, has_keys))
        if chosen.dashboard:
            made.append(node_page.router(get_node))
        return made

    async def init_state(self, engine_client: Any, state: State, args: Namespace) -> None:
        """Build the node.

        Raises UnsupportedEngine, EngineFault, or ValueError for settings that do not say which
        clients may call; each stops the server with the reason.
        """
        log_as("vllm")
        require_proofs_for_receipts(self._settings)
        if not self._settings.enabled:
            _logger.info("proofs are off; start with --enable-poc to open %s", PROOFS)
            return
        access = access_of(self._settings)
        require_access_rule(access, args.host, args.uds is not None)
        engine = await self._engine_of(engine_client, args)
        state.proofserve_engine = engine
        # After the version check in ``_engine_of``: these import private names.
        from proofserve.engines.vllm.client import watch_of  # noqa: PLC0415
        from proofserve.engines.vllm.compat_client import install_orderly_shutdown  # noqa: PLC0415

        watch = await watch_of(engine_client, engine, self._settings.engine_stall_sec)
        await self._running.enter_async_context(beside("liveness counts", watch.run_counts()))
        answers = await self._answers_of(engine_client, engine.engine_info)
        start = partial(self._running_node, engine, state, watch, answers)
        if support.api_processes(engine_client.vllm_config) > 1:
            ownership = Ownership(self._settings.outbox, this_server(), start)
            self._ownership = await self._running.enter_async_context(ownership.running())
            ends_rounds = ownership.end
        else:
            node, _ = await self._running.enter_async_context(start(False))
            ends_rounds = node.manager.aclose
        install_orderly_shutdown(engine_client, ends_rounds, ROUND_END_S)
        if has_variable(MULTIPROCESS):
            _logger.warning(
                "%s is set, so /metrics cannot show the node: read %s/metrics", MULTIPROCESS, PROOFS
            )
        outbox = self._settings.outbox.absolute()
        _logger.info("proofs are on: %s under %s, outbox %s", self._settings.scheme, PROOFS, outbox)
        _logger.info("proof endpoints: %s", description(access))

    @asynccontextmanager
    async def _running_node(
        self,
        engine: "VllmEngine",
        state: State,
        watch: "LivenessWatch",
        answers: AnsweringEngine | None,
        was_owned: bool,
    ) -> AsyncIterator[tuple[Node, list[APIRouter]]]:
        """The node in this process, or in whichever of several owns it; see ``StartNode``."""
        # The server has not ended, and no client stopped the round of the process that has.
        resume = self._settings.resume or was_owned
        settings = self._settings.model_copy(update={"resume": resume})
        made = running_node(engine, settings, answers, engine.take_over, watch.read)
        async with beside("liveness", watch.run()), made as node:
            with exposed(node):
                state.proofserve_node = node
                yield node, self._routers(lambda _: node, lambda _: engine.measure)

    async def _engine_of(self, engine_client: Any, args: Namespace) -> "VllmEngine":
        """Raises UnsupportedEngine, and EngineFault if a rank has another proofserve."""
        wanted = features.of_node(self._settings.receipts)
        require_vetted(self._settings.unvetted, wanted)
        config = engine_client.vllm_config
        require_vetted_runner(config)
        support.require_supported_options(config)
        if (untried := support.untried_model(config)) is not None:
            _logger.warning("%s", untried)
        # After the version check: in another version this import may fail without advice.
        from proofserve.engines.vetting.start import require_equal_ranks  # noqa: PLC0415
        from proofserve.engines.vllm.client import VllmEngine, served_facts, served_kernels  # noqa: PLC0415

        ranks, obstacle = await require_equal_ranks(engine_client)
        _logger.info("%s", ranks)
        require_right_experts(obstacle, self._settings.scheme)
        # In a thread, because it may hash the whole checkpoint.
        facts = await asyncio.to_thread(served_facts, config)
        engine_info = EngineInfo(
            model_names=tuple(args.served_model_name or [args.model]),
            facts=facts,
            max_seq_len=config.model_config.max_model_len,
            versions=versions(vllm=str(vllm.__version__)),
            kernels={"processor": processor_here(), **served_kernels(config)},
            experts_obstacle=obstacle,
        )
        timeout_s = self._settings.rpc_timeout_ms / 1e3
        return VllmEngine(engine_client, engine_info, self._settings.defer_sec, timeout_s)

    async def _answers_of(
        self, engine_client: Any, engine_info: EngineInfo
    ) -> AnsweringEngine | None:
        """The source of finished answers for receipts, None without ``--receipts``.

        Raises ValueError and UnsupportedEngine, or EngineFault if the engine cannot be tapped.
        """
        if not self._settings.receipts:
            return None
        # After the version check, as above.
        from proofserve.engines.receipts import client  # noqa: PLC0415

        k_dim = self._settings.receipts_k_dim
        answers = await client.start(engine_client, engine_info, k_dim)
        _logger.info("receipts are on: sketch key %s, %d dimensions", answers.sketch_key, k_dim)
        return answers


def require_right_experts(obstacle: str | None, scheme: str | None) -> None:
    """Raise UnsupportedEngine if the node's only ``scheme`` has an ``obstacle``; else log it."""
    if obstacle is None:
        return
    if scheme == SKETCH_2:
        raise support.UnsupportedEngine(obstacle)
    _logger.warning("%s", obstacle)


def log_as(name: str) -> None:
    """Give proofserve's logger the handlers, level and propagation of the logger ``name``.

    So its lines go where vLLM's go, as text or JSON. A logger that is configured stays as it is.
    """
    own, other = logging.getLogger(ROOT), logging.getLogger(name)
    if own.handlers or own.level != logging.NOTSET:
        return
    own.handlers = list(other.handlers)
    own.setLevel(other.level)
    own.propagate = other.propagate


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
        raise ApiError("not_enabled", "PoC not enabled")
    return node


def _measure(request: Request) -> Measure:
    measure: Measure = request.app.state.proofserve_engine.measure
    return measure
