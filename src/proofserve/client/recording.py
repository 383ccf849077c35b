"""Transports of ``httpx`` that copy chat requests and their answers while they pass."""

import json
import re
from collections.abc import AsyncIterator, Callable, Iterator
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import quote

import httpx

from proofserve.wire.paths import RECEIPTS

CHATS = ("/chat/completions", "/completions")
_EVENT = b"data:"
_DONE = b"[DONE]"
# Within JSON a new line is written as two characters, so no answer's text can look so.
_LAST_EVENT = re.compile(rb"(?:^|[\r\n])data: ?\[DONE\]")
# How a server says that it does not know a field of a request.
_REFUSALS = frozenset({httpx.codes.BAD_REQUEST, httpx.codes.UNPROCESSABLE_ENTITY})


@dataclass(slots=True)
class KeptExchange:
    """A chat request as it was sent, and the answer's bytes, decoded."""

    url: httpx.URL
    headers: dict[str, str]
    request: dict[str, Any]
    encoding: str = ""
    parts: list[bytes] = field(default_factory=list)

    def receipt_urls(self, response_id: str) -> list[httpx.URL]:
        """Where a gateway has the receipts of its clients, and where a node has them."""
        path = self.url.raw_path.partition(b"?")[0].decode("ascii")
        for end in CHATS:
            path = path.removesuffix(end)
        name = quote(response_id, safe="")
        paths = (f"{path}/receipts/{name}", f"{RECEIPTS}/{name}")
        return [self.url.copy_with(raw_path=each.encode("ascii")) for each in paths]

    def response(self) -> dict[str, Any] | None:
        """The whole answer; that of a stream is put together. None if it has no id or no end.

        Raises ValueError and httpx.DecodingError for bytes that are no answer.
        """
        text = self._text()
        found = _of_stream(text) if self.request.get("stream") else json.loads(text)
        return found if isinstance(found, dict) and found.get("id") else None

    def has_last_event(self) -> bool:
        if not self.request.get("stream"):
            return False
        try:
            return _LAST_EVENT.search(self._text()) is not None
        except httpx.DecodingError:
            return False

    def _text(self) -> bytes:
        headers = {"content-encoding": self.encoding} if self.encoding else {}
        return httpx.Response(200, headers=headers, content=b"".join(self.parts)).content


Wanted = Callable[[], bool]
Ended = Callable[[KeptExchange], None]


class RecordingTransport(httpx.BaseTransport):
    """Sends by ``inner``; calls ``ended`` after each complete answer that ``wanted`` chose.

    A server that refuses the request for token ids gets the client's own request.
    """

    def __init__(self, inner: httpx.BaseTransport, wanted: Wanted, ended: Ended) -> None:
        self._inner = inner
        self._wanted = wanted
        self._ended = ended

    def handle_request(self, request: httpx.Request) -> httpx.Response:
        request.read()
        kept, sent = _prepared(request, self._wanted)
        response = self._inner.handle_request(sent)
        if kept is not None and response.status_code in _REFUSALS:
            response.close()
            return self._inner.handle_request(request)
        if (
            kept is not None
            and response.is_success
            and isinstance(response.stream, httpx.SyncByteStream)
        ):
            kept.encoding = response.headers.get("content-encoding", "")
            response.stream = _Copied(response.stream, kept, self._ended)
        return response

    def close(self) -> None:
        self._inner.close()


class AsyncRecordingTransport(httpx.AsyncBaseTransport):
    """As RecordingTransport."""

    def __init__(self, inner: httpx.AsyncBaseTransport, wanted: Wanted, ended: Ended) -> None:
        self._inner = inner
        self._wanted = wanted
        self._ended = ended

    async def handle_async_request(self, request: httpx.Request) -> httpx.Response:
        await request.aread()
        kept, sent = _prepared(request, self._wanted)
        response = await self._inner.handle_async_request(sent)
        if kept is not None and response.status_code in _REFUSALS:
            await response.aclose()
            return await self._inner.handle_async_request(request)
        if (
            kept is not None
            and response.is_success
            and isinstance(response.stream, httpx.AsyncByteStream)
        ):
            kept.encoding = response.headers.get("content-encoding", "")
            response.stream = _AsyncCopied(response.stream, kept, self._ended)
        return response

    async def aclose(self) -> None:
        await self._inner.aclose()


class _Copied(httpx.SyncByteStream):
    def __init__(self, inner: httpx.SyncByteStream, kept: KeptExchange, ended: Ended) -> None:
        self._inner, self._kept = inner, _Kept(kept, ended)

    def __iter__(self) -> Iterator[bytes]:
        for part in self._inner:
            self._kept.add(part)
            yield part
        self._kept.end()

    def close(self) -> None:
        self._kept.end_of_stream()
        self._inner.close()


class _AsyncCopied(httpx.AsyncByteStream):
    def __init__(self, inner: httpx.AsyncByteStream, kept: KeptExchange, ended: Ended) -> None:
        self._inner, self._kept = inner, _Kept(kept, ended)

    async def __aiter__(self) -> AsyncIterator[bytes]:
        async for part in self._inner:
            self._kept.add(part)
            yield part
        self._kept.end()

    async def aclose(self) -> None:
        self._kept.end_of_stream()
        await self._inner.aclose()


class _Kept:
    """Reports an exchange once, and only if its answer is complete."""

    def __init__(self, kept: KeptExchange, ended: Ended) -> None:
        self._kept, self._ended, self._reported = kept, ended, False

    def add(self, part: bytes) -> None:
        self._kept.parts.append(part)

    def end(self) -> None:
        if not self._reported:
            self._reported = True
            self._ended(self._kept)

    def end_of_stream(self) -> None:
        """A client may stop reading after the last event, before the end of the body."""
        if not self._reported and self._kept.has_last_event():
            self.end()


def _prepared(request: httpx.Request, wanted: Wanted) -> tuple[KeptExchange | None, httpx.Request]:
    """What to keep of ``request``, None if nothing, and the request to send."""
    if request.method != "POST" or not request.url.path.endswith(CHATS) or not wanted():
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
    keys = {n: v for n, v in headers.items() if n.lower() == "authorization"}
    return KeptExchange(request.url, keys, json.loads(content)), sent


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
            _add(choices.setdefault(part["index"], {"index": part["index"]}), part)
    if not choices or not all(each.get("finish_reason") for each in choices.values()):
        return None
    return {**whole, "choices": [choices[index] for index in sorted(choices)]}


def _add(choice: dict[str, Any], part: dict[str, Any]) -> None:
    if "delta" in part:
        _join(choice.setdefault("message", {"content": None}), part["delta"] or {})
    _join(choice, {name: part.get(name) for name in ("text", "token_ids")})
    if part.get("finish_reason"):
        choice["finish_reason"] = part["finish_reason"]


def _join(whole: dict[str, Any], piece: dict[str, Any]) -> None:
    """Texts and lists follow each other; of everything else the last value counts."""
    for name, value in piece.items():
        before = whole.get(name)
        if value is None:
            continue
        joins = isinstance(value, str | list) and type(before) is type(value) and name != "role"
        whole[name] = before + value if joins else value
