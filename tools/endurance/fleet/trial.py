"""The trial of a fleet: kills at random moments, when it works again, and the account of all."""

import random
import re
import time
from collections import Counter
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, suppress
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any, Self, TypeVar

import httpx

from endurance.fleet.account import (
    ABSTAINED,
    OpenJobs,
    account,
    account_verdicts,
    figures,
    read_fleet,
    read_verdicts,
)
from endurance.fleet.deployment import SAMPLE, FleetDeployment, Member, deployed
from endurance.fleet.postgres import Postgres
from endurance.fleet.processes import ForkedServer
from endurance.fleet.programs import MODEL
from endurance.load import Comparison, Witness, order
from proofserve.fleet.sql.database import database_url
from proofserve.host import machine
from proofserve.remote.http import wait_until
from proofserve.remote.node_client import NodeClient
from proofserve.reports import Figure, Limit, NodeError, Progress, Report, TooSlowError
from proofserve_lab.bench.statistics import median
from proofserve_lab.nodes import last_seq, status_of

T = TypeVar("T")

CALL_S = 20.0
CHANGE_S = 120.0
KILLS_PER_ROUND = 4
# Seconds until a kill: after the first new result, or after the network began to change the round.
SOONEST_S, LATEST_S = 0.0, 3.0
# How long a server stays away at most, in seconds.
AWAY_S = 3.0
WORKS_S = 60.0
# A worker is killed in a job, up to JOB_S after its begin, if one is caught at work within BEGIN_S:
# many jobs end sooner than that.
JOB_S, BEGIN_S = 0.3, 60.0
JOBS_S = 60.0
# A member that lost several lanes of a round waits up to half a minute for the next one.
PROVES_S = 120.0
DELIVERY_S = 120.0
AGREE_S = 15.0
POLL_S = 0.3
_STATUS = "/api/v1/pow/status"
_VIEW_AGE = re.compile(r"^proofserve_fleet_view_age_seconds (\S+)", re.MULTILINE)
_LEADS = "proofserve_fleet_leads 1.0"
MEMBERS, WORKERS = 3, 2
# The longest time in seconds until the fleet answers and leads again.
RECOVERED_S = 10.0


class Network:
    """The network's side: it starts and stops rounds of the fleet at ``url``.

    It repeats a call until it has an answer. Callbacks go to ``receiver``.
    """

    def __init__(self, url: str, model: str, receiver: str) -> None:
        self._client = NodeClient(url, timeout_s=CALL_S)
        self._model = model
        self._receiver = receiver

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self._client.__exit__(*error)

    def next_round(self, number: int) -> None:
        """Stop the round that runs, and start round ``number``. Raises TooSlowError."""
        self.stop()
        work = order(number, self._model, self._receiver)

        def started() -> bool:
            try:
                self._client.start_round(work)
            except NodeError:
                # An earlier call may have started it, and its answer was lost.
                return self._proves(work.block_hash)
            return True

        wait_until(started, f"the start of round {number}", CHANGE_S)

    def stop(self) -> None:
        """Stop the round. Raises TooSlowError."""

        def stopped() -> bool:
            self._client.stop()
            return True

        stop = partial(_answer, stopped, otherwise=False)
        wait_until(stop, "the stop of the round", CHANGE_S)

    def pending(self) -> int | None:
        """How many callbacks to the network wait; None if the fleet cannot say it."""
        unknown: Mapping[str, Any] = {"outbox": None}
        outbox = _answer(self._client.describe, otherwise=unknown)["outbox"]
        return None if outbox is None else int(outbox["pending"])

    def newest(self, known: int) -> int:
        """The newest sequence number, if the fleet answers, and else the one that is ``known``."""
        return _answer(lambda: last_seq(self._client, known), otherwise=known)

    def shows(self, newest: int) -> bool:
        """Whether the fleet answers, and has a result above the sequence number ``newest``."""
        return _answer(lambda: bool(self._client.results(newest, 1)), otherwise=False)

    def _proves(self, block_hash: str) -> bool:
        unknown: Mapping[str, Any] = {"status": None}
        found = _answer(self._client.describe, otherwise=unknown)
        return bool(found["status"] == "GENERATING" and found["config"]["block_hash"] == block_hash)


