"""The FastAPI application around a gateway, and its shutdown.

At the shutdown it refuses new requests, finishes the accepted ones, then stops the server.
"""

import asyncio
import gc
import logging
import signal
import threading
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator
from contextlib import (
    AbstractAsyncContextManager,
    AsyncExitStack,
    asynccontextmanager,
    contextmanager,
    suppress,
)
from dataclasses import replace
from http import HTTPStatus
from typing import Any

from fastapi import FastAPI, Request, Response
from fastapi.exceptions import RequestValidationError
from fastapi.middleware.cors import CORSMiddleware
from starlette.exceptions import HTTPException
from starlette.types import ASGIApp, Receive, Scope, Send

from proofserve import __version__
from proofserve.gateway.admin import admin_only, include_routes
from proofserve.gateway.backends import Backend, Resolve, Roster, addresses
from proofserve.gateway.dashboard import LoadHistory
from proofserve.gateway.failures import Failure, RefusedByGateway
from proofserve.gateway.gateway import Gateway
from proofserve.gateway.records import BackendSpec, GatewayPlan
from proofserve.gateway.tracing import Traces

log = logging.getLogger(__name__)
# Seconds without a healthy answer after which the engine in this process counts as dead.
DEAD_S = 10.0
# Most characters of a field's name in an error: a client may send a name of any length.
MAX_FIELD = 200
# Time for load balancers to notice the shutdown: they ask for health about once a second.
NOTICE_S = 1.0
# Until then a second signal repeats the first: a supervisor signals the whole process group, and
# then the parent of several workers signals them again, late on a busy machine.
REPEAT_S = 3.0


# Starts an engine in this process; yields its address and its application.
Engine = Callable[[], AbstractAsyncContextManager[tuple[BackendSpec, ASGIApp]]]


def build(
    plan: GatewayPlan,
    engine: Engine | None = None,
    resolve: Resolve = addresses,
    traces: Traces | None = None,
) -> FastAPI:
    """The application; its lifespan makes the gateway, which finds named backends by ``resolve``.

    An ``engine`` is then the only backend, and its application serves all paths that the gateway
    does not have. When the engine dies, the process ends itself by SIGTERM.
    """

    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[dict[str, Any]]:
        async with AsyncExitStack() as stack:
            backends = plan.backends
            if engine is not None:
                spec, engine_app = await stack.enter_async_context(engine())
                backends = (spec,)
                # If chat needs a key, the engine's other endpoints must not bypass it.
                app.mount("/", admin_only(engine_app, plan) if plan.clients else engine_app)
            running_gateway = running(replace(plan, backends=backends), resolve, traces)
            gateway = await stack.enter_async_context(running_gateway)
            stack.enter_context(draining_on_signals(gateway))
            if engine is not None:
                watching = _background(_end_with_engine(gateway.pool.backends[0]))
                await stack.enter_async_context(watching)
            state: dict[str, Any] = {"gateway": gateway}
            if plan.dashboard:
                history = LoadHistory(gateway)
                await stack.enter_async_context(_background(history.watch()))
                state["dashboard"] = history.feed()
            yield state

    app = FastAPI(title="proofserve gateway", version=__version__, lifespan=lifespan)
    include_routes(app, plan)
    app.exception_handler(RefusedByGateway)(lambda _request, error: _response(error.failure))
    app.exception_handler(RequestValidationError)(_invalid)
    app.exception_handler(HTTPException)(_http_error)
    app.add_middleware(head_as_get)
    if plan.cors_origins:
        app.add_middleware(
            CORSMiddleware,
            allow_origins=plan.cors_origins,
            allow_methods=["*"],
            allow_headers=["*"],
        )
    return app


