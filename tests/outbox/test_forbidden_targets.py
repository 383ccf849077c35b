"""No URL reaches a listener that the allowlist forbids: real sockets, scripted names."""

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager, suppress
from ipaddress import ip_address
from pathlib import Path

import pytest

from proofserve.outbox.allowlist import Address, Allowlist
from proofserve.outbox.planning import CallbackPolicy, Delivery
from proofserve.outbox.sender import CallbackSender, Outward, new_client, post
from proofserve.outbox.store import SqliteOutbox

from .support import FastClock, a_spec, artifacts, sending

pytestmark = pytest.mark.anyio

ALLOWED, FORBIDDEN = "127.0.0.2", "127.0.0.3"
ONLY_ALLOWED = Allowlist([f"{ALLOWED}/32"])
OK = b"HTTP/1.1 200 OK\r\ncontent-length: 0\r\n\r\n"


class Names:
    """Answers look-ups from a script and repeats its last entry, which a real DNS cannot do."""

    def __init__(self, *answers: Sequence[str]) -> None:
        self._answers = [[ip_address(text) for text in answer] for answer in answers]
        self.asked: list[str] = []

    async def __call__(self, host: str, _port: int) -> Sequence[Address]:
        self.asked.append(host)
        return self._answers[min(len(self.asked), len(self._answers)) - 1]


class Listener:
    """A target that counts connections and always gives the same answer."""

    def __init__(self, answer: bytes = OK) -> None:
        self.answer = answer
        self.connections = 0
        self.heads: list[bytes] = []
        self.port = 0

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.connections += 1
        self.heads.append(await reader.readuntil(b"\r\n\r\n"))
        writer.write(self.answer)
        writer.close()


@asynccontextmanager
async def listening(host: str, port: int = 0, answer: bytes = OK) -> AsyncIterator[Listener]:
    listener = Listener(answer)
    async with await asyncio.start_server(listener.serve, host, port) as server:
        listener.port = server.sockets[0].getsockname()[1]
        yield listener


@asynccontextmanager
async def both() -> AsyncIterator[tuple[Listener, Listener]]:
    """An allowed and a forbidden listener on the same port."""
    async with listening(ALLOWED) as allowed, listening(FORBIDDEN, allowed.port) as forbidden:
        yield allowed, forbidden


async def send(url: str, outward: Outward) -> str | None:
    delivery = Delivery(1, "validated", url, "k3y", 9, 0, None)
    async with new_client(outward) as client:
        return await post(client, outward, delivery, b"{}", 5.0)


@pytest.mark.parametrize(
    "host",
    [
        FORBIDDEN,
        "2130706435",
        "0x7f000003",
        "0x7f.3",
        "0177.0.0.3",
        "127.3",
        "[::ffff:127.0.0.3]",
        "[::ffff:7f00:3]",
        f"{ALLOWED}@{FORBIDDEN}",
        f"user:word@{FORBIDDEN}",
        f"user:word@{ALLOWED}",
        f"{FORBIDDEN}.",
    ],
)
async def test_no_spelling_of_a_forbidden_address_is_reached(host: str) -> None:
    async with both() as (allowed, forbidden):
        url = f"http://{host}:{allowed.port}"
        error = await send(url, Outward(ONLY_ALLOWED))
        assert error is not None
        assert error.startswith(("ForbiddenTarget", "ConnectError", "InvalidURL"))
        assert (allowed.connections, forbidden.connections) == (0, 0)


async def test_an_allowed_target_is_reached() -> None:
    async with both() as (allowed, forbidden):
        for host in (ALLOWED, "2130706434", "[::ffff:127.0.0.2]"):
            assert await send(f"http://{host}:{allowed.port}", Outward(ONLY_ALLOWED)) is None
        assert (allowed.connections, forbidden.connections) == (3, 0)


async def test_the_default_allows_this_machine_by_its_names() -> None:
    async with listening("127.0.0.1") as target:
        for host in ("127.0.0.1", "localhost"):
            assert await send(f"http://{host}:{target.port}", Outward()) is None
        assert target.connections == 2


async def test_the_default_allows_the_other_loopback() -> None:
    async with listening("::1") as target:
        assert await send(f"http://[::1]:{target.port}/base", Outward()) is None
        assert f"host: [::1]:{target.port}".encode() in target.heads[0].lower()


async def test_a_name_is_looked_up_once_and_the_checked_address_is_connected() -> None:
    names = Names([ALLOWED], [FORBIDDEN])
    async with both() as (allowed, forbidden):
        url = f"http://rebinding.example:{allowed.port}"
        outward = Outward(ONLY_ALLOWED, resolve=names)
        assert await send(url, outward) is None
        assert names.asked == ["rebinding.example"]
        assert f"host: rebinding.example:{allowed.port}".encode() in allowed.heads[0].lower()
        error = await send(url, outward)
        assert error is not None
        assert error.startswith(f"ForbiddenTarget: leads to rebinding.example at {FORBIDDEN}")
        assert (allowed.connections, forbidden.connections) == (1, 0)