def _answer(call: Callable[[], T], otherwise: T) -> T:
    try:
        return call()
    except NodeError:
        return otherwise


@dataclass(frozen=True, slots=True)
class Recovery:
    """Seconds until the fleet answered and had a leader, and until it stored a new result."""

    leads_s: float
    stores_s: float


class FleetTrial:
    """One run over ``fleet``, which runs, and its counts. ``recovered`` has recoveries by victim.

    The time of a recovery is not taken while the network changes the round. It begins with the kill
    if a controller is left, else when the killed servers serve again.

    ``ways`` counts how killed members came back. After each kill of workers, ``jobs_s`` has the
    seconds until all jobs that were open had ended. ``disagreements`` counts values that the
    controllers showed differently at the end. ``workers_ended`` has the ends of the logs of workers
    that ended by themselves, by name.
    """

    def __init__(self, fleet: FleetDeployment, draw: random.Random, progress: Progress) -> None:
        self._fleet = fleet
        self._draw = draw
        self._progress = progress
        self.kills, self.ways = Counter[str](), Counter[str]()
        self.rounds_changed = self.disagreements = 0
        self.recovered: dict[str, list[Recovery]] = {}
        self.jobs_s: list[float] = []
        self.workers_ended: dict[str, str] = {}
        self.victims: Mapping[str, Callable[[], Recovery]] = {
            "controller": self._kill_controller,
            "member": self._kill_member,
            **({"worker": self._kill_worker} if fleet.workers else {}),
            **({"database": partial(self._kill_database, fleet.server)} if fleet.server else {}),
        }
        self._next: list[str] = []
        self._jobs = OpenJobs(database_url(fleet.database))
        self.witnesses = [Witness(each.url, POLL_S) for each in fleet.controllers]
        self._network = Network(fleet.front.url, MODEL, fleet.receiver.url)
        # It asks while the first one waits for an answer about the change of the round.
        self._asking = Network(fleet.front.url, MODEL, fleet.receiver.url)

    def run(self, kills: int) -> None:
        """Raises ReportedError and ServerFailed."""
        network = self._network
        with ExitStack() as stack:
            stack.enter_context(network)
            stack.enter_context(self._asking)
            for witness in self.witnesses:
                stack.enter_context(witness)
            changing = stack.enter_context(ThreadPoolExecutor(1))
            network.next_round(0)
            for number in self._progress.over("killing at random", range(kills)):
                round_number, rest = divmod(number + 1, KILLS_PER_ROUND)
                if rest == 0:
                    change = changing.submit(network.next_round, round_number)
                    self._kill()
                    change.result()
                    self.rounds_changed += 1
                    self._recovery(self._newest(), time.monotonic())
                else:
                    self._recovery(self._newest(), time.monotonic())
                    victim, recovery = self._kill()
                    self.recovered.setdefault(victim, []).append(recovery)
            self._end()

    def _kill(self) -> tuple[str, Recovery]:
        """Kill a random victim; return its name and the recovery of the fleet."""
        time.sleep(self._draw.uniform(SOONEST_S, LATEST_S))
        if not self._next:
            # Every victim once, in a random order, and then again.
            self._next = self._draw.sample(list(self.victims), len(self.victims))
        victim = self._next.pop()
        self.kills[victim] += 1
        return victim, self.victims[victim]()

    def _kill_controller(self) -> Recovery:
        """Kill one controller, or all. Without one, members keep what they find until the start."""
        controllers = self._fleet.controllers
        killed = self._draw.sample(controllers, self._draw.randint(1, len(controllers)))
        newest = self._newest()
        for each in killed:
            each.kill()
        began = time.monotonic()
        if len(killed) == len(controllers):
            self._stay_away()
            self._start_controllers()
            began = time.monotonic()
        recovery = self._recovery(newest, began)
        self._start_controllers()
        return recovery

    def _start_controllers(self) -> None:
        for each in self._fleet.controllers:
            if not each.runs:
                self._fleet.start_controller(each)

    def _kill_database(self, server: Postgres) -> Recovery:
        newest = self._newest()
        server.kill()
        self._stay_away()
        server.start()
        return self._recovery(newest, time.monotonic())

    def _kill_member(self) -> Recovery:
        """Kill a member, which comes back with its round, without it, or not at once."""
        fleet = self._fleet
        killed = self._draw.choice(fleet.members)
        # A member that was replaced may stay away, and somebody has to cheat.
        ways = ("resumed", "restarted") if killed.cheats else ("resumed", "restarted", "replaced")
        way = self._draw.choice(ways)
        self.ways[way] += 1
        newest = self._newest()
        killed.kill()
        if way == "replaced":
            fleet.members.remove(killed)
            self._replace()
            fleet.away.append(killed)
        else:
            self._stay_away()
            killed.serve(resume=way == "resumed")
        return self._recovery(newest, time.monotonic())

    def _kill_worker(self) -> Recovery:
        """Kill a worker, or all, in the middle of a job if there are any."""
        fleet, newest = self._fleet, self._newest()
        # Rounds of distances, every second one, have no jobs.
        if self.rounds_changed % 2 == 0:
            with suppress(TooSlowError):
                wait_until(self._freezes_one_at_work, "a job", BEGIN_S)
        opened = self._jobs.ids()
        one = [each for each in fleet.workers if each.is_frozen] or fleet.workers[:1]
        killed = self._draw.choice((one, fleet.workers))
        for each in killed:
            each.kill()
        began = time.monotonic()
        recovery = self._recovery(newest, began)
        self._stay_away()
        for each in killed:
            fleet.start_worker(each)
        wait_until(lambda: not opened & self._jobs.ids(), "the end of the open jobs", JOBS_S)
        self.jobs_s.append(time.monotonic() - began)
        return recovery

    def _freezes_one_at_work(self) -> bool:
        """Stop a worker that has begun a job, so that the job does not end before the kill."""
        for worker in self._fleet.workers:
            if worker.name in self._jobs.workers():
                time.sleep(self._draw.uniform(0.0, JOB_S))
                worker.freeze()
                if worker.name in self._jobs.workers():
                    return True
                worker.thaw()
        return False

    def _replace(self) -> None:
        """A new member joins, or the one that was away longest comes back with its old round."""
        if len(self._fleet.away) > 1:
            back = self._fleet.away.pop(0)
            back.serve(resume=True)
            self._fleet.members.append(back)
        else:
            self._fleet.join()

    def _stay_away(self) -> None:
        time.sleep(self._draw.uniform(0.0, AWAY_S))

    def _newest(self) -> int:
        return self._asking.newest(max(witness.newest for witness in self.witnesses))

    def _recovery(self, newest: int, began: float) -> Recovery:
        """Wait for an answer and a leader since ``began``, and for a result above ``newest``."""
        wait_until(lambda: self._leads(began), "a controller that answers and leads", WORKS_S)
        leads_s = time.monotonic() - began
        wait_until(lambda: self._asking.shows(newest), "a new result", WORKS_S)
        return Recovery(leads_s, time.monotonic() - began)

    def _leads(self, began: float) -> bool:
        controllers = [each for each in self._fleet.controllers if each.runs]
        return (
            any(_leads(each, began) for each in controllers) and self._asking.pending() is not None
        )

    def _end(self) -> None:
        """Have every member prove, stop the round, and wait until all callbacks are delivered."""
        fleet = self._fleet
        self._progress.step("every member proves, and delivers its last callbacks")
        for member in fleet.members:
            wait_until(partial(_generates, member), f"{member.name} to prove", PROVES_S)
        self._network.stop()
        for member in fleet.away:
            member.serve(resume=False)
        for member in (*fleet.members, *fleet.away):
            wait_until(partial(_delivered, member), f"callbacks of {member.name}", DELIVERY_S)
        wait_until(lambda: self._network.pending() == 0, "callbacks to the network", DELIVERY_S)
        if fleet.workers:
            wait_until(partial(self._jobs.all_ended, SAMPLE), "the end of all jobs", JOBS_S)
        ended = (each for each in fleet.workers if each.has_ended)
        self.workers_ended = {each.name: each.log_end for each in ended}
        self.disagreements = self._disagreements()

    def _disagreements(self) -> int:
        """How many controllers show another state than the first; they may need a moment."""
        deadline = time.monotonic() + AGREE_S
        while True:
            shown = [_shown(each.url) for each in self._fleet.controllers]
            differ = sum(each != shown[0] for each in shown)
            if not differ or time.monotonic() > deadline:
                return differ
            time.sleep(0.5)


