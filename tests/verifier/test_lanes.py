"""Which nonces a node owed, by its own record and by its receiver's: no honest node has a gap."""

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import pytest

from proofserve.outbox import offline
from proofserve.protocol.nonces import MAX_NONCE, NonceLane
from proofserve.protocol.verdict.comparison import Claim, Reason
from proofserve.remote.node_client import NodeClient
from proofserve.reports import ReportedError
from proofserve.verifier.claims import ClaimedArtifacts, Selection, from_node, from_receiver
from support.committed import FakeNode, Receiver, fake_node, receiver, slow_engine
from support.pace import wait_until

LANE = NonceLane(1, 3)
OF_LANE, ANY = Selection(lane=LANE), Selection()


@contextmanager
def delivered(folder: Path) -> Iterator[tuple[FakeNode, Receiver, int]]:
    """A node, the receiver of its round's vectors, and how many it has."""
    engine = slow_engine()
    engine.not_finite = frozenset({LANE.nonce(5)})
    with receiver(folder) as received, fake_node(folder, engine) as node:
        computed = node.generate(received.url, 150, commit="vectors")

        def stored() -> int:
            return sum(each.artifacts for each in received.store.summary().sources)

        wait_until(lambda: stored() == computed - 1)
        yield node, received, computed


def of_node(node: FakeNode, wanted: Selection = ANY) -> ClaimedArtifacts:
    with NodeClient(node.url) as client:
        return from_node(client, wanted)


def test_an_honest_node_has_no_gap_in_its_own_list_nor_at_its_receiver(tmp_path: Path) -> None:
    with delivered(tmp_path) as (node, received, computed):
        for wanted in (ANY, OF_LANE):
            listed = of_node(node, wanted)
            assert sorted(listed.nonces) == list(LANE.batch(0, computed))
            assert (listed.left_out, listed.unknown_lane, listed.withheld) == (0, None, None)
        came = from_receiver(received.file, OF_LANE)
        assert sorted(came.nonces) == list(LANE.batch(0, computed))
        # The network's callback does not name a nonce that failed.
        assert (came.left_out, came.withheld) == (1, None)
        assert {n: each.reason for n, each in came.faults.items()} == {LANE.nonce(5): Reason.GAP}
        assert "a receiver does not know" in (from_receiver(received.file, ANY).unknown_lane or "")


def test_results_that_a_node_deleted_after_delivery_are_no_gap(tmp_path: Path) -> None:
    with delivered(tmp_path) as (node, _, _):
        wait_until(lambda: node.http.get("/status").json()["outbox"]["pending"] == 0)
        # As the node does it after some days, and here in the middle of the round.
        gone = LANE.batch(40, 10)
        for nonce in gone:
            node.change("DELETE FROM results WHERE nonce = ?", nonce)
        listed = of_node(node)
        assert (listed.left_out, listed.faults, listed.withheld) == (0, {}, None)
        said = "the node lists 10 results fewer than its round has; verify what a receiver has"
        assert (listed.unknown_lane or "").startswith(said)
        owed = of_node(node, OF_LANE)
        assert (owed.left_out, owed.faults) == (0, {})
        assert owed.withheld is not None
        assert owed.withheld.text.startswith("10 nonces of the lane, below others that came; the")


def test_a_node_that_deleted_all_of_its_round_is_of_no_known_lane(tmp_path: Path) -> None:
    with delivered(tmp_path) as (node, _, computed):
        wait_until(lambda: node.http.get("/status").json()["outbox"]["pending"] == 0)
        assert offline.prune(node.outbox, time.time() + 60).results == computed
        listed = of_node(node)
    assert (listed.nonces, listed.left_out) == ((), 0)
    assert f"lists {computed} results fewer" in (listed.unknown_lane or "")


def claims(*nonces: int) -> ClaimedArtifacts:
    return ClaimedArtifacts("block", "key", nonces, tuple(Claim(n, "") for n in nonces))


def test_what_is_left_out_is_counted_and_sampled() -> None:
    found = claims(7, 1, 13).of_lane(LANE)
    assert (found.left_out, found.nonces) == (2, (7, 1, 13, 4, 10))
    assert {each.reason for each in found.faults.values()} == {Reason.GAP}
    # From the first claim on, for a part of a round.
    assert claims(7, 10).of_lane(LANE, whole=False).left_out == 0
    assert claims(7, 10).of_lane(LANE).left_out == 2
    assert claims().of_lane(LANE) == replace(claims(), unknown_lane=None)


def test_a_nonce_near_the_last_one_fills_no_memory() -> None:
    last = LANE.nonce((MAX_NONCE - 1) // 3 - 1)
    found = claims(1, last).of_lane(LANE)
    assert found.left_out == (last - 1) // 3 - 1
    assert (found.nonces, len(found.faults)) == ((1, last, 4, 7), 2)


def test_a_claim_of_another_lane_is_named() -> None:
    with pytest.raises(ReportedError, match="nonce 8 of the source is of another lane"):
        claims(4, 8).of_lane(LANE)


def test_what_may_be_lost_on_the_way_is_withheld() -> None:
    asked = []

    def lost(before: int | None, after: int) -> str:
        asked.append((before, after))
        return "ask for it" if before == 4 else ""

    found = claims(4, 13, 19).of_lane(LANE, lost=lost)
    assert asked == [(None, 4), (4, 13), (13, 19)]
    assert (found.left_out, sorted(found.faults)) == (2, [1, 16])
    assert found.withheld is not None
    assert found.withheld.text == "2 nonces of the lane, below others that came; ask for it"
