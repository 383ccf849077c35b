"""The check of a callback URL when a round is ordered, with a scripted resolver."""

import asyncio
import threading
from collections.abc import Sequence
from ipaddress import ip_address

import pytest

from proofserve.outbox.allowlist import Address, Allowlist, UrlCheck

pytestmark = pytest.mark.anyio

URL = "http://receiver.example:9000"
LAN = Allowlist(["10.0.0.0/8", "https://trusted.example"])


class Names:
    """Resolves every name to ``addresses``, after ``gate`` is set."""

    def __init__(self, *addresses: str) -> None:
        self._addresses = [ip_address(text) for text in addresses]
        self.gate = asyncio.Event()
        self.gate.set()
        self.asked: list[str] = []

    async def __call__(self, host: str, _port: int) -> Sequence[Address]:
        self.asked.append(host)
        await self.gate.wait()
        return self._addresses


async def test_only_allowed_addresses_give_no_warning() -> None:
    assert await UrlCheck(LAN, Names("10.0.0.1", "10.0.0.2"))(URL) is None


async def test_only_forbidden_addresses_are_refused() -> None:
    with pytest.raises(ValueError, match=r"leads to receiver\.example at 192\.0\.2\.1"):
        await UrlCheck(LAN, Names("192.0.2.1", "192.0.2.2"))(URL)


async def test_one_forbidden_address_among_allowed_ones_is_a_warning() -> None:
    """Each attempt needs all addresses to be allowed, but they may change before it."""
    warning = await UrlCheck(LAN, Names("10.0.0.1", "192.0.2.2"))(URL)
    assert warning is not None
    assert warning.startswith("callbacks fail while it leads to receiver.example at 192.0.2.2")


async def test_a_listed_origin_may_have_any_address() -> None:
    assert await UrlCheck(LAN, Names("192.0.2.1"))("https://trusted.example") is None


async def test_a_forbidden_literal_address_is_refused_without_a_lookup() -> None:
    names = Names()
    with pytest.raises(ValueError, match="--poc-callback-allow"):
        await UrlCheck(LAN, names)("http://192.0.2.1:9000")
    assert names.asked == []


@pytest.mark.parametrize("error", [OSError("unknown name"), UnicodeError("label too long")])
async def test_a_resolver_that_fails_is_a_warning(error: Exception) -> None:
    async def fail(_host: str, _port: int) -> Sequence[Address]:
        raise error

    check = UrlCheck(LAN, fail)
    for _ in range(2):
        warning = await check(URL)
        assert warning is not None
        assert f"receiver.example could not be resolved ({error})" in warning


async def test_a_slow_resolver_counts_as_unresolved_and_is_called_once() -> None:
    names = Names("192.0.2.1")
    names.gate.clear()
    check = UrlCheck(LAN, names, timeout_s=0.05)
    for warning in await asyncio.gather(check(URL), check(URL)):
        assert warning is not None
        assert "no answer within 0.05 s" in warning
    assert names.asked == ["receiver.example"]
    names.gate.set()
    await asyncio.sleep(0.01)
    with pytest.raises(ValueError, match=r"leads to receiver\.example"):
        await check(URL)


async def test_lookups_are_bounded() -> None:
    names = Names("10.0.0.1")
    names.gate.clear()
    check = UrlCheck(LAN, names, timeout_s=0.05)
    warnings = await asyncio.gather(*(check(f"http://r{n}.example") for n in range(6)))
    assert len(names.asked) == 4
    assert sum("resolver is busy" in str(warning) for warning in warnings) == 2
    names.gate.set()
    await asyncio.sleep(0.01)
    assert await check("http://r5.example") is None


async def test_a_resolver_that_blocks_its_thread_does_not_block_the_loop() -> None:
    let_go = threading.Event()

    async def blocking(_host: str, _port: int) -> Sequence[Address]:
        await asyncio.to_thread(let_go.wait, 30.0)
        return [ip_address("10.0.0.1")]

    check = asyncio.create_task(UrlCheck(LAN, blocking, timeout_s=0.5)(URL))
    turns = 0
    while not check.done():
        await asyncio.sleep(0.001)
        turns += 1
    let_go.set()
    assert turns > 3
    assert "could not be resolved" in str(check.result())
