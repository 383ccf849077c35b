"""A server under fire, and what it must still do in the end."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import httpx

# No request may take so long, however odd it is.
PATIENCE_S = 30.0
# An error that nobody has handled leaves one of these in a log.
UNHANDLED = ("Traceback", "Unhandled", "Exception in ASGI", "was never retrieved")
Json = dict[str, Any]


def _nothing(_http: httpx.Client, _body: Any) -> None:
    return


@dataclass(frozen=True)
class Target:
    """A running server; ``paths`` matches those that are ours, ``work`` is what it is there for.

    ``aim`` makes of a body one that is meant for this very server. ``before`` is done ahead of each
    request, for one that would otherwise wait for what nobody does.
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
        """It answers, does its work, and has met nothing that it did not handle."""
        with httpx.Client(base_url=self.url, timeout=PATIENCE_S) as http:
            assert http.get("/health").status_code == 200
            answer = self.work(http)
            assert answer.status_code == 200, answer.text
        log = self.log()
        assert not [word for word in UNHANDLED if word in log], log[-5000:]
