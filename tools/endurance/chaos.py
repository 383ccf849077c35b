"""Kills servers at random moments of a round, and then checks that no proof is lost."""

import random
import time
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from endurance import files
from endurance.load import Comparison, Witness, endless_chat, order
from endurance.servers import Node, Receiver
from proofserve.host import machine
from proofserve.remote.http import wait_until
from proofserve.remote.node_client import NodeClient
from proofserve.reports import Figure, Limit, Progress, Report
from proofserve_lab.bench.statistics import median
from proofserve_lab.chats import ClosedLoop, Reply, ask_one
from proofserve_lab.nodes import status_of

PROCESSES = ("api", "engine", "receiver")
CHAT_CLIENTS = 2
KILLS_PER_ROUND = 5
# Seconds from the first new result of the round to the kill.
SOONEST_S, LATEST_S = 0.1, 3.0
RECEIVER_AWAY_S = 2.0
PROGRESS_S = 60.0
DELIVERY_S = 120.0
# Starts without a kill before them, and how much longer a restart after a kill may take.
CLEAN_STARTS = 3
SLOWEST_RESTART = 1.5
NODE = {
    "POC_RESUME": "1",
    # The witness compares every result that it saw with the file, so nothing may be deleted.
    "POC_OUTBOX_KEEP_DAYS": "0",
    # The node always has proofs and callbacks to do, so that each kill interrupts both.
    "POC_SHARE": "0.3",
    "POC_CALLBACK_INTERVAL_SEC": "1",
    "POC_RECEIPTS": "1",
}
# An answer that ended so long before a kill, in seconds, has its receipt.
RECEIPT_S = 1.0


def chaos(folder: Path, kills: int, seed: int, progress: Progress) -> Report:
    """Kill a process ``kills`` times, then compare what was shown, stored and received.

    Raises:
        ReportedError, ServerFailed: a server did not start, end or answer as the trial needs.
    """
    draw = random.Random(seed)  # noqa: S311 - repeatable, not secret
    with Receiver(folder) as receiver, Node(folder, **NODE) as node:
        trial = _Trial(node, receiver, draw, progress)
        with Witness(node.url) as witness:
            trial.run(kills)
    account = files.compare(node.outbox, receiver.database, receiver.url)
    seen = witness.compare(files.results(node.outbox))
    without = trial.response_ids - files.receipts(node.outbox)
    setup = {
        "kills": kills,
        "seed": seed,
        "failed_chats": trial.failed,
        "without_receipt": sorted(without),
    }
    return _report(trial, account, seen, setup)


@dataclass(slots=True)
class _Trial:
    """One run, and its counts; times in seconds. A chat that a kill ended is in neither count.

    ``response_ids`` are those of answers that ended ``RECEIPT_S`` before the next kill or earlier.
    """

    node: Node
    receiver: Receiver
    draw: random.Random
    progress: Progress
    kills: Counter[str] = field(default_factory=Counter)
    clean_starts: list[float] = field(default_factory=list)
    restarts: list[float] = field(default_factory=list)
    answered: int = 0
    response_ids: set[str] = field(default_factory=set)
    failed: list[str] = field(default_factory=list)
    _chats: ClosedLoop[Reply] = field(init=False)

    def run(self, kills: int) -> None:
        self.receiver.start()
        for _ in self.progress.over("starting, without a kill before", range(CLEAN_STARTS)):
            self.node.stop()
            self.clean_starts.append(self.node.start())
        self._chats = self._chat()
        try:
            with NodeClient(self.node.url) as client:
                for number in self.progress.over("killing at random", range(kills)):
                    if number % KILLS_PER_ROUND == 0:
                        client.stop()
                        work = order(number // KILLS_PER_ROUND, self.node.model, self.receiver.url)
                        client.start_round(work)
                    _wait_for_progress(client)
                    time.sleep(self.draw.uniform(SOONEST_S, LATEST_S))
                    self._kill(self.draw.choice(PROCESSES))
                self.progress.step("delivering the last callbacks")
                _wait_for_progress(client)
                client.stop()
                wait_until(
                    lambda: client.describe()["outbox"]["pending"] == 0,
                    "the last callbacks",
                    DELIVERY_S,
                )
        finally:
            self._chats.abandon()
            self._count(time.monotonic())

    def _kill(self, name: str) -> None:
        self.kills[name] += 1
        if name == "receiver":
            self.receiver.kill(name)
            self.receiver.end_after_kill()
            time.sleep(self.draw.uniform(0.0, RECEIVER_AWAY_S))
            self.receiver.start()
            return
        killed = time.monotonic()
        self.node.kill(name)
        self._chats.abandon()
        self._count(killed)
        self.node.end_after_kill()
        seconds = self.node.start()
        self.restarts.append(seconds)
        if seconds > SLOWEST_RESTART * max(self.clean_starts):
            log = self.node.kept_log()
            self.progress.step(f"a start after a kill took {seconds:.0f} s; its log is {log}")
        self._chats = self._chat()

    def _chat(self) -> ClosedLoop[Reply]:
        loop = ClosedLoop(self.node.url, endless_chat(self.node.model), CHAT_CLIENTS, ask_one)
        loop.start()
        return loop

    def _count(self, killed: float) -> None:
        """Count the chats from a node's start until the time ``killed``."""
        for reply in self._chats.replies:
            if reply.error is None:
                self.answered += 1
                if reply.response_id and reply.ended <= killed - RECEIPT_S:
                    self.response_ids.add(reply.response_id)
            elif reply.ended < killed:
                self.failed.append(reply.error)


def _wait_for_progress(client: NodeClient) -> None:
    before = status_of(client).processed
    wait_until(lambda: status_of(client).processed > before, "new proofs", PROGRESS_S)


def _report(
    trial: _Trial, account: files.Account, seen: Comparison, setup: dict[str, Any]
) -> Report:
    usual, none = median(trial.clean_starts), Limit(0, at_most=True)
    slowest = max(trial.restarts, default=None)
    ratio = slowest / usual if slowest is not None and usual else None
    figures = (
        *(Figure(f"kills_{name}", trial.kills[name], "kill -9 of it") for name in PROCESSES),
        Figure("proofs", account.produced, "artifacts and winners of all rounds"),
        Figure("shown", seen.seen, "of them seen under /results by the witness"),
        Figure("lost", seen.lost, "shown once, and missing or different at the end", none),
        Figure("overstated", seen.overstated, "rounds that counted more than they had", none),
        Figure("not_received", account.missing, "proofs that the receiver has not", none),
        Figure("foreign", account.foreign, "proofs that only the receiver has", none),
        Figure("duplicates", account.duplicates, "nonces that count twice", none),
        Figure("repeats", account.repeats, "callbacks that came twice under one key"),
        Figure("leftovers", account.leftovers, "rows undelivered, open or without a round", none),
        Figure("damaged", len(account.damaged), "files in which SQLite's check finds faults", none),
        Figure("start_s", usual, "until it serves, without a kill before; the median"),
        Figure("restart_s", median(trial.restarts), "the same after a kill; the median"),
        Figure(
            "slowest_restart", ratio, "longest restart / usual start", Limit(SLOWEST_RESTART, True)
        ),
        Figure("chats", trial.answered, "answered"),
        Figure("receipts", len(trial.response_ids), "answers that ended 1 s before a kill"),
        Figure("receipts_lost", len(setup["without_receipt"]), "of them without a receipt", none),
        Figure("chats_failed", len(trial.failed), "while their server lived", none),
    )
    windows = {"clean_starts_s": trial.clean_starts, "restarts_s": trial.restarts}
    return Report("chaos", figures, setup, windows, machine())
