"""The network's side: it starts and stops rounds, and repeats a call until it has an answer."""

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, Self, TypeVar

from endurance.load import order
from proofserve.remote.http import wait_until
from proofserve.remote.node_client import NodeClient
from proofserve.reports import NodeError
from proofserve_lab.nodes import last_seq

CALL_S = 20.0
CHANGE_S = 120.0
T = TypeVar("T")


class Network:
    """A client of the fleet at ``url``; callbacks go to ``receiver``."""

    def __init__(self, url: str, model: str, receiver: str) -> None:
        self._client = NodeClient(url, timeout_s=CALL_S)
        self._model = model
        self._receiver = receiver

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self._client.__exit__(*error)

    def next_round(self, number: int) -> None:
        """Stop the round that runs, and start round ``number``. Raises TooSlowError."""
        self.stop()
        work = order(number, self._model, self._receiver)

        def started() -> bool:
            try:
                self._client.start_round(work)
            except NodeError:
                # An earlier call may have started it, and its answer was lost.
                return self._proves(work.block_hash)
            return True

        wait_until(started, f"the start of round {number}", CHANGE_S)

    def stop(self) -> None:
        """Stop the round. Raises TooSlowError."""

        def stopped() -> bool:
            self._client.stop()
            return True

        stop = partial(_answer, stopped, otherwise=False)
        wait_until(stop, "the stop of the round", CHANGE_S)

    def pending(self) -> int | None:
        """How many callbacks to the network wait; None without an answer."""
        return _answer(lambda: int(self._client.describe()["outbox"]["pending"]), otherwise=None)

    def newest(self, known: int) -> int:
        """The newest sequence number, if the fleet answers, and else the one that is ``known``."""
        return _answer(lambda: last_seq(self._client, known), otherwise=known)

    def shows(self, newest: int) -> bool:
        """Whether the fleet answers, and has a result above the sequence number ``newest``."""
        return _answer(lambda: bool(self._client.results(newest, 1)), otherwise=False)

    def _proves(self, block_hash: str) -> bool:
        unknown: Mapping[str, Any] = {"status": None}
        found = _answer(self._client.describe, otherwise=unknown)
        return bool(found["status"] == "GENERATING" and found["config"]["block_hash"] == block_hash)


def _answer(call: Callable[[], T], otherwise: T) -> T:
    try:
        return call()
    except NodeError:
        return otherwise
