"""What a round costs the chat beside it: changed answers, waiting time, throughput."""

import statistics
import uuid
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from itertools import chain, combinations, product

from proofserve.lab.bench.saturation import TOLERATED, Load, Saturation, measure_saturation
from proofserve.lab.chats import Reply, ask_all, chats
from proofserve.lab.host import machine
from proofserve.lab.node_client import NodeClient, computing_round
from proofserve.lab.records import Work
from proofserve.lab.report import Figure, Limit, Progress, Report, median, quantile
from proofserve.rounds.status import EngineGauges

AT_ONCE = 8
# vLLM batches eight chats at a time as they arrive, and the batch can change an answer. How many
# answers differ varies by a factor of two from run to run, so there are several runs, in turns.
RUNS_WITH_A_ROUND = 2
# The first answers of a server take longer than all later ones.
WARM_UPS = 8
FIRST_SEED = 1_000
LONGEST_WAIT_BATCHES = 1.05
RESUME_MS = 10.0
THROUGHPUT = 0.98


@dataclass(frozen=True, slots=True)
class Answers:
    """A comparison of several runs of the same chats. Latencies are medians in seconds.

    ``identical`` is of one chat at a time. Eight at a time, in the median of all pairs of runs:
    ``differing_plain`` answers differ between two runs without proofs, ``differing_round`` between
    a run with a round and a run without.
    """

    asked: int
    identical: int
    differing_plain: float
    differing_round: float
    errors: tuple[str, ...]
    plain_latency_s: float | None
    round_latency_s: float | None


def measure_answers(
    node: NodeClient, work: Work, chats_per_run: int, max_tokens: int, progress: Progress
) -> Answers:
    """Ask one chat at a time, without and with a round; then eight at a time, in turns."""

    def ask(what: str, seeds: range, at_once: int) -> list[Reply]:
        progress.step(f"{len(seeds)} chats, {what}", len(seeds))
        # A new salt keeps the prefix cache from helping a later run.
        calls = chats(work.model, seeds, max_tokens, uuid.uuid4().hex)
        return ask_all(node.url, calls, at_once, progress.advance)

    ask("warming up", range(WARM_UPS), AT_ONCE)
    one = range(FIRST_SEED, FIRST_SEED + chats_per_run)
    eight = range(one.stop, one.stop + chats_per_run)
    one_plain = ask("one at a time, no proofs", one, 1)
    with computing_round(node, work):
        one_round = ask("one at a time, a round running", one, 1)
    eight_plain = [ask("eight at a time, no proofs", eight, AT_ONCE)]
    eight_round = []
    for _ in range(RUNS_WITH_A_ROUND):
        with computing_round(node, work):
            eight_round.append(ask("eight at a time, a round running", eight, AT_ONCE))
        eight_plain.append(ask("eight at a time, no proofs, again", eight, AT_ONCE))
    return compare_answers((one_plain, one_round), eight_plain, eight_round)


def compare_answers(
    one: tuple[Sequence[Reply], Sequence[Reply]],
    eight_plain: Sequence[Sequence[Reply]],
    eight_round: Sequence[Sequence[Reply]],
) -> Answers:
    """Compare answers byte for byte; a failed reply equals no other.

    ``one`` holds the runs without and with a round. Raises ValueError if a run has another length.
    """
    plain, with_round = one
    replies = [*plain, *with_round, *chain(*eight_plain, *eight_round)]
    between_plain = [differing(*pair) for pair in combinations(eight_plain, 2)]
    across = [differing(*pair) for pair in product(eight_plain, eight_round)]
    return Answers(
        asked=len(plain),
        identical=len(plain) - differing(plain, with_round),
        differing_plain=statistics.median(between_plain),
        differing_round=statistics.median(across),
        errors=tuple(reply.error for reply in replies if reply.error),
        plain_latency_s=median([reply.seconds for reply in plain]),
        round_latency_s=median([reply.seconds for reply in with_round]),
    )


def differing(some: Sequence[Reply], others: Sequence[Reply]) -> int:
    pairs = zip(some, others, strict=True)
    return sum(bool(a.error or b.error or a.texts != b.texts) for a, b in pairs)


