"""The short form of ``make chaos-fleet``, and members that hang: real processes, real files."""

import random
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import pytest

from endurance.fleet.account import (
    FleetAccount,
    FleetFile,
    VerdictAccount,
    VerdictFile,
    account,
    account_verdicts,
    read_fleet,
    read_verdicts,
)
from endurance.fleet.deployment import FleetDeployment, deployed
from endurance.fleet.postgres import NoPostgres
from endurance.fleet.processes import ForkedServer
from endurance.fleet.programs import MODEL
from endurance.fleet.trial import FleetTrial, Network
from endurance.load import Comparison
from proofserve.fleet.sql.database import database_url
from proofserve.remote.http import wait_until
from proofserve.reports import Progress

KILLS = 4
WAIT_S = 60.0
# What counts without a fault; a callback may be repeated under its key.
COUNTED = {"rounds", "lanes", "proofs", "repeats"} | {
    "jobs",
    "retaken",
    "verdicts",
    "convictions",
    "abstained",
}


@dataclass(frozen=True)
class Ended:
    """A trial that has ended: its counts, and what is left of it."""

    trial: FleetTrial
    fleet: FleetDeployment
    stored: FleetFile
    verdicts: VerdictFile

    def judged(self, file: VerdictFile | None = None) -> VerdictAccount:
        return account_verdicts(file or self.verdicts, self.fleet.cheats)

    def account(self, stored: FleetFile | None = None, without: int = 0) -> FleetAccount:
        """The account; ``without`` members' files."""
        outboxes = self.fleet.outboxes[without:]
        return account(stored or self.stored, outboxes, self.fleet.received, self.fleet.front.url)

    def seen(self) -> list[Comparison]:
        shown = [each.result for each in self.stored.proofs]
        return [witness.compare(shown) for witness in self.trial.witnesses]


@pytest.fixture(scope="module")
def ended(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Ended]:
    try:
        with deployed(tmp_path_factory.mktemp("fleet"), 2, 2, with_postgres=True) as fleet:
            with fleet:
                trial = FleetTrial(fleet, random.Random(2), Progress())
                trial.run(KILLS)
            database = database_url(fleet.database)
            yield Ended(trial, fleet, read_fleet(database), read_verdicts(database))
    except NoPostgres as error:
        pytest.skip(f"no PostgreSQL can be started here: {error}")


def wrong(found: FleetAccount | VerdictAccount) -> dict[str, int]:
    """The figures that are not 0 and should be."""
    return {name: n for name, n in asdict(found).items() if n and name not in COUNTED}


def test_every_lane_and_proof_is_there_once_after_kills(ended: Ended) -> None:
    trial, found = ended.trial, ended.account()
    assert trial.kills.keys() == {"controller", "member", "worker", "database"}
    assert (trial.kills.total(), trial.rounds_changed, trial.disagreements) == (KILLS, 1, 0)
    assert found.proofs > 64
    assert found.rounds == 2
    assert wrong(found) == {}
    for seen in ended.seen():
        assert (seen.lost, seen.overstated) == (0, 0)
        assert seen.seen > 64


def test_every_job_has_its_one_right_verdict_after_kills(ended: Ended) -> None:
    found = ended.judged()
    assert wrong(found) == {}
    assert (found.verdicts, found.abstained) == (found.jobs, 0)
    assert 0 < found.convictions < found.verdicts
    assert found.retaken > 0
    assert ended.trial.workers_ended == {}


def of_first_verdict(**changes: Any) -> Callable[[VerdictFile], VerdictFile]:
    def change(file: VerdictFile) -> VerdictFile:
        first = replace(file.verdicts[0], **changes)
        return replace(file, verdicts=[first, *file.verdicts[1:]])

    return change


def of_first_job(**changes: Any) -> Callable[[VerdictFile], VerdictFile]:
    """A change of the job of the first verdict."""

    def change(file: VerdictFile) -> VerdictFile:
        of = file.verdicts[0].job
        return replace(file, jobs=[replace(j, **changes) if j.id == of else j for j in file.jobs])

    return change


