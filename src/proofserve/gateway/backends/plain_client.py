"""An ordinary HTTP client of one backend, for what is not relayed."""

from urllib.parse import urlsplit

import httpx

from proofserve.gateway.records import BackendSpec


def plain_client(spec: BackendSpec, key: str | None, timeout_s: float) -> httpx.AsyncClient:
    """A client that sends the backends' ``key`` and waits ``timeout_s`` for each step."""
    parts = urlsplit(spec.url)
    unix = parts.scheme == "unix"
    return httpx.AsyncClient(
        base_url="http://localhost" if unix else spec.url,
        transport=httpx.AsyncHTTPTransport(uds=parts.path) if unix else None,
        headers={"Authorization": f"Bearer {key}"} if key else None,
        timeout=timeout_s,
        # Loading the certificates takes a tenth of a second.
        verify=parts.scheme == "https",
    )