async def test_tls_asks_for_the_certificate_of_the_name_and_not_of_the_address() -> None:
    """The first bytes of TLS contain the name as plain text, so the test needs no certificate."""
    first_bytes: list[bytes] = []

    async def read(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        first_bytes.append(await reader.read(4096))
        writer.close()

    async with await asyncio.start_server(read, ALLOWED, 0) as server:
        port = server.sockets[0].getsockname()[1]
        outward = Outward(ONLY_ALLOWED, resolve=Names([ALLOWED]))
        assert await send(f"https://validator.example:{port}", outward)
    assert b"validator.example" in first_bytes[0]


async def test_a_connection_is_not_kept_for_another_name() -> None:
    """Two names at one address: the second must not use the connection of the first."""
    connections = 0

    async def hospitable(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        nonlocal connections
        connections += 1
        with suppress(asyncio.IncompleteReadError):
            while await reader.readuntil(b"\r\n\r\n{}"):
                writer.write(OK)
        writer.close()

    outward = Outward(ONLY_ALLOWED, resolve=Names([ALLOWED]))
    async with (
        await asyncio.start_server(hospitable, ALLOWED, 0) as server,
        new_client(outward) as client,
    ):
        port = server.sockets[0].getsockname()[1]
        for name in ("one", "two"):
            # Unlike ``post`` this reads all of the answer: only then can a connection be kept.
            answer = await client.post(f"http://{name}.example:{port}", content=b"{}")
            assert answer.status_code == 200
    assert connections == 2


@pytest.mark.parametrize(
    "answer", [[ALLOWED, FORBIDDEN], [FORBIDDEN, ALLOWED], [ALLOWED, "10.0.0.1"]]
)
async def test_a_name_with_one_forbidden_address_is_forbidden(answer: list[str]) -> None:
    outward = Outward(ONLY_ALLOWED, resolve=Names(answer))
    async with both() as (allowed, forbidden):
        error = await send(f"http://mixed.example:{allowed.port}", outward)
        assert error is not None
        assert error.startswith("ForbiddenTarget")
        assert (allowed.connections, forbidden.connections) == (0, 0)


async def test_after_an_address_that_refuses_the_next_one_is_tried() -> None:
    outward = Outward(Allowlist(), resolve=Names(["127.0.0.9", ALLOWED]))
    async with listening(ALLOWED) as target:
        assert await send(f"http://two.example:{target.port}", outward) is None
        assert target.connections == 1


@pytest.mark.parametrize("status", [301, 302, 303, 307, 308])
async def test_a_redirect_is_not_followed(status: int) -> None:
    async with listening(FORBIDDEN) as forbidden:
        location = f"http://{FORBIDDEN}:{forbidden.port}/"
        answer = f"HTTP/1.1 {status} Go\r\nlocation: {location}\r\ncontent-length: 0\r\n\r\n"
        async with listening(ALLOWED, answer=answer.encode()) as allowed:
            await send(f"http://{ALLOWED}:{allowed.port}", Outward(ONLY_ALLOWED))
            assert (allowed.connections, forbidden.connections) == (1, 0)


async def test_a_proxy_of_the_environment_is_not_used(monkeypatch: pytest.MonkeyPatch) -> None:
    async with both() as (allowed, forbidden):
        for name in ("http_proxy", "HTTP_PROXY", "ALL_PROXY"):
            monkeypatch.setenv(name, f"http://{FORBIDDEN}:{forbidden.port}")
        assert await send(f"http://{ALLOWED}:{allowed.port}", Outward(ONLY_ALLOWED)) is None
        assert forbidden.connections == 0


async def test_an_unknown_name_is_an_ordinary_error() -> None:
    async def unknown(host: str, port: int) -> Sequence[Address]:
        raise OSError("Name or service not known")

    error = await send("http://unknown.example", Outward(resolve=unknown))
    assert error == "ConnectError: unknown.example cannot be looked up: Name or service not known"
    error = await send("http://unknown.example", Outward(resolve=Names([])))
    assert error == "ConnectError: unknown.example has no address"


async def test_a_forbidden_target_shows_in_the_status_and_expires(
    path: Path, clock: FastClock
) -> None:
    outward = Outward(ONLY_ALLOWED, resolve=Names([FORBIDDEN]))
    async with both() as (allowed, forbidden), await SqliteOutbox.open(path, clock) as store:
        await store.open_round(a_spec(url=f"http://rebinding.example:{allowed.port}"))
        await store.record("r1", 1, artifacts(3), {})
        await store.close_round("r1")
        policy = CallbackPolicy(max_retries=2)
        sender = CallbackSender(store, policy, clock.sleep, outward)
        async with sending(sender):
            # One attempt each: the sender does not wait for a failed one.
            while not (await store.gauges()).expired:
                await sender.drain(5.0)
        gauges = await store.gauges()
        assert (gauges.pending, gauges.expired) == (0, 1)
        assert str(gauges.last_error).startswith("ForbiddenTarget: leads to rebinding.example")
        # Results that were never sent can still be read.
        assert [row.nonce for row in await store.results(0, 10)] == [3]
        assert (allowed.connections, forbidden.connections) == (0, 0)
