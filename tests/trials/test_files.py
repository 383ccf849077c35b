"""The comparison of the sender's and the receiver's file finds every lost proof."""

import asyncio
import sqlite3
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path

import pytest

from endurance import files
from endurance.files import Account
from endurance.load import Witness
from outbox.support import a_distance_spec, a_spec, winners
from proofserve.outbox.planning import CallbackPolicy
from proofserve.outbox.store import SqliteOutbox
from proofserve.protocol.verdict.comparison import Claim
from proofserve.receiver.callbacks import Generated, GeneratedWinners
from proofserve.receiver.store import ReceiverStore
from receiver.support import generated, vector

URL = "http://127.0.0.1:1"
NONCES = (3, 7, 11)


@dataclass(frozen=True)
class Sides:
    """A sender's file and a receiver's, of the same proofs."""

    outbox: Path
    received: Path

    def compared(self) -> Account:
        return files.compare(self.outbox, self.received, URL)

    def change(self, file: Path, statement: str) -> None:
        with closing(sqlite3.connect(file)) as opened, opened:
            assert opened.execute(statement).rowcount > 0


async def fill(path: Path) -> None:
    async with await SqliteOutbox.open(path) as outbox:
        await outbox.open_round(a_spec("r1", URL, k_dim=4))
        await outbox.record("r1", 3, [Claim(nonce, vector(nonce)) for nonce in NONCES], {15: "x"})
        await outbox.close_round("r1")
        await outbox.open_round(a_distance_spec("d1", URL))
        await outbox.record("d1", 3, winners(*NONCES), {})
        await outbox.close_round("d1")
        # Another receiver's round is none of this one's business.
        await outbox.open_round(a_spec("r2", "http://127.0.0.1:2", k_dim=4))
        await outbox.record("r2", 1, [Claim(3, vector(3))], {})
        await outbox.close_round("r2")


def receive(path: Path) -> None:
    store = ReceiverStore.open(path)
    store.add_generated(Generated(**generated(*NONCES)), key="a", sequence=1)
    won = winners(*NONCES)
    body = GeneratedWinners(
        public_key="k3y",
        block_hash="b10c",
        block_height=77,
        node_id=3,
        nonces=[one.nonce for one in won],
        dist=[one.distance for one in won],
        r_target=1.4,
    )
    for _ in range(2):
        store.add_generated(body, key="b", sequence=2)
    store.close()


@pytest.fixture
def sides(tmp_path: Path) -> Sides:
    outbox, received = tmp_path / "outbox.sqlite", tmp_path / "received.sqlite"
    asyncio.run(fill(outbox))
    receive(received)
    return Sides(outbox, received)


def test_what_arrived_whole_is_told_so(sides: Sides) -> None:
    account = sides.compared()
    assert (account.produced, account.rounds, account.repeats) == (6, 3, 1)
    assert (account.missing, account.foreign, account.duplicates, account.damaged) == (0, 0, 0, ())


@pytest.mark.parametrize(
    "loss", ["DELETE FROM artifacts WHERE nonce = 7", "DELETE FROM winners WHERE nonce = 7"]
)
def test_a_proof_that_did_not_arrive_is_missing(sides: Sides, loss: str) -> None:
    sides.change(sides.received, loss)
    assert (sides.compared().missing, sides.compared().foreign) == (1, 0)


def test_a_proof_that_arrived_as_another_is_both(sides: Sides) -> None:
    sides.change(sides.received, "UPDATE winners SET distance = distance + 1e-9 WHERE nonce = 7")
    assert (sides.compared().missing, sides.compared().foreign) == (1, 1)


def test_a_nonce_that_came_under_two_keys_is_a_duplicate(sides: Sides) -> None:
    store = ReceiverStore.open(sides.received)
    store.add_generated(Generated(**generated(7)), key="c", sequence=3)
    store.close()
    assert sides.compared().duplicates == 1


def test_an_undelivered_row_is_a_leftover(sides: Sides) -> None:
    # No callback of this outbox was sent.
    assert (before := sides.compared().leftovers) == 3
    sides.change(sides.outbox, "UPDATE rounds SET closed = 0 WHERE round_id = 'r2'")
    assert sides.compared().leftovers == before + 1


def test_a_result_that_was_shown_must_stay(sides: Sides) -> None:
    witness = Witness(URL)
    rows = files.results(sides.outbox)
    assert [row.nonce for row in rows] == [*NONCES, 15, *NONCES, 3]
    witness.saw("r1", 4, rows)
    assert witness.compare(rows).lost == 0
    assert witness.compare(rows[1:]).lost == 1
    assert witness.compare(rows).overstated == 0
    witness.saw("r1", 5, [])
    assert witness.compare(rows).overstated == 1


def test_what_was_deleted_after_its_delivery_is_only_at_the_receiver(sides: Sides) -> None:
    async def deliver_and_prune() -> None:
        async with await SqliteOutbox.open(sides.outbox) as outbox:
            while due := (await outbox.plan(CallbackPolicy())).due:
                for delivery in due:
                    await outbox.acknowledge(delivery)
            await outbox.prune(-1.0)

    asyncio.run(deliver_and_prune())
    account = sides.compared()
    assert (account.produced, account.missing, account.foreign) == (0, 0, 6)
    # With a failure, and the result for another URL.
    assert (account.pruned, account.pruned_rounds) == (8, 2)