def head_as_get(app: ASGIApp) -> ASGIApp:
    """Answers HEAD as GET. The server omits the body, because it sees the original method."""

    async def answer(scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and scope["method"] == "HEAD":
            scope = {**scope, "method": "GET"}
        await app(scope, receive, send)

    return answer


@asynccontextmanager
async def running(
    plan: GatewayPlan, resolve: Resolve = addresses, traces: Traces | None = None
) -> AsyncIterator[Gateway]:
    gateway = Gateway(plan, traces)
    roster = Roster(plan, gateway.pool, gateway.backend, gateway.totals.forget, resolve)
    await roster.start()
    gateway.deadlines.start()
    # The objects so far live until the end: without them garbage collection pauses are shorter.
    gc.collect()
    gc.freeze()
    try:
        shared = [] if gateway.shared is None else [gateway.shared.run()]
        async with _background(roster.run(), *shared):
            yield gateway
    finally:
        gc.unfreeze()
        await roster.close()
        gateway.close()
        if traces is not None:
            # Those that are not exported yet are now.
            await asyncio.to_thread(traces.close)


@asynccontextmanager
async def _background(*work: Coroutine[Any, Any, None]) -> AsyncIterator[None]:
    tasks = [asyncio.create_task(each) for each in work]
    try:
        yield
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


@contextmanager
def draining_on_signals(gateway: Gateway) -> Iterator[None]:
    """In this context the first SIGTERM or SIGINT begins to drain; a later one ends at once.

    After draining, the server's own signal handler is called.
    """
    if threading.current_thread() is not threading.main_thread():
        # Only the main thread may handle signals.
        yield
        return
    drain = _Drain(gateway)
    loop = gateway.loop
    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, drain.signalled, number, signal.getsignal(number))
    try:
        yield
    finally:
        for number in (signal.SIGINT, signal.SIGTERM):
            loop.remove_signal_handler(number)


class _Drain:
    def __init__(self, gateway: Gateway) -> None:
        self._gateway = gateway
        self._task: asyncio.Task[None] | None = None
        self._began = 0.0

    def signalled(self, number: int, server: Any) -> None:
        """Begin to drain. ``server`` is the server's own handler of the signal ``number``."""

        def end() -> None:
            for watched in list(self._gateway.deadlines.watched):
                watched.shut_down()
            if callable(server):
                server(number, None)

        loop = self._gateway.loop
        if self._task is None:
            self._began = loop.time()
            self._task = loop.create_task(self._drain())
            self._task.add_done_callback(lambda _: end())
        elif self._task.done():
            end()
        elif loop.time() - self._began > REPEAT_S:
            self._task.cancel()

    async def _drain(self) -> None:
        gateway = self._gateway
        gateway.draining = True
        await asyncio.sleep(NOTICE_S)
        with suppress(TimeoutError):
            async with asyncio.timeout(gateway.plan.drain):
                await gateway.deadlines.idle.wait()


async def _end_with_engine(backend: Backend) -> None:
    """End this process when its engine is dead, because a new engine needs a new process."""
    loop = asyncio.get_running_loop()
    last = loop.time()
    while loop.time() - last < DEAD_S:
        await asyncio.sleep(1.0)
        if backend.healthy:
            last = loop.time()
    log.critical("the engine in this process is dead: the process ends")
    signal.raise_signal(signal.SIGTERM)


def _response(failure: Failure) -> Response:
    return Response(failure.body(), failure.status, media_type="application/json")


def _invalid(_request: Request, error: RequestValidationError) -> Response:
    first = error.errors()[0]
    if first["type"] == "json_invalid":
        # For this error FastAPI's ``loc`` has a position instead of the field.
        field, message = "body", first["ctx"]["error"]
    else:
        field, message = ".".join(str(part) for part in first["loc"])[:MAX_FIELD], first["msg"]
    return _response(Failure(422, "invalid_body", f"{field}: {message}", param=field))


def _http_error(_request: Request, error: HTTPException) -> Response:
    code = HTTPStatus(error.status_code).name.lower()
    answer = _response(Failure(error.status_code, code, str(error.detail)))
    answer.headers.update(error.headers or {})
    if answer.headers.get("allow") == "GET":
        answer.headers["allow"] = "GET, HEAD"
    return answer
