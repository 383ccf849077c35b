"""Members and controllers as they run: real HTTP on real ports, in the loop of the test."""

from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Any

import httpx

from benchmarks.fleet.fake_member import FakeMember, Serving
from proofserve.receiver.app import create_app
from proofserve.receiver.callbacks import SignatureCheck
from proofserve.receiver.store import ReceiverStore
from proofserve.settings.fleet import FleetSettings
from proofserve.wiring.fleet import running_fleet
from support.pace import until

ROUND: dict[str, Any] = {
    "block_hash": "block",
    "block_height": 7,
    "public_key": "key",
    "node_id": 0,
    "node_count": 1,
    "batch_size": 4,
    "params": {"model": "toy", "seq_len": 16, "k_dim": 12},
}
DISTANCE_ROUND: dict[str, Any] = {
    **{name: ROUND[name] for name in ROUND if name != "params"},
    "r_target": 1.41,
    "seq_len": 16,
}


@asynccontextmanager
async def members(folder: Path, count: int, **settings: Any) -> AsyncIterator[list[FakeMember]]:
    made = [FakeMember(folder, f"m{number}", **settings) for number in range(count)]
    try:
        for each in made:
            await each.start()
        yield made
    finally:
        for each in made:
            await each.kill()


class RunningFleet:
    """A controller and a client of it; ``kill`` and ``start`` restart it on its port."""

    def __init__(self, folder: Path, urls: list[str], **settings: Any) -> None:
        self.serving = Serving()
        self.url = self.serving.url
        self._values = {
            "database": str(folder / "fleet.sqlite"),
            "member": ",".join(urls),
            "lost_after_sec": 2,
            "lanes": 8,
            **settings,
        }
        self._running = AsyncExitStack()
        self.http = httpx.AsyncClient(base_url=self.url, timeout=30.0, trust_env=False)

    async def start(self, **changes: Any) -> None:
        self._values |= changes
        fleet = running_fleet(FleetSettings(**self._values), self.url)
        await self.serving.start(await self._running.enter_async_context(fleet))

    async def kill(self) -> None:
        await self.serving.stop()
        await self._running.aclose()

    async def call(self, method: str, path: str, body: Any = None) -> Any:
        response = await self.http.request(method, path, json=body)
        assert response.is_success, response.text
        return response.json()

    async def pow(self, method: str, path: str, body: Any = None) -> Any:
        return await self.call(method, f"/api/v1/pow{path}", body)

    async def status(self) -> Any:
        return await self.pow("GET", "/status")

    async def snapshot(self) -> Any:
        return await self.call("GET", "/api/v1/fleet/snapshot")

    async def member(self, name: str) -> Any:
        found = (await self.snapshot())["members"]
        return next(each for each in found if each["name"] == name or each["url"] == name)

    async def results(self) -> list[Any]:
        rows: list[Any] = []
        after = 0
        while page := (await self.pow("GET", f"/results?after={after}&limit=1000"))["results"]:
            rows += page
            after = page[-1]["seq"]
        return rows

    async def nonces(self) -> list[int]:
        return [row["nonce"] for row in await self.results()]

    async def until_ready(self, count: int) -> None:
        async def ready() -> bool:
            return (await self.snapshot())["fleet"]["members"]["ready"] == count

        await until(ready)

    async def until_each_stored(self, count: int) -> None:
        """Wait until each member's lane has that many results."""

        async def enough() -> bool:
            return all(each["stored"] >= count for each in (await self.snapshot())["members"])

        await until(enough)

    async def until_processed(self, count: int, seconds: float = 20.0) -> None:
        async def enough() -> bool:
            stats = (await self.status())["stats"]
            return stats is not None and stats["total_processed"] >= count

        await until(enough, seconds)


@asynccontextmanager
async def fleet_of(
    folder: Path, made: Sequence[FakeMember | RunningFleet], **settings: Any
) -> AsyncIterator[RunningFleet]:
    running = RunningFleet(folder, [each.url for each in made], **settings)
    await running.start()
    try:
        await running.until_ready(len(made))
        yield running
    finally:
        await running.kill()
        await running.http.aclose()


@asynccontextmanager
async def fleet_in_fleet(folder: Path) -> AsyncIterator[tuple[RunningFleet, RunningFleet]]:
    """A fleet of a server and another fleet, and that one, which has two servers."""
    inner_folder, outer_folder = folder / "inner", folder / "outer"
    inner_folder.mkdir()
    outer_folder.mkdir()
    async with (
        members(inner_folder, 2) as inner,
        members(outer_folder, 1) as beside,
        fleet_of(inner_folder, inner) as fleet,
        fleet_of(outer_folder, [*beside, fleet]) as outer,
    ):
        yield outer, fleet


class Receiver:
    """The network's end of callbacks, as ``proofserve receive``."""

    def __init__(self, folder: Path, secret: bytes | None = None) -> None:
        self.store = ReceiverStore.open(folder / "received.sqlite")
        self.serving = Serving()
        self.url = self.serving.url
        self._check = None if secret is None else SignatureCheck(secret)

    async def start(self) -> None:
        await self.serving.start(create_app(self.store, self._check))


@asynccontextmanager
async def receiving(folder: Path, secret: bytes | None = None) -> AsyncIterator[Receiver]:
    receiver = Receiver(folder, secret)
    await receiver.start()
    try:
        yield receiver
    finally:
        await receiver.serving.stop()
        receiver.store.close()
