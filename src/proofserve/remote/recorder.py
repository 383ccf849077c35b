"""Keeps a share of an application's chats with their receipts, as ``watch-chat`` reads them.

It works with every client that takes an ``httpx`` client, such as the official ``openai`` package::

    with Recorder(Path("chats"), share=0.01) as recorder:
        client = OpenAI(base_url="https://provider/v1", http_client=recorder.http_client())

Transports of ``httpx`` copy chat requests and their answers while they pass. A fault here never
changes an answer: what cannot be kept is left out and logged.
"""

import json
import logging
import random
import re
import secrets
import threading
import time
from collections.abc import AsyncIterator, Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, suppress
from pathlib import Path
from typing import Any
from urllib.parse import quote

import httpx

from proofserve.remote.http import first
from proofserve.wire import RECEIPTS

_logger = logging.getLogger(__name__)

CHATS = ("/chat/completions", "/completions")
_EVENT = b"data:"
_DONE = b"[DONE]"
# Within JSON a new line is written as two characters, so no answer's text can look so.
_LAST_EVENT = re.compile(rb"(?:^|[\r\n])data: ?\[DONE\]")
# How a server says that it does not know a field of a request.
_REFUSALS = frozenset({httpx.codes.BAD_REQUEST, httpx.codes.UNPROCESSABLE_ENTITY})
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


def now_ms() -> int:
    """Unix time in milliseconds."""
    return int(time.time() * 1000)


class KeptExchange(httpx.SyncByteStream, httpx.AsyncByteStream):
    """A chat request as it was sent, and the stream of its answer, whose bytes are copied.

    ``ended`` is called with it once, and only if the answer is complete.
    """

    def __init__(self, sent: httpx.Request, ended: "Callable[[KeptExchange], None]") -> None:
        self.headers = {n: v for n, v in sent.headers.items() if n.lower() == "authorization"}
        self.request: dict[str, Any] = json.loads(sent.content)
        self._url = sent.url
        self._ended = ended
        self._stream: Any = None
        self._encoding = ""
        self._parts: list[bytes] = []
        self._reported = False
        # By this machine's clock; None until the answer has ended.
        self.ended_ms: int | None = None

    def copy(self, response: httpx.Response) -> None:
        """Keep what the client reads of a successful ``response``."""
        if response.is_success:
            self._encoding = response.headers.get("content-encoding", "")
            self._stream, response.stream = response.stream, self

    def __iter__(self) -> Iterator[bytes]:
        for part in self._stream:
            self._parts.append(part)
            yield part
        self._report()

    async def __aiter__(self) -> AsyncIterator[bytes]:
        async for part in self._stream:
            self._parts.append(part)
            yield part
        self._report()

    def close(self) -> None:
        self._report_last_event()
        self._stream.close()

    async def aclose(self) -> None:
        self._report_last_event()
        await self._stream.aclose()

    def _report(self) -> None:
        if not self._reported:
            self._reported = True
            self.ended_ms = now_ms()
            self._ended(self)

    def _report_last_event(self) -> None:
        """A client may stop reading after the last event, before the end of the body."""
        if self._reported or not self.request.get("stream"):
            return
        with suppress(httpx.DecodingError):
            if _LAST_EVENT.search(self._text()):
                self._report()

    def receipt_urls(self, response_id: str) -> list[httpx.URL]:
        """Where a gateway has the receipts of its clients, and where a node has them."""
        path = self._url.raw_path.partition(b"?")[0].decode("ascii")
        for end in CHATS:
            path = path.removesuffix(end)
        name = quote(response_id, safe="")
        paths = (f"{path}/receipts/{name}", f"{RECEIPTS}/{name}")
        return [self._url.copy_with(raw_path=each.encode("ascii")) for each in paths]

    def response(self) -> dict[str, Any] | None:
        """The whole answer; that of a stream is put together. None if it has no id or no end.

        Raises ValueError and httpx.DecodingError for bytes that are no answer.
        """
        text = self._text()
        found = _of_stream(text) if self.request.get("stream") else json.loads(text)
        return found if isinstance(found, dict) and found.get("id") else None

    def _text(self) -> bytes:
        headers = {"content-encoding": self._encoding} if self._encoding else {}
        return httpx.Response(200, headers=headers, content=b"".join(self._parts)).content


def _of_stream(text: bytes) -> dict[str, Any] | None:
    """The answer that the events of a stream make together; None if the server did not end it."""
    whole: dict[str, Any] = {}
    choices: dict[int, dict[str, Any]] = {}
    for line in text.splitlines():
        data = line.removeprefix(_EVENT).strip()
        if not line.startswith(_EVENT) or data == _DONE:
            continue
        chunk = json.loads(data)
        if "error" in chunk:
            return None
        rest = {name: value for name, value in chunk.items() if name != "choices"}
        whole |= {name: value for name, value in rest.items() if value is not None}
        for part in chunk.get("choices") or ():
            choice = choices.setdefault(part["index"], {"index": part["index"]})
            if "delta" in part:
                _join(choice.setdefault("message", {"content": None}), part["delta"] or {})
            _join(choice, {name: part.get(name) for name in ("text", "token_ids")})
            if part.get("finish_reason"):
                choice["finish_reason"] = part["finish_reason"]
    if not choices or not all(each.get("finish_reason") for each in choices.values()):
        return None
    return {**whole, "choices": [choices[index] for index in sorted(choices)]}


