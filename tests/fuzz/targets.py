"""A server that gets hostile requests, and the checks that it still works afterwards."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import httpx

# Seconds. Every request must end sooner.
PATIENCE_S = 30.0
# An unhandled error leaves one of these in the log.
UNHANDLED = ("Traceback", "Unhandled", "Exception in ASGI", "was never retrieved")
Json = dict[str, Any]


def _nothing(_http: httpx.Client, _body: Any) -> None:
    return


@dataclass(frozen=True)
class Target:
    """A running server; ``paths`` matches our own endpoints, ``work`` is a normal request.

    ``aim`` changes a body so that it fits this server. ``before`` runs before each
    request, so that a request that waits for something does not wait for ever.
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

    def assert_sound(self) -> None:
        """Assert that the server answers, works, and has logged no unhandled error."""
        with httpx.Client(base_url=self.url, timeout=PATIENCE_S) as http:
            assert http.get("/health").status_code == 200
            answer = self.work(http)
            assert answer.status_code == 200, answer.text
        log = self.log()
        assert not [word for word in UNHANDLED if word in log], log[-5000:]
