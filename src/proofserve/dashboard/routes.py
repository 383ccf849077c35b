"""``GET /dashboard``: the page, its files, one snapshot, and a stream of snapshots.

A snapshot is read once per interval for all open pages, however many they are. Each page shows a
part of its members, those first that need an operator.
"""

import asyncio
import hashlib
import json
import logging
import time
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import suppress
from dataclasses import dataclass
from importlib.resources import files
from typing import Annotated

import msgspec
from fastapi import APIRouter, Depends, HTTPException, Query, Request, Response
from fastapi.responses import JSONResponse, StreamingResponse
from fastapi.routing import APIRoute
from starlette.types import Receive, Scope, Send

from proofserve.dashboard.records import DashboardSnapshot, Level, MemberPaging, MemberRow

_logger = logging.getLogger(__name__)

PAGE = "/dashboard"
SNAPSHOT = f"{PAGE}/snapshot"
# Only files of this server, and nothing inline: text that a member sends can run no script.
POLICY = "; ".join(
    (
        "default-src 'none'",
        "script-src 'self'",
        "style-src 'self'",
        "connect-src 'self'",
        "img-src 'self'",
        "base-uri 'none'",
        "form-action 'none'",
        "frame-ancestors 'none'",
        "require-trusted-types-for 'script'",
        "trusted-types 'none'",
    )
)
_HEADERS = {
    "Content-Security-Policy": POLICY,
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cross-Origin-Resource-Policy": "same-origin",
}
_TYPES = {
    "css": "text/css",
    "html": "text/html",
    "js": "text/javascript",
    "svg": "image/svg+xml",
    "txt": "text/plain",
}
_BUSY = "all streams of this server are in use: the page asks for snapshots instead"
# Seconds between two readings, and so between two events of a stream.
INTERVAL_S = 2.0
# Most open streams. A page that gets none asks for snapshots instead.
MOST_STREAMS = 32
# Most members of one page; with their trends they take some 50 kB.
MOST_MEMBERS = 100
_WORST_FIRST = {Level.BAD: 0, Level.WARNING: 1, Level.IDLE: 2, Level.GOOD: 3}


@dataclass(frozen=True, slots=True)
class PageView:
    """What one open page shows: a page of the members of ``level`` whose text has ``search``."""

    page: Annotated[int, Query(ge=1, le=1_000_000)] = 1
    limit: Annotated[int, Query(ge=1, le=MOST_MEMBERS)] = 50
    level: Level | None = None
    search: Annotated[str, Query(max_length=100)] = ""


# FastAPI makes it of a request's query.
Viewed = Annotated[PageView, Depends()]


def ranked(snapshot: DashboardSnapshot) -> DashboardSnapshot:
    """The same snapshot, its members sorted: the worst first."""
    members = tuple(sorted(snapshot.members, key=_rank))
    return msgspec.structs.replace(snapshot, members=members)


