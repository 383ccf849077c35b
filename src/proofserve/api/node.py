"""What the routes are given: one deployed server and the objects that do the work."""

from collections import Counter
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field

from proofserve.api.access import Access
from proofserve.api.bounds import Rates, Waits
from proofserve.rounds.manager import RoundManager
from proofserve.rounds.ports import Outbox
from proofserve.rounds.records import EngineInfo


async def _accept(_url: str) -> str | None:
    return None


@dataclass(frozen=True, slots=True)
class Deployment:
    """What requests are checked against.

    ``enabled`` is false when the server was started without proofs. ``seq_len`` and ``k_dim`` are
    the only values that the server allows, None where it allows any that fit the model.
    ``max_body_bytes`` and ``max_nonces`` bound one request, ``max_callbacks`` the callbacks that
    may wait when a job asks for another. ``check_url`` returns a warning about a callback URL,
    None for none, and raises ValueError if no callback may go there.
    """

    engine_info: EngineInfo
    enabled: bool
    scheme: str
    seq_len: int | None = None
    k_dim: int | None = None
    default_batch_size: int = 32
    max_nonces: int = 100_000
    max_callbacks: int = 10_000
    max_body_bytes: int = 32 * 1024 * 1024
    check_url: Callable[[str], Awaitable[str | None]] = _accept


@dataclass(frozen=True, slots=True)
class Node:
    """One server's deployment, its owners of rounds and results, who may call and how much.

    ``refusals`` counts the requests that were not served, by status and reason. ``url_warnings``
    has the warning about the newest round's callback URL, by round id, if there is one.
    """

    deployment: Deployment
    manager: RoundManager
    outbox: Outbox
    access: Access = field(default_factory=Access)
    rates: Rates = field(default_factory=Rates)
    waits: Waits = field(default_factory=Waits)
    refusals: Counter[tuple[int, str]] = field(default_factory=Counter)
    url_warnings: dict[str, str] = field(default_factory=dict)

    def warn(self, round_id: str, warning: str | None) -> dict[str, str]:
        """Keep the warning about a new round for ``/status``; what it adds to the answer."""
        self.url_warnings.clear()
        if warning is None:
            return {}
        self.url_warnings[round_id] = warning
        return {"warning": warning}
