"""How long chats take that arrive at random moments, one at a time, without and with a round."""

import random
import time
import uuid
from dataclasses import asdict

from proofserve.lab.bench.chat import at_most
from proofserve.lab.chats import ask_all, chats
from proofserve.lab.host import machine
from proofserve.lab.node_client import NodeClient, computing_round
from proofserve.lab.records import Work
from proofserve.lab.report import Figure, Progress, Report, quantile

WARM_UPS = 8
# The longest pause before a chat, seconds: some forwards of any model, or a part of one.
PAUSE_S = 0.5
# A machine wakes a thread late now and then.
OVER = 1.1
# Of the pauses.
SEED = 1


def bench_waits(node: NodeClient, work: Work, count: int, progress: Progress) -> Report:
    """The times of ``count`` chats of one token without a round of ``work``, and beside one."""
    _ask(node, work.model, WARM_UPS, progress, "warming up")
    whole_s = node.measure(work, 2).seconds_per_forward
    plain = _ask(node, work.model, count, progress, "no proofs")
    with computing_round(node, work):
        beside = _ask(node, work.model, count, progress, "a round running")
    engine = node.engine()
    longest_ms, allowed_ms = engine.longest_chat_wait_s * 1e3, engine.max_wait_s * 1e3
    figures = (
        *_quantiles("plain", plain, "no proofs"),
        *_quantiles("round", beside, "a round running"),
        Figure(
            "longest_wait_ms",
            longest_ms,
            f"longest wait for proofs in the engine, of which {allowed_ms:.0f} are allowed",
            at_most(OVER * allowed_ms),
        ),
        Figure("whole_forward_s", whole_s, "a forward that does not pause"),
        Figure("forward_nonces", engine.forward_nonces, "nonces of a forward"),
        Figure("part_ms", engine.part_s * 1e3, "the longest part of a forward, usually"),
    )
    setup = {"work": asdict(work), "chats": count, "seed": SEED}
    windows = {"plain_s": plain, "round_s": beside}
    return Report("chat's waits", figures, setup, windows, {**machine(), **node.versions()})


def _ask(node: NodeClient, model: str, count: int, progress: Progress, what: str) -> list[float]:
    pauses, salt, seconds = random.Random(SEED), uuid.uuid4().hex, []  # noqa: S311
    progress.step(f"{count} chats, one at a time, {what}", count)
    for call in chats(model, range(count), 1, salt):
        time.sleep(pauses.uniform(0, PAUSE_S))
        (reply,) = ask_all(node.url, [call], 1, progress.advance)
        if not reply.error:
            seconds.append(reply.seconds)
    return seconds


def _quantiles(name: str, seconds: list[float], what: str) -> tuple[Figure, ...]:
    return tuple(
        Figure(
            f"chat_ms_p{share}_{name}",
            (quantile(seconds, share / 100) or 0.0) * 1e3,
            f"a chat of one token, {share} of 100, {what}",
        )
        for share in (50, 99)
    )
