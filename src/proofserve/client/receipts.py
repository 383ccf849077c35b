"""Keeps a share of an application's chats with their receipts, as ``watch-chat`` reads them.

It works with every client that takes an ``httpx`` client, such as the official ``openai`` package::

    with Recorder(Path("chats"), share=0.01) as recorder:
        client = OpenAI(base_url="https://provider/v1", http_client=recorder.http_client())

A fault here never changes an answer: what cannot be kept is left out and logged.
"""

import json
import logging
import random
import secrets
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import httpx

from proofserve.client.recording import AsyncRecordingTransport, KeptExchange, RecordingTransport

_logger = logging.getLogger(__name__)

# As the openai package has it: answers may take minutes.
TIMEOUT = httpx.Timeout(600.0, connect=5.0)
# A receipt enters the log within a second or two of its answer's end.
RECEIPT_S = 10.0
POLL_S = 0.5
# Statuses of a receipt that may come later.
NOT_YET = frozenset({httpx.codes.NOT_FOUND, httpx.codes.TOO_EARLY, httpx.codes.TOO_MANY_REQUESTS})
# Ended chats that wait for their receipts; more are left out.
MOST_WAITING = 1000
LONGEST_NAME = 200


class Recorder:
    """Writes ``folder``/RESPONSE_ID.RANDOM.json for a random ``share`` (0 to 1) of the chats.

    A file has "request", "response" and "receipts"; the latter are empty if none came in time. The
    requests of kept chats also ask for token ids, unless the server refuses that.

    Raises ValueError for a share outside 0..1, and OSError if the folder cannot be made. The end
    of the context waits for the last receipts.
    """

    def __init__(self, folder: Path, share: float = 1.0) -> None:
        if not 0.0 <= share <= 1.0:
            raise ValueError(f"share: {share} is outside 0..1")
        folder.mkdir(parents=True, exist_ok=True)
        self._folder = folder
        self._share = share
        self._draw = random.SystemRandom()
        self._http = httpx.Client(timeout=TIMEOUT)
        self._room = threading.BoundedSemaphore(MOST_WAITING)
        self._pool = ThreadPoolExecutor(4, thread_name_prefix="receipts")

    def http_client(self) -> httpx.Client:
        transport = RecordingTransport(httpx.HTTPTransport(), self._wanted, self._ended)
        return httpx.Client(transport=transport, timeout=TIMEOUT, follow_redirects=True)

    def async_http_client(self) -> httpx.AsyncClient:
        inner = httpx.AsyncHTTPTransport()
        transport = AsyncRecordingTransport(inner, self._wanted, self._ended)
        return httpx.AsyncClient(transport=transport, timeout=TIMEOUT, follow_redirects=True)

    def close(self) -> None:
        """Wait until the receipts of all ended chats are written."""
        self._pool.shutdown()
        self._http.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        _kind: type[BaseException] | None,
        _error: BaseException | None,
        _traceback: TracebackType | None,
    ) -> None:
        self.close()

    def _wanted(self) -> bool:
        return self._draw.random() < self._share

    def _ended(self, kept: KeptExchange) -> None:
        if not self._room.acquire(blocking=False):
            _logger.warning("a chat was not kept: %d wait for their receipts", MOST_WAITING)
            return
        try:
            self._pool.submit(self._write, kept)
        except RuntimeError as error:
            self._room.release()
            _logger.warning("a chat was not kept: the recorder is closed: %s", error)

    def _write(self, kept: KeptExchange) -> None:
        try:
            if (response := kept.response()) is None:
                _logger.warning("a chat was not kept: its answer has no id, or no end")
                return
            receipts = self._receipts(kept, str(response["id"]))
            self._keep({"request": kept.request, "response": response, "receipts": receipts})
        except Exception as error:  # noqa: BLE001 - a server may answer anything
            _logger.warning("a chat was not kept: %r", error)
        finally:
            self._room.release()

    def _keep(self, body: dict[str, Any]) -> None:
        name = "".join(c if c.isalnum() or c in "-_" else "_" for c in str(body["response"]["id"]))
        # A server that gives two answers the same id must not replace the first one.
        unique = f"{name[:LONGEST_NAME]}.{secrets.token_hex(4)}"
        partial = self._folder / f".{unique}.part"
        partial.write_text(json.dumps(body), encoding="utf-8")
        # A reader never sees half a file.
        partial.replace(self._folder / f"{unique}.json")

    def _receipts(self, kept: KeptExchange, response_id: str) -> list[Any]:
        until = time.monotonic() + RECEIPT_S
        while True:
            found, may_come = self._asked(kept, response_id)
            if found or not may_come or time.monotonic() > until:
                return found
            time.sleep(POLL_S)

    def _asked(self, kept: KeptExchange, response_id: str) -> tuple[list[Any], bool]:
        """The receipts, and whether they may come later if there are none."""
        statuses = set()
        for url in kept.receipt_urls(response_id):
            try:
                response = self._http.get(url, headers=kept.headers)
                if response.is_success and (found := response.json()["receipts"]):
                    return list(found), False
            except httpx.TransportError:
                return [], True
            except (httpx.HTTPError, LookupError, TypeError, ValueError):
                return [], False
            statuses.add(response.status_code)
        return [], statuses <= NOT_YET
