"""Runs chat without a pause and short rounds for a given time, and looks for leaks:

of memory, descriptors, threads and gauges of the processes while they are idle.
"""

import random
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import httpx
from prometheus_client.parser import text_string_to_metric_families

from endurance import files
from endurance.load import endless_chat, order
from endurance.servers import Gateway, Killable, Node, Receiver
from proofserve.host import machine
from proofserve.remote.http import wait_until
from proofserve.remote.node_client import NodeClient
from proofserve.reports import Figure, Limit, Progress, Report
from proofserve_lab.chats import ClosedLoop, Reply, ask_one

# When the deployment is idle, each gauge must be back at its first value.
IDLE_GAUGES = (
    "proofserve_tasks",
    "proofserve_leased_blocks",
    "proofserve_queued_nonces",
    "proofserve_outbox_pending",
    "gateway_tasks",
    "gateway_in_flight",
    "gateway_queued",
)
FREE_BLOCKS = "proofserve_free_blocks"
MIB = 2**20


CHAT_CLIENTS = 4
# The warm-up, as a share of the trial and in seconds at least. The heap of vLLM's worker grows for
# some minutes, until it has had requests of most sizes, and then no more.
WARM, WARM_S = 0.3, 60.0
# Seconds. The length of a round, and the longest pause after it.
SHORTEST_S, LONGEST_S, PAUSE_S = 2.0, 5.0, 1.0
DELIVERY_S = 60.0
# Seconds after which idle connections are closed and leases are back in the pool.
REST_S = 15.0
# Of the memory after the warm-up. A trial of ten minutes measures seven.
GROWTH = 0.05 * 7 / 9
# Seconds after which delivered results are deleted, so that the outbox shrinks in the trial.
KEEP_S = 30.0
NODE = {
    "POC_SHARE": "0.2",
    "POC_CALLBACK_INTERVAL_SEC": "1",
    "POC_LEASE_IDLE_SEC": "2",
    "POC_RECEIPTS": "1",
    "POC_OUTBOX_KEEP_DAYS": str(KEEP_S / 86_400),
}


@dataclass(frozen=True, slots=True)
class Footprint:
    """By process: resident MiB, file descriptors and threads. ``held`` are gauges by their name."""

    resident: Mapping[str, float]
    descriptors: Mapping[str, int]
    threads: Mapping[str, int]
    held: Mapping[str, float]

    def growth(self, before: "Footprint") -> float:
        """The largest growth of a process's resident memory, as a share of its first value."""
        grown = (now / before.resident[name] - 1 for name, now in self.resident.items())
        return max(grown)

    def leaks(self, before: "Footprint") -> dict[str, float]:
        """Each descriptor count, thread count and gauge that is above its first value."""
        pairs = {
            **{f"{k} descriptors": (v, before.descriptors[k]) for k, v in self.descriptors.items()},
            **{f"{k} threads": (v, before.threads[k]) for k, v in self.threads.items()},
            **{name: (value, before.held[name]) for name, value in self.held.items()},
        }
        return {name: now - then for name, (now, then) in pairs.items() if now > then}


def footprint(servers: Iterable[Killable], pages: Iterable[str]) -> Footprint:
    """The footprint of all processes of ``servers`` and of their metrics ``pages`` (URLs)."""
    family = {name: p for server in servers for name, p in server.processes().items()}
    gauges = {name: value for page in pages for name, value in _read(page).items()}
    return Footprint(
        resident={name: p.memory_info().rss / MIB for name, p in family.items()},
        descriptors={name: process.num_fds() for name, process in family.items()},
        threads={name: process.num_threads() for name, process in family.items()},
        # A block that is not free is leased, so fewer free blocks are a leak.
        held={**{name: gauges[name] for name in IDLE_GAUGES}, "KV blocks": -gauges[FREE_BLOCKS]},
    )


def counted(page: str, name: str) -> float:
    """The sum of all series of a metric."""
    return _read(page)[name]


def _read(page: str) -> dict[str, float]:
    found: dict[str, float] = {}
    text = httpx.get(page, timeout=30.0).raise_for_status().text
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            found[sample.name] = found.get(sample.name, 0.0) + sample.value
    return found


