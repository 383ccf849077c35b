from dataclasses import replace

import pytest

from proofserve.protocol.errors import ProtocolError
from proofserve.protocol.receipts.record import (
    LogEntry,
    inclusions,
    next_entry,
    require_chain,
    require_inclusion,
)

NOW = 1_800_000_000_000
DIGESTS = [bytes([n]) * 32 for n in range(5)]


@pytest.fixture
def chain() -> list[LogEntry]:
    entries = [next_entry(None, DIGESTS[:2], NOW)]
    for n in range(1, 4):
        entries.append(next_entry(entries[-1], DIGESTS[n : n + 2], NOW + 1000 * n))
    return entries


def test_every_receipt_of_an_entry_is_in_the_log() -> None:
    for count in range(1, 6):
        entry = next_entry(None, DIGESTS[:count], NOW)
        for digest, found in zip(DIGESTS, inclusions(entry, DIGESTS[:count]), strict=False):
            require_inclusion(digest, found)
            with pytest.raises(ProtocolError, match="path"):
                require_inclusion(b"?" * 32, found)


def test_a_chain_may_begin_anywhere(chain: list[LogEntry]) -> None:
    require_chain(chain)
    require_chain(chain[2:])
    require_chain([])


@pytest.mark.parametrize(
    ("index", "change"),
    [
        (1, {"root": b"x" * 32}),
        (1, {"count": 7}),
        (1, {"time_ms": NOW + 999}),
        (2, {"previous": b"x" * 32}),
        (0, {"previous": b"x" * 32}),
        (3, {"index": 9}),
        (3, {"time_ms": NOW - 1}),
    ],
)
def test_a_changed_entry_breaks_the_chain(
    chain: list[LogEntry], index: int, change: dict[str, object]
) -> None:
    chain[index] = replace(chain[index], **change)  # type: ignore[arg-type]
    with pytest.raises(ProtocolError, match=r"previous|time_ms"):
        require_chain(chain)


def test_a_log_that_forks_has_two_hashes(chain: list[LogEntry]) -> None:
    fork = next_entry(chain[1], [b"other" + bytes(27)], chain[2].time_ms)
    assert fork.hash != chain[2].hash
    with pytest.raises(ProtocolError, match="entry 3 does not follow 2"):
        require_chain([*chain[:2], fork, chain[3]])
