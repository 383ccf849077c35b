"""``GET /dashboard``: the page, its files, one snapshot, and a stream of snapshots."""

import hashlib
from collections.abc import Callable
from importlib.resources import files
from typing import Annotated

from fastapi import APIRouter, Depends, HTTPException, Query, Request, Response
from fastapi.responses import JSONResponse, StreamingResponse
from fastapi.routing import APIRoute
from starlette.types import Receive, Scope, Send

from proofserve.dashboard.feed import SnapshotFeed, SnapshotUnavailable
from proofserve.dashboard.paging import MOST_MEMBERS, PageView, encoded, page_of
from proofserve.dashboard.records import Level

PAGE = "/dashboard"
SNAPSHOT = f"{PAGE}/snapshot"
EVENTS = f"{PAGE}/events"
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


class EventStream(StreamingResponse):
    """A stream of events that counts as open until its own call ends, however it ends."""

    def __init__(self, feed: SnapshotFeed, view: PageView) -> None:
        headers = {"Cache-Control": "no-store", "X-Accel-Buffering": "no"}
        super().__init__(feed.events(view), headers=headers, media_type="text/event-stream")
        self._feed = feed

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        with self._feed.one_stream():
            await super().__call__(scope, receive, send)


def router(get_feed: Callable[[Request], SnapshotFeed], guarded: type[APIRoute]) -> APIRouter:
    """The routes. ``guarded`` is the class of those with data: it admits clients with a key.

    The page and its files are the same for every server and need none. ``get_feed`` finds the feed
    of a request.
    """
    made = APIRouter(prefix=PAGE, include_in_schema=False)
    pages = _Files()
    made.add_api_route("", pages.page, methods=["GET"])
    made.add_api_route("/static/{name}", pages.file, methods=["GET"])
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
        if feed.is_full:
            return JSONResponse({"detail": _BUSY}, 429, {"Retry-After": "30"})
        return EventStream(feed, view)

    data.add_api_route("/snapshot", snapshot, methods=["GET"])
    data.add_api_route("/events", events, methods=["GET"])
    both = APIRouter()
    both.include_router(made)
    both.include_router(data)
    return both


def _view(
    page: Annotated[int, Query(ge=1, le=1_000_000)] = 1,
    limit: Annotated[int, Query(ge=1, le=MOST_MEMBERS)] = 50,
    level: Level | None = None,
    search: Annotated[str, Query(max_length=100)] = "",
) -> PageView:
    return PageView(page, limit, level, search)


Viewed = Annotated[PageView, Depends(_view)]


class _Files:
    """The page and its files, read once: they are few and small."""

    def __init__(self) -> None:
        folder = files("proofserve.dashboard") / "static"
        self._contents = {each.name: each.read_bytes() for each in folder.iterdir()}

    async def page(self, request: Request) -> Response:
        """The page itself; it holds no data."""
        return self._answer("index.html", request)

    async def file(self, name: str, request: Request) -> Response:
        """A script, a style or a picture of the page."""
        return self._answer(name, request)

    def _answer(self, name: str, request: Request) -> Response:
        content = self._contents.get(name)
        if content is None:
            raise HTTPException(404, f"the dashboard has no file {name[:100]!r}")
        tag = hashlib.blake2b(content, digest_size=12).hexdigest()
        headers = {**_HEADERS, "ETag": f'"{tag}"', "Cache-Control": "no-cache"}
        if tag in request.headers.get("if-none-match", ""):
            return Response(status_code=304, headers=headers)
        kind = _TYPES[name.rpartition(".")[2]]
        return Response(content, headers=headers, media_type=kind)