def _leads(controller: ForkedServer, began: float) -> bool:
    """Whether it leads, and has read the database since ``began``."""
    try:
        page = controller.http.get("/api/v1/fleet/metrics").text
    except httpx.TransportError:
        return False
    age = _VIEW_AGE.search(page)
    return _LEADS in page and age is not None and float(age[1]) < time.monotonic() - began


def _generates(member: Member) -> bool:
    return bool(member.http.get(_STATUS).json()["status"] == "GENERATING")


def _delivered(member: Member) -> bool:
    return bool(member.http.get(_STATUS).json()["outbox"]["pending"] == 0)


def _shown(url: str) -> tuple[object, ...]:
    with NodeClient(url) as client:
        status = status_of(client)
        return (status.state, status.round_id, status.processed, status.found, last_seq(client))


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
    of_files = (*figures(found), *_of_witnesses(seen), *figures(judged, of_wrong="jobs_"))
    recovered = trial.recovered.items()
    windows: dict[str, Any] = {name: [asdict(r) for r in all_] for name, all_ in recovered}
    abstained = [each for each in verdicts.verdicts if each.outcome == ABSTAINED]
    windows["abstentions"] = [{"job": each.job, "reason": each.reason} for each in abstained]
    windows["workers_ended"] = trial.workers_ended
    every = (
        *(Figure(f"kills_{name}", n, "kill -9 of it") for name, n in trial.kills.items()),
        *(Figure(f"members_{way}", n, "after a kill") for way, n in trial.ways.items()),
        *of_files,
        *_of_times(trial),
    )
    return Report("fleet", every, setup, windows, machine())


