"""One reading serves all pages; streams are counted, bounded, and end with the server."""

import asyncio
import json
from collections.abc import AsyncIterator
from typing import Any

import httpx
import pytest
from fastapi import FastAPI
from fastapi.routing import APIRoute

from dashboard.snapshots import fleet
from proofserve.dashboard import routes
from proofserve.dashboard.records import DashboardSnapshot
from proofserve.dashboard.routes import PageView, SnapshotFeed, SnapshotUnavailable

pytestmark = pytest.mark.anyio


READING = b": reading\n\n"


class Source:
    """Counts readings; ``error`` and ``wait_s`` make them fail or take long."""

    def __init__(self) -> None:
        self.readings = 0
        self.error: Exception | None = None
        self.wait_s = 0.0
        self.ending = self.ends_after_a_reading = False
        self.snapshot = fleet(3)

    async def read(self) -> DashboardSnapshot:
        self.readings += 1
        await asyncio.sleep(self.wait_s)
        self.ending = self.ending or self.ends_after_a_reading
        if self.error is not None:
            raise self.error
        return self.snapshot

    def feed(self, **more: Any) -> SnapshotFeed:
        return SnapshotFeed(self.read, lambda: self.ending, **{"interval_s": 0.02, **more})


def named(event: bytes) -> tuple[str, Any]:
    first, second = event.decode().rstrip("\n").split("\n")
    return first.removeprefix("event: "), json.loads(second.removeprefix("data: "))


async def following(stream: AsyncIterator[bytes], name: str) -> Any:
    """The data of the next event ``name``. On a busy machine others come before it."""
    async with asyncio.timeout(15):
        async for event in stream:
            if event == READING:
                continue
            found, data = named(event)
            if found == name:
                return data
            assert found == "same"
    pytest.fail("the stream has ended")


async def test_many_pages_share_one_reading() -> None:
    source = Source()
    source.wait_s = 0.01
    feed = source.feed(interval_s=10)
    found = await asyncio.gather(*(feed.latest() for _ in range(20)))
    assert source.readings == 1
    assert all(each is found[0] for each in found)


async def test_a_page_that_leaves_does_not_end_the_reading_of_the_others() -> None:
    source = Source()
    source.wait_s = 0.05
    feed = source.feed()
    leaving, staying = asyncio.create_task(feed.latest()), asyncio.create_task(feed.latest())
    await asyncio.sleep(0.01)
    leaving.cancel()
    assert (await staying).title == "Fleet"


async def test_a_stream_says_what_changed_and_that_nothing_did() -> None:
    source = Source()
    stream = source.feed().events(PageView())
    await following(stream, "snapshot")
    assert await following(stream, "same") == {"at": source.snapshot.at}
    source.snapshot = fleet(4)
    assert (await following(stream, "snapshot"))["paging"]["total"] == 4
    source.error = SnapshotUnavailable("the database does not answer")
    assert await following(stream, "problem") == {"detail": "the database does not answer"}
    source.error = None
    await following(stream, "snapshot")
    source.wait_s = 0.1
    async with asyncio.timeout(15):
        while await anext(stream) != READING:
            pass
    source.ending = True
    rest = [event async for event in stream if event != READING]
    assert named(rest[-1])[0] == "same"


def application(feed: SnapshotFeed) -> httpx.AsyncClient:
    app = FastAPI()
    app.include_router(routes.router(lambda _: feed, APIRoute))
    return httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://here")


async def test_streams_are_counted_and_bounded() -> None:
    source = Source()
    feed = source.feed(most_streams=1)
    async with application(feed) as client:
        feed.open_streams += 1
        refused = await client.get(f"{routes.PAGE}/events")
        feed.open_streams -= 1
        assert (refused.status_code, refused.headers["retry-after"]) == (429, "30")
        # The double of a transport collects a whole answer, so the server ends this one.
        source.ends_after_a_reading = True
        served = await client.get(f"{routes.PAGE}/events")
    assert served.headers["content-type"].startswith("text/event-stream")
    assert served.text.removeprefix(READING.decode()).startswith("event: snapshot\n")
    assert feed.open_streams == 0


async def test_a_snapshot_is_sent_once_while_nothing_changes() -> None:
    source = Source()
    async with application(source.feed()) as client:
        first = await client.get(routes.SNAPSHOT)
        tag = {"If-None-Match": first.headers["etag"]}
        assert first.json()["paging"]["total"] == 3
        again = await client.get(routes.SNAPSHOT, headers=tag)
        assert (again.status_code, again.content) == (304, b"")
        source.error = SnapshotUnavailable("the disk is full")
        await asyncio.sleep(0.03)
        failed = await client.get(routes.SNAPSHOT)
        assert (failed.status_code, failed.json()) == (503, {"detail": "the disk is full"})


@pytest.mark.parametrize(
    "query", ["page=0", "limit=101", "level=great", "page=x", f"search={'a' * 101}"]
)
async def test_a_wrong_query_is_named(query: str) -> None:
    async with application(Source().feed()) as client:
        answer = await client.get(f"{routes.SNAPSHOT}?{query}")
    assert answer.status_code == 422
    assert answer.json()["detail"][0]["loc"] == ["query", query.partition("=")[0]]


async def test_the_page_and_its_files_are_of_this_server_alone() -> None:
    async with application(Source().feed()) as client:
        page = await client.get(routes.PAGE)
        assert page.headers["content-security-policy"] == routes.POLICY
        assert "unsafe" not in routes.POLICY
        for found in ("style=", "onclick", "http://", "https://", "<style"):
            assert found not in page.text
        names = [part.split('"')[0] for part in page.text.split("dashboard/static/")[1:]]
        assert len(names) > 5
        for name in names:
            file = await client.get(f"{routes.PAGE}/static/{name}")
            assert file.status_code == 200
            assert file.headers["x-content-type-options"] == "nosniff"
            tag = {"If-None-Match": file.headers["etag"]}
            again = await client.get(f"{routes.PAGE}/static/{name}", headers=tag)
            assert again.status_code == 304
        for name in ("nothing.js", "..%2Froutes.py", "__init__.py"):
            assert (await client.get(f"{routes.PAGE}/static/{name}")).status_code == 404
