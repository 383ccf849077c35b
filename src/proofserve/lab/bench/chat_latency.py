"""Whether chat answers stay what they are while a round runs."""

import statistics
import uuid
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain, combinations, product

from proofserve.lab.client.chats import chats
from proofserve.lab.client.load import Reply, ask_all
from proofserve.lab.client.node_client import NodeClient
from proofserve.lab.client.progress import Progress
from proofserve.lab.client.records import Work
from proofserve.lab.client.waiting import computing_round
from proofserve.lab.report.figures import median

AT_ONCE = 8
# Eight at a time are batched as they come, and some answers are another batch's: how many differ
# from run to run by a factor of two. So there are several runs of a kind, in turns.
RUNS_WITH_A_ROUND = 2
# A first answer costs a server things that no later one does.
WARM_UPS = 8
FIRST_SEED = 1_000


@dataclass(frozen=True, slots=True)
class Answers:
    """How the runs of the same chats compare. Latencies are medians in seconds.

    Of eight at a time, in the median of all pairs of runs: answers that differ between two without
    proofs, and between one with a round and one without.
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
    """Ask one at a time (without, with a round), then eight at a time (in turns)."""
    asker = _Asker(node, work, max_tokens, progress)
    asker.ask("warming up", range(WARM_UPS), AT_ONCE)
    one = range(FIRST_SEED, FIRST_SEED + chats_per_run)
    eight = range(one.stop, one.stop + chats_per_run)
    one_plain = asker.ask("one at a time, no proofs", one, 1)
    with computing_round(node, work):
        one_round = asker.ask("one at a time, a round running", one, 1)
    eight_plain = [asker.ask("eight at a time, no proofs", eight, AT_ONCE)]
    eight_round = []
    for _ in range(RUNS_WITH_A_ROUND):
        with computing_round(node, work):
            eight_round.append(asker.ask("eight at a time, a round running", eight, AT_ONCE))
        eight_plain.append(asker.ask("eight at a time, no proofs, again", eight, AT_ONCE))
    return compare_answers((one_plain, one_round), eight_plain, eight_round)


def compare_answers(
    one: tuple[Sequence[Reply], Sequence[Reply]],
    eight_plain: Sequence[Sequence[Reply]],
    eight_round: Sequence[Sequence[Reply]],
) -> Answers:
    """Byte for byte. A reply that failed is identical to nothing.

    ``one`` holds the runs without and with a round. Raises ValueError for a run of another length.
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
    """How many answers of two runs of the same chats are not the same bytes."""
    pairs = zip(some, others, strict=True)
    return sum(bool(a.error or b.error or a.texts != b.texts) for a, b in pairs)


class _Asker:
    """Asks a node the same chats in several circumstances."""

    def __init__(self, node: NodeClient, work: Work, max_tokens: int, progress: Progress) -> None:
        self._node = node
        self._model = work.model
        self._max_tokens = max_tokens
        self._progress = progress

    def ask(self, what: str, seeds: range, at_once: int) -> list[Reply]:
        """One chat per seed. A salt of its own makes every run compute everything itself."""
        self._progress.step(f"{len(seeds)} chats, {what}", len(seeds))
        calls = chats(self._model, seeds, self._max_tokens, uuid.uuid4().hex)
        return ask_all(self._node.url, calls, at_once, self._progress.advance)
