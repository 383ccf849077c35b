"""Chat answers and latencies without and with a round: does a round change the answers?"""

import statistics
import uuid
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain, combinations, product

from proofserve.lab.client.chats import chats
from proofserve.lab.client.load import Reply, ask_all
from proofserve.lab.client.node_client import NodeClient, computing_round
from proofserve.lab.client.progress import Progress
from proofserve.lab.client.records import Work
from proofserve.lab.report.figures import median

AT_ONCE = 8
# vLLM batches eight chats at a time as they arrive, and the batch can change an answer. How many
# answers differ varies by a factor of two from run to run, so there are several runs, in turns.
RUNS_WITH_A_ROUND = 2
# The first answers of a server take longer than all later ones.
WARM_UPS = 8
FIRST_SEED = 1_000


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
