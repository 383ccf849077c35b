"""Where members come from: URLs, a TOML file, and a name in the DNS."""

import asyncio
import socket
from pathlib import Path
from typing import Any

import pytest

from proofserve.fleet.sources import LOOKUP_EVERY_S, DnsMembers, plain_url
from proofserve.settings.fleet import FleetSettings, listed_members

FILE = """
[[member]]
url = "http://rack-1:8000/"
name = "rack 1"
key = "of-rack-1"

[[member]]
url = "https://rack-2"
"""


def test_members_of_options_and_of_a_file(tmp_path: Path) -> None:
    file = tmp_path / "members.toml"
    file.write_text(FILE)
    chosen = FleetSettings(member="http://A:1,http://b:2/", members_file=file)
    found = listed_members(chosen)
    assert [(each.name, each.url, each.key) for each in found] == [
        ("a:1", "http://a:1", None),
        ("b:2", "http://b:2", None),
        ("rack 1", "http://rack-1:8000", "of-rack-1"),
        ("rack-2", "https://rack-2", None),
    ]


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("[[member]]\nname = 'x'", "member.0.url"),
        ("[[member]]\nurl = 'http://a'\nport = 1", "member.0.port"),
        ("[[member]]\nurl = 'a'", "is not a URL"),
        ("[[member]]\nurl = 'http://a'\n[[member]]\nurl = 'http://A/'", "listed twice"),
        ("member", "is not TOML"),
    ],
)
def test_a_wrong_file_names_what_is_wrong(tmp_path: Path, text: str, problem: str) -> None:
    file = tmp_path / "members.toml"
    file.write_text(text)
    with pytest.raises(ValueError, match=problem):
        listed_members(FleetSettings(members_file=file))


@pytest.mark.parametrize(
    "url",
    [
        *("node:8000", "ftp://node", "http://", "http://node:0", "http://node:x"),
        *("http://node/v1", "http://me@node", "http://node?a", "http://node#a"),
    ],
)
def test_a_url_of_a_member_is_scheme_host_and_port(url: str) -> None:
    with pytest.raises(ValueError, match="URL"):
        plain_url(url)


class Resolver:
    """Stands for the system's: ``answers`` is what the DNS has, or the error that it gives."""

    def __init__(self) -> None:
        self.answers: list[str] | OSError = ["10.0.0.2", "10.0.0.1", "10.0.0.2"]
        self.asked: list[tuple[str, int]] = []

    async def getaddrinfo(self, host: str, port: int, **_: Any) -> list[Any]:
        self.asked.append((host, port))
        if isinstance(self.answers, OSError):
            raise self.answers
        return [(socket.AF_INET, 1, 6, "", (address, port)) for address in self.answers]


@pytest.mark.anyio
async def test_a_name_is_looked_up_again(monkeypatch: pytest.MonkeyPatch) -> None:
    resolver, now = Resolver(), [0.0]
    monkeypatch.setattr(asyncio.get_running_loop(), "getaddrinfo", resolver.getaddrinfo)
    dns = DnsMembers("http://nodes:8000", lambda: now[0])

    async def urls() -> list[str]:
        return [each.url for each in await dns.addresses() or ()]

    assert await urls() == ["http://10.0.0.1:8000", "http://10.0.0.2:8000"]
    resolver.answers = ["10.0.0.3", "fd00::1"]
    assert await urls() == ["http://10.0.0.1:8000", "http://10.0.0.2:8000"]
    now[0] = LOOKUP_EVERY_S
    assert await urls() == ["http://10.0.0.3:8000", "http://[fd00::1]:8000"]
    now[0] *= 2
    resolver.answers = OSError("no answer")
    # Not known, also until the next look-up: nothing says that the members are gone.
    assert [await dns.addresses() for _ in range(2)] == [None, None]
    assert resolver.asked == [("nodes", 8000)] * 3
    now[0] += LOOKUP_EVERY_S
    resolver.answers = ["10.0.0.4"]
    assert await urls() == ["http://10.0.0.4:8000"]
