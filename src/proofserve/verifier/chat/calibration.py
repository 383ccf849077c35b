"""What honest chat answers look like to a validator, for the file that ``verify-chat`` reads."""

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain, zip_longest
from typing import TYPE_CHECKING

import numpy as np

from proofserve.lab.records import vectors_of
from proofserve.lab.report import Progress
from proofserve.protocol.codec import to_float16
from proofserve.protocol.receipts.record import SCHEME
from proofserve.protocol.verdict.chosen_tokens import greedy_gap
from proofserve.verifier.calibration_file import (
    FORMAT,
    VERSION,
    CalibrationFile,
    GreedyLimit,
    KernelFacts,
)
from proofserve.verifier.chat.answers import BLOCK_TOKENS, Answer, Blocks
from proofserve.verifier.chat.token_judge import answer_parts
from proofserve.verifier.judges import Vectors
from proofserve.verifier.noise import (
    MeasuredRun,
    MeasuringPlan,
    honest_figures,
    honest_threshold,
    left_out_lines,
)

if TYPE_CHECKING:
    from proofserve.verifier.chat.validator import ChatValidator

RATE = 0.01
# Blocks that every emulated kernel computes, and those of each server on which suspects are
# measured. They are those of whole conversations, whose blocks are alike.
EMULATED_BLOCKS, BANK_BLOCKS = 256, 128
# The limit of a greedy gap: above the largest seen, and taken to be passed by as many tokens as
# none in n tokens still leaves likely.
GAP_ROOM, LEAST_GAP, PASSED = 1.5, 0.01, 5.0
LEAST_GREEDY_TOKENS = 500


@dataclass(frozen=True, slots=True)
class CalibratedServers:
    """The model's ``name``, the ``shape`` of its checkpoint, and the ``kv_dtype`` of its servers.

    ``servers`` says on what each ran, by the sketch key of its start.
    """

    name: str
    shape: Mapping[str, int] | None
    kv_dtype: str
    servers: Mapping[str, KernelFacts]


def chat_calibration(
    about: CalibratedServers, blocks: Blocks, validator: "ChatValidator", progress: Progress
) -> CalibrationFile:
    """The calibration by answers of honest servers; all of them have to be in ``blocks``.

    Every server is a population, and so is every emulated kernel, which reads the answers that come
    first in it. It lacks the check of ``left_out``. Raises LabError for too few blocks, and
    EngineFault if a forward fails.
    """
    progress.step(f"recomputing {len(blocks.answers)} answers")
    numbers, groups = _in_turn(blocks)
    truth = validator.truth(numbers)
    runs = _servers(about, blocks, truth)
    plan = MeasuringPlan(numbers, EMULATED_BLOCKS, BANK_BLOCKS * len(runs), has_twins=False)
    found = honest_figures(validator, runs, plan, progress)
    read = [blocks.answers[place] for place in blocks.answers_of(numbers[:EMULATED_BLOCKS])]
    limit = greedy_limit(blocks.answers, read, validator, progress)
    return CalibrationFile(
        format=FORMAT,
        version=VERSION,
        model=about.name,
        shape=dict(about.shape) if about.shape else None,
        weights_digest=validator.weights_digest,
        served_dtype=validator.served_dtype,
        kv_dtype=about.kv_dtype,
        scheme=SCHEME,
        stronger_rng=False,
        seq_len=BLOCK_TOKENS,
        k_dim=blocks.k_dim,
        # Chats are of no block of a chain, and a sketch is under the server's own key.
        block_hash="",
        public_key="",
        own=found.own,
        populations=found.populations,
        suspects=found.suspects,
        dist_threshold=honest_threshold(found.populations, RATE),
        p_mismatch=RATE,
        left_out=None,
        groups=list(groups),
        greedy=limit,
    )


def _in_turn(blocks: Blocks) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """All blocks and their conversations: one conversation of each server after the other.

    So the first blocks are of all servers, and of whole conversations.
    """
    conversations = blocks.conversations()
    of_servers = [dict.fromkeys(conversations[block] for block in of) for of in blocks.by_server()]
    turns = chain.from_iterable(zip_longest(*of_servers))
    order = {conversation: place for place, conversation in enumerate(turns)}
    numbers = sorted(conversations, key=lambda block: order[conversations[block]])
    return tuple(numbers), tuple(conversations[block] for block in numbers)


def _servers(about: CalibratedServers, blocks: Blocks, truth: Vectors) -> list[MeasuredRun]:
    """The errors of each server. Two that say the same of themselves get numbers."""
    vectors = vectors_of(blocks.claims().claims, blocks.width)
    runs: list[MeasuredRun] = []
    named: Counter[str] = Counter()
    for of in blocks.by_server():
        facts = about.servers[blocks.answers[blocks.conversations()[of[0]]].scheme.key]
        named[facts.name] += 1
        if (count := named[facts.name]) > 1:
            facts = facts.model_copy(update={"name": f"{facts.name} ({count})"})
        sent = {n: vectors[n] - to_float16(truth[n]).astype(np.float32) for n in of}
        runs.append(MeasuredRun(facts, sent))
    return runs


def greedy_limit(
    answers: Sequence[Answer], read: Sequence[Answer], reader: "ChatValidator", progress: Progress
) -> GreedyLimit | None:
    """By the greedy answers of honest servers, and what emulated kernels would choose in ``read``.

    None if the servers' answers have too few tokens.
    """
    greedy = [a for a in answers if a.sampling.temperature == 0.0 and not a.sampling.restricted]
    parts = (part for answer in greedy for part in answer_parts(answer, reader, ()))
    chosen = np.array([gap for part in parts for gap in greedy_gap(part.logits, part.tokens)])
    if len(chosen) < LEAST_GREEDY_TOKENS:
        return None
    progress.step(f"greedy tokens of {len(reader.kernels)} emulated kernels", len(read))
    largest, tokens = float(chosen.max()), 0
    for answer in read:
        for part in answer_parts(answer, reader, reader.kernels):
            tokens += len(part.logits)
            for logits in part.of_kernels:
                gaps = greedy_gap(part.logits, logits.argmax(axis=1))
                largest = max(largest, float(gaps.max()))
        progress.advance()
    least = min(len(chosen), tokens) if reader.kernels else len(chosen)
    return GreedyLimit(gap=max(GAP_ROOM * largest, LEAST_GAP), rate=PASSED / least)


def calibration_lines(made: CalibrationFile, chats: int) -> Iterator[str]:
    """What was measured, for a reader."""
    yield f"{chats} chats, {len(made.own.lengths)} blocks of {made.seq_len} tokens"
    honest = made.null(1.0)
    for member, fields in zip(honest.members, made.populations, strict=True):
        kind = "emulated" if fields.facts.emulated else "measured"
        lean, most = max(
            ((lean.mean, name) for name, lean in member.leans.items()), default=(0, "")
        )
        leans = f", leans {lean:+.3f} to {most}" if most else ""
        yield f"{member.name} ({kind}): errors {np.median(member.ratios):.2f} times ours{leans}"
    if made.greedy is None:
        yield f"greedy answers: fewer than {LEAST_GREEDY_TOKENS} tokens, so they are not tested"
    else:
        yield f"greedy answers: {made.greedy.gap:.3f} below the largest logit at most"
    yield from left_out_lines(made.left_out)
