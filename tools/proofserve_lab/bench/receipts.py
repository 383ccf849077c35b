"""What receipts cost chat: its speed with them and without, and whether they change an answer."""

import uuid
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from time import monotonic

from proofserve.host import machine
from proofserve.remote.node_client import NodeClient
from proofserve.reports import Figure, Limit, Progress, Report
from proofserve_lab.bench.chat import FIRST_SEED, WARM_UPS, at_most, differing
from proofserve_lab.bench.statistics import median
from proofserve_lab.chats import Reply, ask_all, chats, reading_chat
from proofserve_lab.nodes import receipts_of


@dataclass(frozen=True, slots=True)
class ReceiptsPlan:
    """``answers`` chats one at a time, then ``pairs`` of turns, without and with receipts.

    In a turn, ``clients`` send ``chats`` of about ``words`` words in and ``tokens`` tokens out.
    ``least_ratio`` limits the speed with receipts over that without.
    """

    model: str
    least_ratio: float
    clients: int = 16
    words: int = 32
    tokens: int = 64
    chats: int = 64
    pairs: int = 20
    answers: int = 50


def bench_receipts(
    off: NodeClient, on: NodeClient, plan: ReceiptsPlan, progress: Progress
) -> Report:
    """Compare the server ``off`` with ``on``, which keeps receipts; one is idle meanwhile."""
    answers = [_answers(node, plan, what, progress) for node, what in ((off, "no"), (on, "with"))]
    missing = sum(
        reply.response_id is None or receipts_of(on, reply.response_id) == 0
        for reply in progress.over("receipts of these answers", answers[1])
    )
    errors = [reply.error for replies in answers for reply in replies if reply.error]
    speeds = []
    progress.step(f"{plan.clients} chats at a time, in turns with receipts", 2 * plan.pairs)
    for pair in range(plan.pairs):
        found: dict[bool, float] = {}
        for kept in (False, True) if pair % 2 == 0 else (True, False):
            speed, failed = _turn(on if kept else off, plan, pair)
            found[kept] = speed
            errors += failed
            progress.advance()
        speeds.append((found[False], found[True]))
    figures = receipt_figures(plan, speeds, differing(*answers), missing, errors)
    windows = {
        "off_tokens_per_second": [without for without, _ in speeds],
        "on_tokens_per_second": [beside for _, beside in speeds],
        "errors": errors[:20],
    }
    return Report("receipts", figures, asdict(plan), windows, {**machine(), **on.versions()})


def _answers(node: NodeClient, plan: ReceiptsPlan, what: str, progress: Progress) -> list[Reply]:
    """Answers of one chat at a time: in a batch, the others in it could change the last bits."""
    progress.step(f"{plan.answers} chats, one at a time, {what} receipts", plan.answers)
    warm_ups = chats(plan.model, range(WARM_UPS), plan.tokens, uuid.uuid4().hex)
    ask_all(node.url, warm_ups, WARM_UPS)
    seeds = range(FIRST_SEED, FIRST_SEED + plan.answers)
    calls = chats(plan.model, seeds, plan.tokens, uuid.uuid4().hex)
    return ask_all(node.url, calls, 1, progress.advance)


def _turn(node: NodeClient, plan: ReceiptsPlan, number: int) -> tuple[float, list[str]]:
    """Tokens a second of a turn, and errors of its chats.

    Answers are not streamed: so the engine, which makes the sketches, takes more of the time.
    """
    # No prompt repeats, because a server would find it in its prefix cache.
    numbers = range(number * plan.chats, (number + 1) * plan.chats)
    calls = [reading_chat(plan.model, each, plan.words, plan.tokens) for each in numbers]
    began = monotonic()
    replies = ask_all(node.url, calls, plan.clients)
    tokens = sum(reply.completion_tokens for reply in replies)
    return tokens / (monotonic() - began), [reply.error for reply in replies if reply.error]


def receipt_figures(
    plan: ReceiptsPlan,
    speeds: Sequence[tuple[float, float]],
    changed: int,
    missing: int,
    errors: Sequence[str],
) -> tuple[Figure, ...]:
    """``speeds``: tokens a second without and with receipts. ``changed``: answers, by receipts."""
    ratios = [beside / without for without, beside in speeds if without]
    return (
        Figure(
            "tokens_per_second_off",
            median([without for without, _ in speeds]),
            "no receipts, median of all turns",
        ),
        Figure("tokens_per_second_on", median([beside for _, beside in speeds]), "with receipts"),
        Figure(
            "throughput_ratio",
            # Unknown if chat had no tokens in a turn without receipts.
            median(ratios) if len(ratios) == len(speeds) else None,
            "with receipts over without, median of all pairs",
            Limit(plan.least_ratio),
        ),
        Figure("chats", plan.answers, "greedy chats, one at a time, on each server"),
        Figure(
            "differing", changed, "answers that differ with receipts on, byte for byte", at_most(0)
        ),
        Figure("missing", missing, "answers without a receipt", at_most(0)),
        Figure("errors", len(errors), "chats refused, cut off or aborted", at_most(0)),
    )
