"""The distance protocol in the receiver's file."""

import json
import sqlite3
from contextlib import closing
from pathlib import Path

from proofserve.receiver.callbacks import Generated, GeneratedWinners, Validated, ValidatedDistances
from proofserve.receiver.store import ClaimSource, ReceiverStore

from .support import distance, generated, judged, validated, won


def test_winners_and_verdicts_are_counted_beside_the_others(store: ReceiverStore) -> None:
    store.add_generated(GeneratedWinners(**won(3, 7)), key="a")
    store.add_generated(GeneratedWinners(**won(3, block_hash="other")), key="b")
    # The nonces of the two protocols have nothing to do with each other.
    store.add_generated(Generated(**generated(3, 7, 11)), key="c")
    store.add_validated(Validated(**validated()), key="d")
    store.add_validated(ValidatedDistances(**judged()), key="e")
    store.add_validated(ValidatedDistances(**judged(fraud_detected=False)))
    assert store.summary().sources == (
        ClaimSource("k3y", "b10c", 3, 2, 0, 3, 2, 1e9),
        ClaimSource("k3y", "other", 0, 1, 0, 0, 0, 1e9),
    )


def test_a_callback_with_a_known_key_is_not_stored_again(store: ReceiverStore) -> None:
    for _ in range(2):
        store.add_generated(GeneratedWinners(**won(3)), key="a")
        store.add_validated(ValidatedDistances(**judged()), key="b")
    assert not store.add_generated(GeneratedWinners(**won(7)), key="a")
    summary = store.summary()
    assert (summary.callbacks, summary.repeats) == (2, 3)
    assert summary.sources == (ClaimSource("k3y", "b10c", 0, 1, 0, 1, 1, 1e9),)


def test_a_nonce_under_another_key_is_a_duplicate_and_the_first_stays(
    path: Path, store: ReceiverStore
) -> None:
    store.add_generated(GeneratedWinners(**won(3, 7)), key="a")
    store.add_generated(GeneratedWinners(**won(7, 11, dist=[0.5, 0.25])), key="b")
    store.add_generated(GeneratedWinners(**won(7, public_key="another")), key="c")
    store.add_generated(GeneratedWinners(**won()))
    assert set(store.summary().sources) == {
        ClaimSource("k3y", "b10c", 0, 3, 1, 0, 0, 1e9),
        ClaimSource("another", "b10c", 0, 1, 0, 0, 0, 1e9),
    }
    with closing(sqlite3.connect(path)) as file:
        rows = file.execute("SELECT public_key, nonce, distance, callback FROM winners")
        assert rows.fetchall() == [
            ("another", 7, distance(7), 3),
            ("k3y", 3, distance(3), 1),
            ("k3y", 7, distance(7), 1),
            ("k3y", 11, 0.25, 2),
        ]


def test_a_verdict_is_kept_as_it_was_sent(path: Path, store: ReceiverStore) -> None:
    older = judged()
    del older["n_invalid"], older["probability_honest"]
    for body in (judged(), older):
        store.add_validated(ValidatedDistances(**body))
    with closing(sqlite3.connect(path)) as file:
        file.row_factory = sqlite3.Row
        rows = [dict(row) for row in file.execute("SELECT * FROM distance_validations")]
    lists = ("nonces", "computed_distances", "received_distances", "valid")
    for row in rows:
        row.update({name: json.loads(row[name]) for name in lists})
    assert rows == [
        {"id": 1, "callback": 1} | judged(),
        {"id": 2, "callback": 2} | judged(n_invalid=None, probability_honest=None),
    ]