def soak(folder: Path, minutes: float, seed: int, progress: Progress) -> Report:
    """Load for a while, rest, measure; the same load until the end, rest, measure again.

    Raises:
        ReportedError, ServerFailed: a server did not start, end or answer as the trial needs.
    """
    draw = random.Random(seed)  # noqa: S311 - repeatable, not secret
    receiver, node = Receiver(folder), Node(folder, **NODE)
    with receiver, node, Gateway(folder, node.url) as gateway:
        progress.step("starting receiver, vLLM and gateway, about half a minute")
        for server in (receiver, node, gateway):
            server.start()
        deployment = _Deployment(receiver, node, gateway, draw, progress)
        warm_s = max(WARM_S, WARM * minutes * 60)
        number, warm = deployment.load("warming up", warm_s, first=0)
        before = deployment.at_rest()
        rest = minutes * 60 - warm_s
        rounds, long = deployment.load("chat and rounds", rest, first=number)
        after = deployment.at_rest()
        stored = counted(f"{node.url}/metrics", "proofserve_nonces_total")
    account = files.compare(node.outbox, receiver.database, receiver.url)
    setup = {"minutes": minutes, "seed": seed, "rounds": rounds}
    return _report([*warm, *long], (before, after), account, stored, setup)


@dataclass(frozen=True, slots=True)
class _Deployment:
    """A running receiver, a node and the gateway in front of the node."""

    receiver: Receiver
    node: Node
    gateway: Gateway
    draw: random.Random
    progress: Progress

    def load(self, what: str, seconds: float, first: int) -> tuple[int, list[Reply]]:
        """Run chat through the gateway, and rounds from number ``first`` to the one returned."""
        self.progress.step(f"{what}, {seconds:.0f} s")
        calls, until, number = endless_chat(self.node.model), time.monotonic() + seconds, first
        with (
            ClosedLoop(self.gateway.url, calls, CHAT_CLIENTS, ask_one) as loop,
            NodeClient(self.node.url) as client,
        ):
            while time.monotonic() < until:
                with client.round(order(number, self.node.model, self.receiver.url)):
                    time.sleep(self.draw.uniform(SHORTEST_S, LONGEST_S))
                number += 1
                time.sleep(self.draw.uniform(0.0, PAUSE_S))
        return number, loop.replies

    def at_rest(self) -> Footprint:
        """The footprint after some time without requests."""
        self.progress.step("waiting until the processes are idle")
        with NodeClient(self.node.url) as client:
            wait_until(
                lambda: client.describe()["outbox"]["pending"] == 0, "the callbacks", DELIVERY_S
            )
        time.sleep(REST_S)
        pages = [f"{server.url}/metrics" for server in (self.node, self.gateway)]
        return footprint((self.receiver, self.node, self.gateway), pages)


def _report(
    replies: Sequence[Reply],
    at_rest: tuple[Footprint, Footprint],
    account: files.Account,
    counted_nonces: float,
    setup: dict[str, Any],
) -> Report:
    before, after = at_rest
    errors = [reply.error for reply in replies if reply.error is not None]
    proofs = account.produced + account.pruned
    # A deleted proof must be at the receiver, which then has the only copy.
    missing = account.missing + max(0, account.pruned - account.foreign)
    all_rounds = account.rounds + account.pruned_rounds
    rounds, leaks, none = setup["rounds"], after.leaks(before), Limit(0, True)
    figures = (
        Figure("chats", len(replies), f"asked by {CHAT_CLIENTS} clients through the gateway"),
        Figure("chats_failed", len(errors), "refused, cut off or aborted", none),
        Figure("rounds", rounds, "started and stopped"),
        Figure("proofs", proofs, "artifacts and winners"),
        Figure(
            "pruned",
            account.pruned,
            f"of them deleted {KEEP_S:.0f} s after their delivery",
            Limit(1, at_most=False),
        ),
        Figure("foreign", account.foreign - account.pruned, "only the receiver has", none),
        *(
            Figure(f"{name}_mib", now, f"resident at the end, {now / before.resident[name]:.3f} x")
            for name, now in after.resident.items()
        ),
        Figure(
            "growth", after.growth(before), "of the process that grew most", Limit(GROWTH, True)
        ),
        Figure("leaks", len(leaks), "kinds of things held beyond those after the warm-up", none),
        Figure(
            "uncounted",
            abs(counted_nonces - proofs),
            "rows that the metrics count too many or too few",
            none,
        ),
        Figure("rows_of_rounds", abs(all_rounds - rounds), "rounds too many or too few", none),
        Figure("leftovers", account.leftovers, "rows undelivered, open or without a round", none),
        Figure("not_received", missing, "proofs that the receiver has not", none),
        Figure("duplicates", account.duplicates, "nonces that count twice", none),
        Figure("damaged", len(account.damaged), "files in which SQLite's check finds faults", none),
    )
    windows = {"leaks": leaks, "errors": errors, "before": asdict(before), "after": asdict(after)}
    return Report("soak", figures, setup, windows, machine())
