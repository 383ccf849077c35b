"""The trial of a fleet: kills, then the account of lanes, proofs and verdicts, as a report."""

import random
from dataclasses import asdict
from pathlib import Path
from typing import Any

from endurance.fleet.account import FleetAccount, account, read_fleet
from endurance.fleet.deployment import deployed
from endurance.fleet.kills import FleetCounts, FleetTrial
from endurance.fleet.verdicts import VerdictAccount, account_verdicts, read_verdicts
from endurance.witness import Comparison
from proofserve.fleet.sql.database import database_url
from proofserve.host import machine
from proofserve.reports import Figure, Limit, Progress, Report
from proofserve_lab.bench.statistics import median

MEMBERS, WORKERS = 3, 2
# The longest time in seconds until the fleet answers and leads again.
RECOVERED_S = 10.0


def fleet_chaos(
    folder: Path, kills: int, seed: int, progress: Progress, *, with_postgres: bool = True
) -> Report:
    """Kill a process ``kills`` times, then compare what members, database and receiver have.

    The record of the report has each recovery, each job that was not judged, and the end of the
    log of each worker that ended by itself.

    Raises:
        ReportedError, ServerFailed: a server did not start, end or answer as the trial needs.
        NoPostgres: PostgreSQL cannot be started here.
    """
    draw = random.Random(seed)  # noqa: S311 - repeatable, not secret
    with deployed(folder, MEMBERS, WORKERS, with_postgres=with_postgres) as fleet:
        progress.step("starting the fleet")
        with fleet:
            trial = FleetTrial(fleet, draw, progress)
            trial.run(kills)
        progress.step("comparing the files")
        database = database_url(fleet.database)
        stored = read_fleet(database)
        found = account(stored, fleet.outboxes, fleet.received, fleet.front.url)
        verdicts = read_verdicts(database)
        judged = account_verdicts(verdicts, fleet.cheats)
    shown = [each.result for each in stored.proofs]
    seen = [witness.compare(shown) for witness in trial.witnesses]
    setup = {"kills": kills, "seed": seed, "postgresql": with_postgres}
    figures = (*_of_kills(trial.counts), *_of_proofs(found, seen), *_of_verdicts(judged))
    recovered = trial.counts.recovered.items()
    windows: dict[str, Any] = {name: [asdict(r) for r in all_] for name, all_ in recovered}
    windows |= {"abstentions": verdicts.abstentions, "workers_ended": trial.counts.workers_ended}
    return Report("fleet", (*figures, *_of_times(trial.counts)), setup, windows, machine())


def _of_kills(counts: FleetCounts) -> list[Figure]:
    kills = (Figure(f"kills_{name}", n, "kill -9 of it") for name, n in counts.kills.items())
    ways = (Figure(f"members_{way}", n, "after a kill") for way, n in counts.ways.items())
    return [*kills, *ways]


def _of_proofs(found: FleetAccount, seen: list[Comparison]) -> list[Figure]:
    none = Limit(0, at_most=True)
    wrong = {
        "lanes_twice": "lanes given twice, or proved by two rounds of members",
        "proved_twice": "nonces that two members proved",
        "lost": "proofs of members that the fleet has not stored",
        "altered": "proofs that are stored with another value",
        "stored_twice": "nonces stored twice",
        "foreign": "stored nonces that no member has proved",
        "outside": "stored nonces of another lane",
        "gaps": "lanes that lack a nonce before their last one",
        "not_received": "stored proofs that the receiver has not",
        "unknown": "proofs that only the receiver has",
        "duplicates": "nonces that the receiver has from two callbacks",
        "keys": "callbacks that one side has only, missing sequences",
        "leftovers": "rows undelivered, or of a round without an end",
        "damaged": "SQLite files in which SQLite's check finds faults",
    }
    vanished = sum(each.lost for each in seen)
    overstated = sum(each.overstated for each in seen)
    return [
        Figure("rounds", found.rounds, "of both protocols in turn"),
        Figure("lanes", found.lanes, "given"),
        Figure("proofs", found.produced, "artifacts and winners in the members' files"),
        Figure("shown", min(e.seen for e in seen), "of them seen at each controller"),
        Figure("vanished", vanished, "of them missing or different at the end", none),
        Figure("overstated", overstated, "rounds that counted more than they had", none),
        *(Figure(name, getattr(found, name), text, none) for name, text in wrong.items()),
        Figure("repeats", found.repeats, "callbacks that the receiver got twice under one key"),
    ]


def _of_verdicts(found: VerdictAccount) -> list[Figure]:
    none = Limit(0, at_most=True)
    counted = {
        "jobs": "samples of members' lanes",
        "retaken": "of them begun again, after a kill or a fault",
        "verdicts": "one for each job",
        "convictions": "of them of the member that cheats",
        "abstained": "of them without a judgement",
    }
    wrong = {
        "open": "jobs that have not ended",
        "without": "jobs that have ended without a verdict",
        "twice": "jobs with several verdicts",
        "early": "verdicts of a job that has not ended",
        "incomplete": "verdicts of another sample than the job's",
        "wrong": "honest members convicted, cheats cleared, and what was not decided",
        "miscounted": "outcomes of which the fleet counts another number",
    }
    return [
        *(Figure(name, getattr(found, name), text) for name, text in counted.items()),
        *(Figure(f"jobs_{name}", getattr(found, name), text, none) for name, text in wrong.items()),
    ]


def _of_times(counts: FleetCounts) -> list[Figure]:
    most, none = Limit(RECOVERED_S, at_most=True), Limit(0, at_most=True)
    times = []
    for name, recoveries in counts.recovered.items():
        leads, stores = ([r.leads_s for r in recoveries], [r.stores_s for r in recoveries])
        times += [
            Figure(f"{name}_s", median(leads), "until the fleet answers and leads; the median"),
            Figure(f"{name}_slowest_s", max(leads), "the same; the longest", most),
            Figure(f"{name}_stores_s", max(stores), "until it stores a new result; the longest"),
        ]
    jobs_s, ended = max(counts.jobs_s, default=0.0), len(counts.workers_ended)
    return [
        *times,
        Figure("jobs_s", jobs_s, "until jobs ended that were open at a worker's kill; the longest"),
        Figure("workers_ended", ended, "workers that ended by themselves", none),
        Figure(
            "disagree",
            counts.disagreements,
            "controllers that show another state than the first",
            none,
        ),
    ]