@dataclass(frozen=True, slots=True)
class ChatPlan:
    """``chats`` requests in each of seven runs, then the saturating ``load``."""

    work: Work
    chats: int = 200
    max_tokens: int = 16
    load: Load = field(default_factory=Load)


def bench_chat(node: NodeClient, plan: ChatPlan, progress: Progress) -> Report:
    """Chat without and with a round: one request at a time, eight, and a saturating load."""
    answers = measure_answers(node, plan.work, plan.chats, plan.max_tokens, progress)
    saturation = measure_saturation(node, plan.work, plan.load, progress)
    return report(plan, answers, saturation, node.engine(), {**machine(), **node.versions()})


def report(
    plan: ChatPlan,
    answers: Answers,
    saturation: Saturation,
    engine: EngineGauges,
    where: Mapping[str, str | int],
) -> Report:
    errors = [*answers.errors, *saturation.errors]
    figures = (
        *_answer_figures(answers),
        Figure("errors", len(errors), "chats refused, cut off or aborted", at_most(0)),
        *_engine_figures(engine),
        *_saturation_figures(saturation),
    )
    windows = {
        "plain_tokens_per_second": saturation.plain,
        "round_tokens_per_second": saturation.beside_round,
        "longest_silence_s": saturation.silences,
        "errors": errors[:20],
        "longest_chat_wait_s": engine.longest_chat_wait_s,
        "resume_ms_count": len(engine.resume_ms),
    }
    return Report("chat-priority", figures, asdict(plan), windows, where)


def at_most(bound: float) -> Limit:
    return Limit(bound, at_most=True)


def _answer_figures(answers: Answers) -> tuple[Figure, ...]:
    return (
        Figure("chats", answers.asked, "greedy chats in each run"),
        Figure(
            "identical",
            answers.identical,
            "one at a time: answers that a round does not change, byte for byte",
            Limit(answers.asked),
        ),
        Figure(
            "differing_without_proofs",
            answers.differing_plain,
            "eight at a time: answers that differ between two runs without proofs, median of three",
        ),
        Figure(
            "differing_with_proofs",
            answers.differing_round,
            "eight at a time: answers that differ with a round from without, median of six",
            at_most(answers.differing_plain),
        ),
        Figure("latency_s_plain", answers.plain_latency_s, "median of a chat, no proofs"),
        Figure("latency_s_round", answers.round_latency_s, "median of a chat, a round running"),
    )


def _engine_figures(engine: EngineGauges) -> tuple[Figure, ...]:
    return (
        Figure(
            "extra_wait_max_batches",
            engine.longest_chat_wait_batches,
            "longest wait of a chat for proofs, in forwards, since the engine's start",
            at_most(LONGEST_WAIT_BATCHES),
        ),
        Figure(
            "resume_ms_p50",
            median(engine.resume_ms),
            "end of the last chat step to the next proof forward, median",
            at_most(RESUME_MS),
        ),
        Figure("resume_ms_p95", quantile(engine.resume_ms, 0.95), "the same, 95 of 100"),
    )


def _saturation_figures(seen: Saturation) -> tuple[Figure, ...]:
    windows = len(seen.beside_round) + seen.stalled_beside_round
    few, left_out = at_most(TOLERATED * windows), "left out because the machine stood still"
    without, beside = seen.stalled_plain, seen.stalled_beside_round
    return (
        Figure("stalled_windows_plain", without, f"of {windows} without a round, {left_out}", few),
        Figure("stalled_windows_round", beside, f"of {windows} beside a round, {left_out}", few),
        Figure("tokens_per_second", median(seen.plain), "saturating chat, no proofs"),
        Figure(
            "throughput_ratio",
            seen.throughput_ratio,
            "saturating chat with a round active, over without",
            Limit(THROUGHPUT),
        ),
        Figure(
            "chat_share",
            median(seen.chat_share),
            "share of the time beside a round in which chat had the engine",
        ),
        Figure(
            "proofs_while_saturated",
            seen.proofs_while_saturated,
            "nonces stored beside saturating chat, in the windows that count",
            at_most(0),
        ),
        Figure("proofs_in_stalls", seen.proofs_in_stalls, "nonces stored in the windows left out"),
        Figure("proofs_afterwards", seen.proofs_afterwards, "nonces stored after chat", Limit(1)),
    )
