"""HTTP to many members: a pool of connections for each, because one pool searches all of them."""

import ssl

import httpx

# A look, a change of the round, a share of a job, and openings; more would wait.
_CONNECTIONS = 32


class PoolForEachHost(httpx.AsyncBaseTransport):
    """Keeps connections by host and port.

    httpcore goes through all connections of a pool for each request: with a thousand members in one
    pool a look at all of them would take a million steps.
    """

    def __init__(self) -> None:
        # Made once: it takes some milliseconds to read the certificates.
        self._tls = ssl.create_default_context()
        self._pools: dict[tuple[str, str, int | None], httpx.AsyncHTTPTransport] = {}

    async def handle_async_request(self, request: httpx.Request) -> httpx.Response:
        url = request.url
        place = (url.scheme, url.host, url.port)
        pool = self._pools.get(place)
        if pool is None:
            limits = httpx.Limits(
                max_connections=_CONNECTIONS, max_keepalive_connections=_CONNECTIONS
            )
            pool = httpx.AsyncHTTPTransport(verify=self._tls, trust_env=False, limits=limits)
            self._pools[place] = pool
        return await pool.handle_async_request(request)

    async def aclose(self) -> None:
        for pool in self._pools.values():
            await pool.aclose()