@pytest.mark.parametrize(
    ("change", "figures"),
    [
        (of_first_job(state="running"), {"open": 1, "early": 1}),
        (lambda f: replace(f, verdicts=f.verdicts[1:]), {"without": 1, "miscounted": 1}),
        (
            lambda f: replace(f, verdicts=[*f.verdicts, f.verdicts[0]]),
            {"twice": 1, "miscounted": 1},
        ),
        (of_first_verdict(job="of none"), {"without": 1, "early": 1}),
        (of_first_verdict(nonces=1), {"incomplete": 1}),
        (of_first_verdict(distances=(0.5,)), {"incomplete": 1}),
        (of_first_verdict(taken=(1, 2, 3)), {"incomplete": 1}),
        (of_first_verdict(outcome="undecided"), {"incomplete": 1, "wrong": 1, "miscounted": 2}),
        (of_first_job(seed="another"), {"incomplete": 1}),
        (lambda f: replace(f, counts={**f.counts, "fraud": 0}), {"miscounted": 1}),
        (lambda f: replace(f, counts={**f.counts, "undecided": 1}), {"miscounted": 1}),
    ],
)
def test_the_account_finds_every_wrong_verdict(
    ended: Ended, change: Callable[[VerdictFile], VerdictFile], figures: dict[str, int]
) -> None:
    assert wrong(ended.judged(change(ended.verdicts))) == figures


def test_a_cheat_that_is_cleared_and_an_honest_member_that_is_convicted_are_wrong(
    ended: Ended,
) -> None:
    found = account_verdicts(ended.verdicts, frozenset(each.url for each in ended.fleet.members))
    nobody = account_verdicts(ended.verdicts, frozenset())
    assert found.wrong > 0
    assert nobody.wrong == nobody.convictions > 0


def changed(**changes: Any) -> Callable[[FleetFile], FleetFile]:
    """The file with a change of its first result."""
    return lambda file: replace(file, proofs=[replace(file.proofs[0], **changes), *file.proofs[1:]])


@pytest.mark.parametrize(
    ("change", "figures"),
    [
        (lambda f: replace(f, proofs=f.proofs[1:]), {"lost": 1, "gaps": 1, "unknown": 1}),
        (lambda f: replace(f, proofs=[*f.proofs, f.proofs[0]]), {"stored_twice": 1}),
        (changed(value="AAAA"), {"altered": 1, "not_received": 1, "unknown": 1}),
        (changed(lane=63), {"outside": 1, "gaps": 1}),
        (lambda f: replace(f, lanes=[*f.lanes, f.lanes[0]]), {"lanes_twice": 1}),
        (lambda f: replace(f, keys=f.keys | {"another"}), {"keys": 1}),
        (lambda f: replace(f, sequences=[*f.sequences[1:], 99]), {"keys": 1}),
    ],
)
def test_the_account_finds_every_fault(
    ended: Ended, change: Callable[[FleetFile], FleetFile], figures: dict[str, int]
) -> None:
    assert wrong(ended.account(change(ended.stored))) == figures


def test_what_no_member_has_proved_is_foreign(ended: Ended) -> None:
    assert ended.account(without=1).foreign > 0


def test_a_member_that_hangs_and_goes_on_with_its_old_round_does_no_harm(tmp_path: Path) -> None:
    with deployed(tmp_path, 2, 0, with_postgres=False) as fleet:
        with fleet, Network(fleet.front.url, MODEL, fleet.receiver.url) as network:
            hanging, other = fleet.members
            network.next_round(0)
            wait_until(lambda: proves(hanging, 0) and proves(other, 0), "both members", WAIT_S)
            hanging.freeze()
            wait_until(lambda: state_of(fleet, hanging) == "lost", "the loss", WAIT_S)
            network.next_round(1)
            wait_until(lambda: proves(other, 1), "the other member", WAIT_S)
            hanging.thaw()
            wait_until(lambda: proves(hanging, 1), "the member in the new round", WAIT_S)
            network.stop()
            for member in fleet.members:
                wait_until(lambda m=member: pending(m) == 0, "callbacks", WAIT_S)
            wait_until(lambda: network.pending() == 0, "callbacks to the network", WAIT_S)
        stored = read_fleet(database_url(fleet.database))
        found = account(stored, fleet.outboxes, fleet.received, fleet.front.url)
    assert (found.rounds, found.lanes) == (2, 4)
    assert wrong(found) == {}


def status_of(member: ForkedServer) -> Any:
    return member.http.get("/api/v1/pow/status").json()


def proves(member: ForkedServer, number: int) -> bool:
    status = status_of(member)
    if status["status"] != "GENERATING" or not status["stats"]["total_processed"]:
        return False
    return bool(status["config"]["block_hash"] == f"block-{number}")


def pending(member: ForkedServer) -> int:
    return int(status_of(member)["outbox"]["pending"])


def state_of(fleet: FleetDeployment, member: ForkedServer) -> str:
    found = fleet.controllers[0].http.get("/api/v1/fleet/members").json()["members"]
    return next(str(each["state"]) for each in found if each["url"] == member.url)