def _join(whole: dict[str, Any], piece: dict[str, Any]) -> None:
    """Texts and lists follow each other; of everything else the last value counts."""
    for name, value in piece.items():
        before = whole.get(name)
        if value is None:
            continue
        joins = isinstance(value, str | list) and type(before) is type(value) and name != "role"
        whole[name] = before + value if joins else value


class RecordingTransport(httpx.BaseTransport, httpx.AsyncBaseTransport):
    """Sends by ``inner``; calls ``ended`` after each complete answer that ``wanted`` chose.

    A server that refuses the request for token ids gets the client's own request. A transport is
    synchronous or asynchronous, as ``inner`` is.
    """

    def __init__(
        self, inner: Any, wanted: Callable[[], bool], ended: Callable[[KeptExchange], None]
    ) -> None:
        self._inner = inner
        self._wanted = wanted
        self._ended = ended

    def handle_request(self, request: httpx.Request) -> httpx.Response:
        request.read()
        kept, sent = self._prepared(request)
        response: httpx.Response = self._inner.handle_request(sent)
        if kept is not None and response.status_code in _REFUSALS:
            response.close()
            response = self._inner.handle_request(request)
        elif kept is not None:
            kept.copy(response)
        return response

    async def handle_async_request(self, request: httpx.Request) -> httpx.Response:
        await request.aread()
        kept, sent = self._prepared(request)
        response: httpx.Response = await self._inner.handle_async_request(sent)
        if kept is not None and response.status_code in _REFUSALS:
            await response.aclose()
            response = await self._inner.handle_async_request(request)
        elif kept is not None:
            kept.copy(response)
        return response

    def close(self) -> None:
        self._inner.close()

    async def aclose(self) -> None:
        await self._inner.aclose()

    def _prepared(self, request: httpx.Request) -> tuple[KeptExchange | None, httpx.Request]:
        """What to keep of ``request``, None if nothing, and the request to send."""
        if request.method != "POST" or not request.url.path.endswith(CHATS) or not self._wanted():
            return None, request
        try:
            body = json.loads(request.content)
            content = json.dumps({**body, "return_token_ids": True}).encode()
        except (ValueError, TypeError, RecursionError):
            # The server says what is wrong with it.
            return None, request
        headers = request.headers.copy()
        for name in ("content-length", "transfer-encoding"):
            headers.pop(name, None)
        extensions = request.extensions
        sent = httpx.Request(
            "POST", request.url, headers=headers, content=content, extensions=extensions
        )
        return KeptExchange(sent, self._ended), sent


class Recorder(AbstractContextManager["Recorder"]):
    """Writes ``folder``/RESPONSE_ID.RANDOM.json for a random ``share`` (0 to 1) of the chats.

    A file has "request", "response" and "receipts", which are empty if none came in time, and by
    this machine's clock "ended_ms" of the answer and "seen_ms" of its receipts. The requests of
    kept chats also ask for token ids, unless the server refuses that.

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
        transport = RecordingTransport(httpx.AsyncHTTPTransport(), self._wanted, self._ended)
        return httpx.AsyncClient(transport=transport, timeout=TIMEOUT, follow_redirects=True)

    def close(self) -> None:
        """Wait until the receipts of all ended chats are written."""
        self._pool.shutdown()
        self._http.close()

    def __exit__(self, *_error: object) -> None:
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
            response_id = str(response["id"])
            asked = first(lambda: self._asked(kept, response_id), RECEIPT_S, POLL_S)
            times = {"ended_ms": kept.ended_ms, "seen_ms": now_ms()}
            body = {"request": kept.request, "response": response, "receipts": asked or [], **times}
            name = "".join(c if c.isalnum() or c in "-_" else "_" for c in response_id)
            # A server that gives two answers the same id must not replace the first one.
            unique = f"{name[:LONGEST_NAME]}.{secrets.token_hex(4)}"
            partial = self._folder / f".{unique}.part"
            partial.write_text(json.dumps(body), encoding="utf-8")
            # A reader never sees half a file.
            partial.replace(self._folder / f"{unique}.json")
        except Exception as error:  # noqa: BLE001 - a server may answer anything
            _logger.warning("a chat was not kept: %r", error)
        finally:
            self._room.release()

    def _asked(self, kept: KeptExchange, response_id: str) -> list[Any] | None:
        """The receipts; None if they may come later."""
        statuses = set()
        for url in kept.receipt_urls(response_id):
            try:
                response = self._http.get(url, headers=kept.headers)
                if response.is_success and (found := response.json()["receipts"]):
                    return list(found)
            except httpx.TransportError:
                return None
            except (httpx.HTTPError, LookupError, TypeError, ValueError):
                return []
            statuses.add(response.status_code)
        return None if statuses <= NOT_YET else []
