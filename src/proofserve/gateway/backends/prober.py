"""Asks every backend regularly for its health and its models."""

import asyncio
import logging

import httpx

from proofserve.gateway.backends.fleet import Backend
from proofserve.gateway.backends.plain_client import plain_client

log = logging.getLogger(__name__)
TIMEOUT_S = 5.0
# Failed probes in a row after which a backend is unhealthy; a single one may be chance.
FAILURES = 2


class Prober:
    def __init__(self, backend: Backend, interval_s: float, key: str | None) -> None:
        self._backend = backend
        self._interval_s = interval_s
        self._failures = 0
        self._lists_models = True
        self._http = plain_client(backend.spec, key, TIMEOUT_S)

    async def run(self) -> None:
        loop = asyncio.get_running_loop()
        while True:
            await self.ask()
            self._backend.pool.drop_idle(loop.time())
            await asyncio.sleep(self._interval_s)

    async def close(self) -> None:
        await self._http.aclose()

    async def ask(self) -> None:
        """Probe once. Only the answer of ``/health`` decides whether the backend is healthy."""
        backend = self._backend
        try:
            (await self._http.get("/health")).raise_for_status()
        except httpx.HTTPError as error:
            self._failures += 1
            if self._failures == FAILURES:
                log.warning("backend %s is unhealthy: %r", backend.name, error)
                backend.healthy = False
            return
        if not backend.healthy:
            log.info("backend %s is healthy again", backend.name)
        self._failures = 0
        backend.healthy = True
        await self._ask_for_models()

    async def _ask_for_models(self) -> None:
        backend = self._backend
        try:
            models = await self._http.get("/v1/models")
            models.raise_for_status()
            backend.models = {each["id"]: each for each in models.json()["data"]}
        except (httpx.HTTPError, ValueError, KeyError, TypeError, RecursionError) as error:
            if self._lists_models:
                log.warning("backend %s does not list its models: %r", backend.name, error)
            self._lists_models = False
        else:
            self._lists_models = True