def page_of(snapshot: DashboardSnapshot, view: PageView) -> DashboardSnapshot:
    """The part of a ranked ``snapshot`` that ``view`` shows. A page after the last is the last."""
    words = view.search.casefold().split()
    found = []
    for member in snapshot.members:
        texts = (member.name, member.state, member.reason, member.model, member.version)
        text = " ".join(texts).casefold() if words else ""
        if view.level in (None, member.level) and all(word in text for word in words):
            found.append(member)
    pages = max(1, -(-len(found) // view.limit))
    page = min(view.page, pages)
    first = (page - 1) * view.limit
    paging = MemberPaging(
        page=page,
        pages=pages,
        matching=len(found),
        total=len(snapshot.members),
        levels=Counter(member.level.value for member in snapshot.members),
    )
    members = tuple(found[first : first + view.limit])
    return msgspec.structs.replace(snapshot, members=members, paging=paging)


def encoded(snapshot: DashboardSnapshot) -> tuple[bytes, str]:
    """``snapshot`` in JSON, and a tag that changes with anything but the time of reading."""
    timeless = msgspec.json.encode(msgspec.structs.replace(snapshot, at=0.0))
    tag = hashlib.blake2b(timeless, digest_size=12).hexdigest()
    return msgspec.json.encode(snapshot), tag


def _rank(member: MemberRow) -> tuple[int, bool, float, float, str]:
    age = member.outbox_age_s or 0.0
    convicted = member.verdict is not None and member.verdict.verdict == "fraud"
    return _WORST_FIRST[member.level], not convicted, -(member.stalled_s or 0.0), -age, member.name


class SnapshotUnavailable(Exception):
    """The server cannot read its state at the moment. The text says why, and reaches the page."""


@dataclass(slots=True, eq=False)
class SnapshotFeed:
    """Hands out what ``read`` returns, to all who show it.

    ``read`` may raise SnapshotUnavailable. Streams end once ``is_ending`` is true, so that they do
    not hold up the end of the server. ``clock`` gives monotonic seconds.
    """

    read: Callable[[], Awaitable[DashboardSnapshot]]
    is_ending: Callable[[], bool] = lambda: False
    interval_s: float = INTERVAL_S
    most_streams: int = MOST_STREAMS
    clock: Callable[[], float] = time.monotonic
    open_streams: int = 0
    _latest: DashboardSnapshot | None = None
    _read_at: float = 0.0
    _reading: "asyncio.Task[DashboardSnapshot] | None" = None

    async def latest(self) -> DashboardSnapshot:
        """The newest snapshot, its members sorted. Raises SnapshotUnavailable."""
        # Streams wake up a little before the interval is over.
        if self._latest is not None and self.clock() - self._read_at < 0.9 * self.interval_s:
            return self._latest
        if self._reading is None:
            self._reading = asyncio.create_task(self._renew())
            self._reading.add_done_callback(self._read_ended)
        # One reading serves all; a page that leaves must not end it for the others.
        return await asyncio.shield(self._reading)

    async def events(self, view: PageView) -> AsyncIterator[bytes]:
        """Server-sent events: ``snapshot``, ``same`` (nothing has changed) or ``problem``.

        While a reading takes long there are comments, so that the page knows the connection works.
        """
        shown = ""
        while not self.is_ending():
            began = self.clock()
            reading = asyncio.ensure_future(self.latest())
            try:
                while not (await asyncio.wait({reading}, timeout=self.interval_s))[0]:
                    yield b": reading\n\n"
                snapshot = page_of(reading.result(), view)
            except SnapshotUnavailable as error:
                shown = ""
                yield _event("problem", json.dumps({"detail": str(error)}).encode())
            else:
                body, tag = encoded(snapshot)
                if tag == shown:
                    yield _event("same", json.dumps({"at": snapshot.at}).encode())
                else:
                    yield _event("snapshot", body)
                shown = tag
            finally:
                reading.cancel()
            await asyncio.sleep(max(0.0, began + self.interval_s - self.clock()))

    async def _renew(self) -> DashboardSnapshot:
        snapshot = ranked(await self.read())
        self._latest, self._read_at = snapshot, self.clock()
        return snapshot

    def _read_ended(self, task: "asyncio.Task[DashboardSnapshot]") -> None:
        self._reading = None
        with suppress(asyncio.CancelledError):
            error = task.exception()
            if error is not None and not isinstance(error, SnapshotUnavailable):
                _logger.error("the dashboard cannot read the server's state", exc_info=error)


def _event(name: str, data: bytes) -> bytes:
    return b"event: %s\ndata: %s\n\n" % (name.encode(), data)


class EventStream(StreamingResponse):
    """A stream of events that counts as open until its own call ends, however it ends."""

    def __init__(self, feed: SnapshotFeed, view: PageView) -> None:
        headers = {"Cache-Control": "no-store", "X-Accel-Buffering": "no"}
        super().__init__(feed.events(view), headers=headers, media_type="text/event-stream")
        self._feed = feed

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        self._feed.open_streams += 1
        try:
            await super().__call__(scope, receive, send)
        finally:
            self._feed.open_streams -= 1


def router(get_feed: Callable[[Request], SnapshotFeed], guarded: type[APIRoute]) -> APIRouter:
    """The routes. ``guarded`` is the class of those with data: it admits clients with a key.

    The page and its files are the same for every server and need none. ``get_feed`` finds the feed
    of a request.
    """
    data = APIRouter(prefix=PAGE, include_in_schema=False, route_class=guarded)

    async def snapshot(request: Request, view: Viewed) -> Response:
        try:
            found = await get_feed(request).latest()
        except SnapshotUnavailable as error:
            return JSONResponse({"detail": str(error)}, 503, {"Retry-After": "2"})
        body, tag = encoded(page_of(found, view))
        headers = {"ETag": f'"{tag}"', "Cache-Control": "no-cache"}
        if tag in request.headers.get("if-none-match", ""):
            return Response(status_code=304, headers=headers)
        return Response(body, headers=headers, media_type="application/json")

    async def events(request: Request, view: Viewed) -> Response:
        feed = get_feed(request)
        if feed.open_streams >= feed.most_streams:
            return JSONResponse({"detail": _BUSY}, 429, {"Retry-After": "30"})
        return EventStream(feed, view)

    data.add_api_route("/snapshot", snapshot, methods=["GET"])
    data.add_api_route("/events", events, methods=["GET"])
    both = APIRouter()
    both.include_router(_files())
    both.include_router(data)
    return both


def _files() -> APIRouter:
    """The page and its files, read once: they are few and small, and hold no data."""
    folder = files("proofserve.dashboard") / "static"
    contents = {each.name: each.read_bytes() for each in folder.iterdir()}
    made = APIRouter(prefix=PAGE, include_in_schema=False)

    @made.get("/static/{name}")
    async def file(name: str, request: Request) -> Response:
        """A script, a style or a picture of the page."""
        content = contents.get(name)
        if content is None:
            raise HTTPException(404, f"the dashboard has no file {name[:100]!r}")
        tag = hashlib.blake2b(content, digest_size=12).hexdigest()
        headers = {**_HEADERS, "ETag": f'"{tag}"', "Cache-Control": "no-cache"}
        if tag in request.headers.get("if-none-match", ""):
            return Response(status_code=304, headers=headers)
        kind = _TYPES[name.rpartition(".")[2]]
        return Response(content, headers=headers, media_type=kind)

    @made.get("")
    async def page(request: Request) -> Response:
        return await file("index.html", request)

    return made
