"""The public log as a validator saw it, and how it is followed over real HTTP."""

from dataclasses import replace

import pytest

from proofserve.protocol.errors import ProtocolError
from proofserve.protocol.receipts.record import SigningKey
from proofserve.reports import NodeError, ReportedError
from proofserve.verifier.chat.conversation import PublicLog
from proofserve.verifier.chat.statements import FailedCheck
from proofserve.verifier.chat.watching import LogFollower
from support.provider import Node, provider


def node_with(chats: int, key: SigningKey | None = None, first: str = "chat") -> Node:
    node = Node(key=key or SigningKey.new())
    for number in range(chats):
        node.chat(f"{first} {number}")
    return node


def forked(node: Node, at: int) -> Node:
    """A node with the same key whose log differs from entry ``at`` on, and is longer."""
    other = Node(node.key, node.entries[:at], node.clock_ms)
    for number in range(len(node.entries) - at + 2):
        other.chat(f"other {number}")
    return other


def test_a_log_grows() -> None:
    node = node_with(5)
    shown = node.log()
    log = PublicLog(shown[1:3], node.key.public_key)
    assert (log.first, log.last, len(log)) == (1, 2, 2)
    log.add(shown[2:])
    assert (log.first, log.last, len(log)) == (1, 4, 4)
    log.add(shown)
    assert (log.first, log.last, len(log)) == (0, 4, 5)
    for entry in node.entries:
        log.require(entry)


def test_what_is_not_in_the_log() -> None:
    node = node_with(3)
    log = PublicLog(node.log()[:2], node.key.public_key)
    with pytest.raises(ProtocolError, match="it has no entry 2"):
        log.require(node.entries[2])
    with pytest.raises(ProtocolError, match="it forks: it has another entry 1"):
        log.require(replace(node.entries[1], time_ms=1))


def test_a_fork_adds_nothing() -> None:
    node = node_with(4)
    log = PublicLog(node.log(), node.key.public_key)
    with pytest.raises(ProtocolError, match="it forks: the node showed another entry 2"):
        log.add(forked(node, 2).log())
    assert (log.last, len(log)) == (3, 4)
    log.require(node.entries[2])


@pytest.mark.parametrize("left", [0, 2])
def test_a_log_that_is_rolled_back(left: int) -> None:
    node = node_with(4)
    log = PublicLog(node.log(), node.key.public_key)
    with pytest.raises(ProtocolError, match="it forks: entry 3 is gone"):
        log.add(node.log()[:left])


def test_entries_that_do_not_follow_each_other() -> None:
    node = node_with(4)
    shown = node.log()
    with pytest.raises(ProtocolError, match="entry 3 does not follow 1"):
        PublicLog([shown[1], shown[3]], node.key.public_key)
    log = PublicLog(shown[:2], node.key.public_key)
    with pytest.raises(ProtocolError, match="entry 1 is gone"):
        log.add(shown[2:])


def test_an_entry_that_another_key_signed() -> None:
    node = node_with(2)
    other = SigningKey.new().public_key
    with pytest.raises(ProtocolError, match="entry 0 is not signed by this node"):
        PublicLog(node.log(), other)
    log = PublicLog(node.log()[:1], node.key.public_key)
    forged = replace(node.log()[1], signature=bytes(64))
    with pytest.raises(ProtocolError, match="entry 1 is not signed by this node"):
        log.add([node.log()[0], forged])


def test_a_follower_reads_what_receipts_need() -> None:
    with provider() as (served, url):
        node = served.node
        chats = [node.chat(f"chat {n}") for n in range(6)]
        follower = LogFollower(url)
        assert follower.seen([]) is None
        log = follower.seen(chats[3:4])
        assert isinstance(log, PublicLog)
        assert (log.first, log.last) == (3, 5)
        node.chat("later")
        assert follower.seen(chats[4:]) is log
        assert (log.first, log.last) == (3, 6)
        assert follower.seen([]) is log


def test_a_receipt_may_come_after_one_of_a_later_entry() -> None:
    """Files of chats do not come in the order of the log; an honest node must not pay for it."""
    with provider() as (served, url):
        chats = [served.node.chat(f"chat {n}") for n in range(4)]
        follower = LogFollower(url)
        follower.seen(chats[2:3])
        log = follower.seen(chats[:3])
        assert isinstance(log, PublicLog)
        assert log.first == 0
        inclusion = chats[0].receipts[0].inclusion
        assert inclusion is not None
        log.require(inclusion.entry)


def test_a_log_that_forks_between_two_looks() -> None:
    with provider() as (served, url):
        chats = [served.node.chat(f"chat {n}") for n in range(3)]
        follower = LogFollower(url)
        assert isinstance(follower.seen(chats), PublicLog)
        served.node = forked(served.node, 1)
        found = follower.seen(chats)
        assert found == FailedCheck("log", f"{url}: log: it forks: the node showed another entry 2")
        served.node.entries = []
        found = follower.seen(chats)
        assert found == FailedCheck("log", f"{url}: log: it forks: entry 2 is gone")


def test_a_log_without_the_entries_of_receipts_is_read_again() -> None:
    with provider() as (served, url):
        chats = [served.node.chat(f"chat {n}") for n in range(2)]
        entries, served.node.entries = served.node.entries, []
        follower = LogFollower(url)
        log = follower.seen(chats)
        assert isinstance(log, PublicLog)
        assert (len(log), log.first) == (0, None)
        served.node.entries = entries
        assert follower.seen(chats) is log
        assert len(log) == 2


def test_a_log_by_another_key() -> None:
    with provider() as (served, url):
        chat = served.node.chat("one")
        served.node = node_with(2)
        found = LogFollower(url).seen([chat])
        assert isinstance(found, FailedCheck)
        assert "entry 0 is not signed by this node" in found.text


def test_a_log_that_cannot_be_reached_is_no_failure_of_the_node() -> None:
    chat = node_with(0).chat("one")
    with provider() as (_, url):
        pass
    with pytest.raises(NodeError, match="/api/v1/receipts/log"):
        LogFollower(url).seen([chat])
    with pytest.raises(ReportedError, match="http://"):
        LogFollower("http://[bad").seen([chat])
