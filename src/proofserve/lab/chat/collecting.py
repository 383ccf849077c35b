"""Asks a server for chat answers, and for the receipts of them."""

import time
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Self
from urllib.parse import quote

import httpx

from proofserve.lab.chat.conversation import Conversation, conversation
from proofserve.lab.client.errors import LabError, NodeError
from proofserve.lab.client.progress import Progress
from proofserve.protocol.errors import ProtocolError
from proofserve.protocol.receipts.signature import SignedEntry
from proofserve.wire.paths import RECEIPTS
from proofserve.wire.receipts import signed_entry

CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
# A gateway's path for its own clients, then a node's.
RECEIPT_PATHS = ("/v1/receipts", RECEIPTS)
TIMEOUT_S = 300.0
# A receipt enters the log within a second or two of its answer's end. A server that has it, and is
# too busy to sign it yet, says so.
RECEIPT_S, EXPECTED_S = 10.0, 120.0
POLL_S = 0.25
LONGEST_TEXT = 300
ENTRIES_AT_ONCE = 1000
# The statuses of a receipt that may come later.
NOT_YET = frozenset({httpx.codes.NOT_FOUND, httpx.codes.TOO_EARLY, httpx.codes.TOO_MANY_REQUESTS})


class ReceiptClient:
    """A client of a gateway or a node; ``api_key`` is the client's own.

    Raises LabError for a URL that is none. Its methods raise NodeError with the server's own text.
    """

    def __init__(self, url: str, api_key: str | None = None) -> None:
        self.url = url.rstrip("/")
        headers = {"Authorization": f"Bearer {api_key}"} if api_key else {}
        try:
            self._http = httpx.Client(base_url=self.url, timeout=TIMEOUT_S, headers=headers)
        except httpx.InvalidURL as error:
            raise LabError(f"{url}: {error}") from error

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_error: object) -> None:
        self._http.close()

    def model(self) -> str:
        """The first of the models that the server names."""
        found = self._json("GET", "/v1/models")
        try:
            return str(found["data"][0]["id"])
        except (LookupError, TypeError) as error:
            raise NodeError(f"GET {self.url}/v1/models: it names no model") from error

    def chat(self, name: str, request: Mapping[str, Any], path: str = CHAT) -> Conversation:
        """The answer to ``request`` and its receipts; without them if none come in time.

        The request also asks for token ids, which a text alone does not tell. Raises LabError,
        naming the field, for an answer or a receipt that is none.
        """
        body = {**request, "return_token_ids": True}
        response = self._json("POST", path, body)
        answered = conversation(name, body, response, [])
        return conversation(name, body, response, self.receipts(answered.response_id))

    def chats(
        self, requests: Sequence[Mapping[str, Any]], at_once: int, progress: Progress
    ) -> list[Conversation]:
        """The conversations of ``requests``, in their order."""
        progress.step(f"asking {len(requests)} chats", len(requests))

        def ask(number: int) -> Conversation:
            found = self.chat(f"chat {number}", requests[number])
            progress.advance()
            return found

        with ThreadPoolExecutor(at_once) as pool:
            return list(pool.map(ask, range(len(requests))))

    def receipts(self, response_id: str, wait_s: float = RECEIPT_S) -> list[Any]:
        """The signed receipts of a response, as the server sent them; none if none come in time."""
        began = time.monotonic()
        while True:
            statuses = []
            for path in RECEIPT_PATHS:
                response = self._sent("GET", f"{path}/{quote(response_id, safe='')}")
                if response.is_success:
                    return _list(response, "receipts")
                statuses.append(response.status_code)
            longest = EXPECTED_S if httpx.codes.TOO_EARLY in statuses else wait_s
            if not NOT_YET.issuperset(statuses) or time.monotonic() - began > longest:
                return []
            time.sleep(POLL_S)

    def log(self, after: int = -1) -> list[SignedEntry]:
        """All entries of the node's log whose index is above ``after``."""
        entries: list[SignedEntry] = []
        while True:
            query = f"after={after}&limit={ENTRIES_AT_ONCE}"
            found = _list(self._good("GET", f"{RECEIPTS}/log?{query}"), "entries")
            try:
                entries += [signed_entry(each) for each in found]
            except ProtocolError as error:
                raise NodeError(f"{self.url}: log: {error}") from error
            if len(found) < ENTRIES_AT_ONCE:
                return entries
            if entries[-1].entry.index <= after:
                raise NodeError(f"{self.url}: log: it does not go on after entry {after}")
            after = entries[-1].entry.index

    def _json(
        self, method: str, path: str, body: Mapping[str, Any] | None = None
    ) -> dict[str, Any]:
        return _object(self._good(method, path, body))

    def _good(
        self, method: str, path: str, body: Mapping[str, Any] | None = None
    ) -> httpx.Response:
        response = self._sent(method, path, body)
        if response.is_error:
            text = response.text[:LONGEST_TEXT]
            raise NodeError(
                f"{method} {self.url}{path}: {response.status_code} {text}", response.status_code
            )
        return response

    def _sent(
        self, method: str, path: str, body: Mapping[str, Any] | None = None
    ) -> httpx.Response:
        try:
            return self._http.request(method, path, json=body)
        except httpx.HTTPError as error:
            reason = str(error) or type(error).__name__
            raise NodeError(f"{method} {self.url}{path}: {reason}") from error


def _object(response: httpx.Response) -> dict[str, Any]:
    try:
        found = response.json()
    except ValueError as error:
        raise NodeError(f"{response.url}: the answer is not JSON") from error
    if not isinstance(found, dict):
        raise NodeError(f"{response.url}: the answer is no object")
    return found


def _list(response: httpx.Response, field: str) -> list[Any]:
    found = _object(response).get(field)
    if not isinstance(found, list):
        raise NodeError(f"{response.url}: {field} is no list")
    return found
