"""A server that gets hostile requests, and what it must still do afterwards."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import httpx

# No request may take so long, seconds.
PATIENCE_S = 30.0
# An unhandled error leaves one of these in the log.
UNHANDLED = ("Traceback", "Unhandled", "Exception in ASGI", "was never retrieved")
Json = dict[str, Any]


def _nothing(_http: httpx.Client, _body: Any) -> None:
    return


@dataclass(frozen=True)
class Target:
    """A running server; ``paths`` matches our own endpoints, ``work`` is a normal request.

    ``aim`` changes a body so that it fits this server. ``before`` runs ahead of each request, so
    that requests that wait for something get it.
    """

    url: str
    paths: str
    log: Callable[[], str]
    work: Callable[[httpx.Client], httpx.Response]
    aim: Callable[[Json], Json]
    before: Callable[[httpx.Client, Any], None] = _nothing

    @property
    def port(self) -> int:
        port = httpx.URL(self.url).port
        assert port is not None
        return port

    def is_sound(self) -> None:
        """Assert that it answers, works, and has logged no unhandled error."""
        with httpx.Client(base_url=self.url, timeout=PATIENCE_S) as http:
            assert http.get("/health").status_code == 200
            answer = self.work(http)
            assert answer.status_code == 200, answer.text
        log = self.log()
        assert not [word for word in UNHANDLED if word in log], log[-5000:]
