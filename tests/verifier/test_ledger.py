"""The ledger: nothing is asked or judged twice, and no year spends more than its alpha."""

import sqlite3
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import numpy as np
import pytest

from proofserve.protocol.verdict.counting import SequentialResult
from proofserve.remote.node_client import Unproved
from proofserve.remote.records import Work
from proofserve.reports import ReportedError
from proofserve.verifier.challenge import nonces_of
from proofserve.verifier.validation.ledger import YEAR_S, Ledger, OpenChallenge

SHAPE = Work("", seq_len=16, scheme="sketch-v1", k_dim=64)
NODES = {"a": "http://a", "b": "http://b"}
DAY_S, ALPHA = 86_400.0, 1e-4


class Clock:
    now = 1e9

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def ledger(tmp_path: Path, clock: Clock) -> Iterator[Ledger]:
    with Ledger.opened(tmp_path / "ledger.sqlite", clock) as made:
        yield made


def begin(ledger: Ledger, *nodes: str, alpha: float = ALPHA, every_s: float = DAY_S) -> None:
    urls = {name: NODES[name] for name in nodes}
    ledger.begin("model", SHAPE, 24, urls, (alpha, every_s))


def end(ledger: Ledger, each: OpenChallenge, outcome: SequentialResult) -> None:
    if outcome is SequentialResult.UNPROVED:
        ledger.unproved(each.number, Unproved.LATE, "late", 1.0)
    else:
        ledger.answered(each.number, "answers", 1.0)
        ledger.judged(each.number, outcome, "reason", {"verdict": outcome})


def test_nodes_of_a_round_share_its_block_and_its_seed_and_no_key(ledger: Ledger) -> None:
    begin(ledger, "a", "b")
    one, other = ledger.open_challenges()
    assert one.challenge.work.block_hash == other.challenge.work.block_hash
    assert one.challenge.nonces == nonces_of(one.challenge.work.block_hash, 24)
    assert (one.seed, len(one.seed)) == (other.seed, 32)
    assert one.challenge.work.public_key != other.challenge.work.public_key
    assert ledger.open_challenges() == [one, other]


def test_a_node_is_asked_and_judged_once(ledger: Ledger) -> None:
    begin(ledger, "a")
    with pytest.raises(ReportedError, match="UNIQUE"):
        begin(ledger, "b", "a")
    (one,) = ledger.open_challenges()
    with pytest.raises(ReportedError, match="was ended before"):
        ledger.judged(one.number, SequentialResult.FRAUD, "no answer is there", {})
    end(ledger, one, SequentialResult.HONEST)
    with pytest.raises(ReportedError, match="was ended before"):
        ledger.judged(one.number, SequentialResult.FRAUD, "again", {})
    with pytest.raises(ReportedError, match="was ended before"):
        ledger.unproved(one.number, Unproved.LATE, "again", None)
    assert ledger.standings(["a", "b"])["a"].counts == {"honest": 1}
    assert [each.outcome for each in ledger.untold()] == ["honest"]
    ledger.tell()
    assert ledger.untold() == []


def test_any_year_spends_its_alpha_at_most(ledger: Ledger, clock: Clock, tmp_path: Path) -> None:
    """Whatever the outcomes, and though the file of nodes changes how often they are asked."""
    drawn = np.random.default_rng(5)
    outcomes = [*SequentialResult]
    for number in range(400):
        clock.now += float(drawn.exponential(5 * DAY_S))
        begin(ledger, "a", every_s=DAY_S if number % 2 else 90 * DAY_S)
        (one,) = ledger.open_challenges()
        end(ledger, one, outcomes[drawn.integers(len(outcomes))])
    with closing(sqlite3.connect(tmp_path / "ledger.sqlite")) as file:
        joined = "FROM challenges c JOIN rounds r ON r.number = round WHERE outcome != 'unproved'"
        spent = file.execute(f"SELECT asked_at, alpha {joined} ORDER BY asked_at").fetchall()
    at, alphas = np.array(spent).T
    years = [alphas[(at >= first) & (at < first + YEAR_S)].sum() for first in at]
    assert 0.3 * ALPHA < max(years) <= ALPHA
    left = ALPHA - ledger.standings(["a"])["a"].alpha_spent
    assert 0.0 < left < ALPHA


def test_what_is_unproved_spends_nothing(ledger: Ledger, clock: Clock) -> None:
    for _ in range(3):
        begin(ledger, "a")
        (one,) = ledger.open_challenges()
        assert one.alpha == pytest.approx(ALPHA / 367)
        assert ledger.standings(["a"])["a"].alpha_spent == one.alpha
        end(ledger, one, SequentialResult.UNPROVED)
    of = ledger.standings(["a"])["a"]
    assert (of.alpha_spent, of.counts, of.kind) == (0.0, {"unproved": 3}, "late")


def test_a_node_that_has_spent_a_smaller_alpha_is_not_asked(ledger: Ledger) -> None:
    begin(ledger, "a")
    (one,) = ledger.open_challenges()
    end(ledger, one, SequentialResult.UNDECIDED)
    begin(ledger, "a", "b", alpha=one.alpha)
    assert [each.node for each in ledger.open_challenges()] == ["b"]


def test_a_second_validator_is_refused(ledger: Ledger, tmp_path: Path) -> None:
    second = Ledger.opened(tmp_path / "ledger.sqlite")
    with pytest.raises(ReportedError, match="another `proofserve validate` uses"):
        second.__enter__()


def test_the_file_of_another_program_is_no_ledger(tmp_path: Path) -> None:
    path = tmp_path / "other.sqlite"
    with closing(sqlite3.connect(path)) as file, file:
        file.execute("CREATE TABLE rounds (number INTEGER)")
    with pytest.raises(ReportedError, match="is no ledger of this version"), Ledger.opened(path):
        """It may not come here."""
    path.write_bytes(b"text" * 1000)
    with pytest.raises(ReportedError, match="not a database"), Ledger.opened(path):
        """It may not come here."""
