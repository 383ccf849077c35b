"""The allowlist of callbacks: by the URL alone, and by the addresses of its host."""

from ipaddress import ip_address

import pytest

from proofserve.outbox.allowlist import Allowlist

# Spellings of loopback addresses.
DISGUISES = [
    "http://127.0.0.1:9",
    "http://127.8.8.8",
    "http://2130706433",
    "http://0x7f000001",
    "http://0x7f.1",
    "http://017700000001",
    "http://127.1",
    "http://[::1]:9",
    "http://[0:0:0:0:0:0:0:1]",
    "http://[::ffff:127.0.0.1]",
    "http://[::ffff:7f00:1]",
]


@pytest.mark.parametrize("url", DISGUISES)
def test_the_default_allows_every_spelling_of_this_machine(url: str) -> None:
    assert Allowlist().refusal(url) is None


@pytest.mark.parametrize("url", DISGUISES)
@pytest.mark.parametrize(
    "entry", ["https://validator.example", "10.0.0.0/8", "2001:db8::/32", "http://127.0.0.1:80"]
)
def test_another_list_forbids_every_spelling_of_this_machine(url: str, entry: str) -> None:
    assert "--poc-callback-allow" in str(Allowlist([entry]).refusal(url))


@pytest.mark.parametrize(
    "url",
    [
        "http://10.0.0.1",
        "http://169.254.169.254",
        "http://0.0.0.0:9",
        "http://0",
        "http://[::]",
        "http://[::ffff:10.0.0.1]",
        "http://[64:ff9b::7f00:1]",
        "http://[fe80::1]",
        "http://8.8.8.8",
        "http://134744072",
        "ftp://127.0.0.1",
        "unix:///run/socket",
        "http://user@127.0.0.1",
        "http://user:word@127.0.0.1",
        "http://127.0.0.1@8.8.8.8",
        "http://0177.0.0.1",
        "",
    ],
)
def test_the_default_allows_only_this_machine(url: str) -> None:
    assert Allowlist().refusal(url)


def test_a_host_name_is_judged_by_its_addresses() -> None:
    allowlist, url = Allowlist(), "http://name.example:9000"
    assert allowlist.refusal(url) is None
    assert allowlist.refusal(url, [ip_address("127.0.0.1"), ip_address("::1")]) is None
    for outside in ("10.0.0.1", "0.0.0.0", "::ffff:10.0.0.1"):  # noqa: S104
        refusal = allowlist.refusal(url, [ip_address("127.0.0.1"), ip_address(outside)])
        assert "name.example at " in str(refusal)


def test_without_allowed_networks_an_unlisted_name_is_not_looked_up() -> None:
    allowlist = Allowlist(["https://validator.example"])
    assert allowlist.refusal("https://other.example")
    assert allowlist.refusal("https://validator.example.other.example")
    assert Allowlist([]).refusal("http://127.0.0.1")


@pytest.mark.parametrize(
    ("url", "same"),
    [
        ("https://validator.example", True),
        ("https://VALIDATOR.example:443/base", True),
        ("https://validator.example:8443", False),
        ("http://validator.example:443", False),
        ("http://validator.example", False),
        ("https://user@validator.example", False),
    ],
)
def test_an_origin_is_scheme_host_and_port(url: str, same: bool) -> None:
    allowlist = Allowlist(["https://validator.example"])
    assert (allowlist.refusal(url) is None) == same
    # The operator trusts a listed name, whatever its addresses are.
    if same:
        assert allowlist.refusal(url, [ip_address("10.0.0.1")]) is None


def test_entries_add_up() -> None:
    allowlist = Allowlist(["loopback", "10.0.0.0/8", "http://validator.example:9000"])
    for url in ("http://127.0.0.1", "https://10.9.9.9", "http://validator.example:9000/x"):
        assert allowlist.refusal(url) is None
    assert allowlist.refusal("http://11.0.0.1")


@pytest.mark.parametrize(
    "entry",
    [
        "validator.example",
        "10.0.0.1/8",
        "10.0.0.0/33",
        "ftp://host",
        "https://",
        "https://host/path",
        "https://user:word@host",
        "https://host?x",
        "https://[",
        "*",
        "",
    ],
)
def test_an_invalid_entry_is_refused(entry: str) -> None:
    with pytest.raises(ValueError, match=r"origin"):
        Allowlist([entry])
