"""Runs chat without a pause and short rounds for a given time, and looks for leaks."""

import random
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from endurance import files
from endurance.footprint import Footprint, counted, footprint
from endurance.load import endless_chat, order
from endurance.servers import Gateway, Node, Receiver
from proofserve.host import machine
from proofserve.remote.chats import ClosedLoop, Reply, ask_one
from proofserve.remote.http import wait_until
from proofserve.remote.node_client import NodeClient
from proofserve.reports import Figure, Limit, Progress, Report

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
class Span:
    """The outcome of a span of load."""

    rounds: int
    replies: Sequence[Reply]


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
        warm = deployment.load("warming up", warm_s, first=0)
        before = deployment.at_rest()
        rest = minutes * 60 - warm_s
        long = deployment.load("chat and rounds", rest, first=warm.rounds)
        after = deployment.at_rest()
        stored = counted(f"{node.url}/metrics", "proofserve_nonces_total")
    account = files.compare(node.outbox, receiver.database, receiver.url)
    spans = (warm, long)
    return _report(spans, (before, after), account, stored, {"minutes": minutes, "seed": seed})


class _Deployment:
    """A running receiver, a node and the gateway in front of the node."""

    def __init__(
        self,
        receiver: Receiver,
        node: Node,
        gateway: Gateway,
        draw: random.Random,
        progress: Progress,
    ) -> None:
        self._receiver = receiver
        self._node = node
        self._gateway = gateway
        self._draw = draw
        self._progress = progress

    def load(self, what: str, seconds: float, first: int) -> Span:
        """Run chat through the gateway, and rounds from number ``first`` on."""
        self._progress.step(f"{what}, {seconds:.0f} s")
        calls, until, number = endless_chat(self._node.model), time.monotonic() + seconds, first
        with (
            ClosedLoop(self._gateway.url, calls, CHAT_CLIENTS, ask_one) as loop,
            NodeClient(self._node.url) as client,
        ):
            while time.monotonic() < until:
                with client.round(order(number, self._node.model, self._receiver.url)):
                    time.sleep(self._draw.uniform(SHORTEST_S, LONGEST_S))
                number += 1
                time.sleep(self._draw.uniform(0.0, PAUSE_S))
        return Span(number - first, loop.replies)

    def at_rest(self) -> Footprint:
        """The footprint after some time without requests."""
        self._progress.step("waiting until the processes are idle")
        with NodeClient(self._node.url) as client:
            wait_until(
                lambda: client.describe()["outbox"]["pending"] == 0, "the callbacks", DELIVERY_S
            )
        time.sleep(REST_S)
        pages = [f"{server.url}/metrics" for server in (self._node, self._gateway)]
        return footprint((self._receiver, self._node, self._gateway), pages)


def _report(
    spans: Sequence[Span],
    at_rest: tuple[Footprint, Footprint],
    account: files.Account,
    counted_nonces: float,
    setup: dict[str, object],
) -> Report:
    before, after = at_rest
    replies = [reply for span in spans for reply in span.replies]
    errors = [reply.error for reply in replies if reply.error is not None]
    proofs = account.produced + account.pruned
    # A deleted proof must be at the receiver, which then has the only copy.
    missing = account.missing + max(0, account.pruned - account.foreign)
    all_rounds = account.rounds + account.pruned_rounds
    rounds, leaks, none = sum(span.rounds for span in spans), after.leaks(before), Limit(0, True)
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