def _of_witnesses(seen: list[Comparison]) -> list[Figure]:
    none = Limit(0, at_most=True)
    vanished = sum(each.lost for each in seen)
    overstated = sum(each.overstated for each in seen)
    return [
        Figure("shown", min(e.seen for e in seen), "proofs seen at each controller"),
        Figure("vanished", vanished, "of them missing or different at the end", none),
        Figure("overstated", overstated, "rounds that counted more than they had", none),
    ]


def _of_times(trial: FleetTrial) -> list[Figure]:
    most, none = Limit(RECOVERED_S, at_most=True), Limit(0, at_most=True)
    times = []
    for name, recoveries in trial.recovered.items():
        leads, stores = ([r.leads_s for r in recoveries], [r.stores_s for r in recoveries])
        times += [
            Figure(f"{name}_s", median(leads), "until the fleet answers and leads; the median"),
            Figure(f"{name}_slowest_s", max(leads), "the same; the longest", most),
            Figure(f"{name}_stores_s", max(stores), "until it stores a new result; the longest"),
        ]
    jobs_s, ended = max(trial.jobs_s, default=0.0), len(trial.workers_ended)
    return [
        *times,
        Figure("jobs_s", jobs_s, "until jobs ended that were open at a worker's kill; the longest"),
        Figure("workers_ended", ended, "workers that ended by themselves", none),
        Figure(
            "disagree",
            trial.disagreements,
            "controllers that show another state than the first",
            none,
        ),
    ]
