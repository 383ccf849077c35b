"""What a round costs the chat beside it: changed answers, waiting time, throughput."""

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field

from proofserve.lab.bench.chat_latency import Answers, measure_answers
from proofserve.lab.bench.saturation import TOLERATED, Load, Saturation, measure_saturation
from proofserve.lab.client.node_client import NodeClient
from proofserve.lab.client.progress import Progress
from proofserve.lab.client.records import Work
from proofserve.lab.report.figures import Figure, Limit, median, quantile
from proofserve.lab.report.machine import machine
from proofserve.lab.report.report import Report
from proofserve.rounds.status import EngineGauges

LONGEST_WAIT_BATCHES = 1.05
RESUME_MS = 10.0
THROUGHPUT = 0.98


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
