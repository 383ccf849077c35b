"""Answers of an endpoint in token ids, and what the published network and suspects make of them."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final, TypeVar

import numpy as np
from numpy.typing import NDArray

from proofserve.protocol.receipts.record import Sampling
from proofserve.protocol.receipts.sampled import log_probabilities
from proofserve.protocol.verdict.chosen_tokens import (
    greedy_gap,
    kernel_log_means,
    moved_apart,
    token_log_factors,
)
from proofserve.verifier.judges import OWN, PUBLISHED, BankRun
from proofserve.verifier.probe.endpoint import Alternatives, LeftOut, ProbePrompt, RawAnswer

if TYPE_CHECKING:
    from proofserve.verifier.validator import CheckpointTokenizer, CheckpointValidator

T = TypeVar("T")
Floats = NDArray[np.float64]
Vector = NDArray[np.float32]

# As the requests ask for; nothing but the temperature changes the logits.
_SAMPLED = Sampling(temperature=1.0)
# Fewer log-probabilities of one token have no differences.
_LEAST = 2
# The likeliest tokens of a place, whose probabilities are kept.
_LIKELY = 64
# A probability that is none, where its logarithm is needed.
_NOTHING = 1e-12
# How vLLM writes a token if it is asked for ids.
_ID_PREFIX: Final = "token_id:"
# Servers write minus infinity as a large negative number, because JSON has none.
_LEAST_LOG: Final = -1000.0
FROM_SERVER, FROM_LOGS, FROM_TEXT = "token ids", "log-probabilities", "the text"


@dataclass(frozen=True, slots=True)
class TopLogs:
    """Log-probabilities float64 [k] of the token ids int64 [k], for one place of an answer."""

    ids: NDArray[np.int64]
    logs: NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class ProbeAnswer:
    """An answer whose token ids are known; ``ids_from`` says by what.

    There is an id of the prompt, and of the answer, at least. ``tops`` has one entry for each token
    of the answer, none without log-probabilities.
    """

    prompt: ProbePrompt
    text: str
    prompt_ids: tuple[int, ...]
    output_ids: tuple[int, ...]
    ids_from: str
    tops: tuple[TopLogs, ...] = ()

    @property
    def read(self) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """What a model reads."""
        return self.prompt_ids, self.output_ids


def resolved(raw: RawAnswer, tokens: "CheckpointTokenizer") -> ProbeAnswer | LeftOut:
    """The answer in token ids, or why they are not sure."""
    prompt = raw.prompt
    prompt_ids = tokens.prompt_ids(prompt.request)
    if fault := _other_prompt(raw, prompt_ids):
        return LeftOut(prompt, fault)
    if not raw.text and not raw.output_ids and not raw.alternatives:
        return LeftOut(prompt, "the answer is empty")
    found = _output_ids(raw, tokens)
    if found is None:
        return LeftOut(prompt, "the token ids of the answer cannot be told from its text", True)
    output, ids_from = found
    if not output or not all(0 <= each < tokens.size for each in output):
        return LeftOut(prompt, "the answer has no tokens, or such as the checkpoint has not")
    if raw.alternatives and len(output) == len(raw.alternatives) + 1 and raw.ended:
        output = output[:-1]
    if raw.alternatives and not _same_tokens(output, raw.alternatives, tokens):
        return LeftOut(prompt, "the log-probabilities are of other tokens than the answer")
    pairs = zip(raw.alternatives, output, strict=True) if raw.alternatives else ()
    tops = tuple(_top_logs(each, token, tokens) for each, token in pairs)
    return ProbeAnswer(prompt, raw.text, prompt_ids, output, ids_from, tops)


def _other_prompt(raw: RawAnswer, ids: tuple[int, ...]) -> str:
    """How the endpoint's prompt differs from ours; empty if it does not say so."""
    theirs = raw.prompt_tokens if raw.prompt_ids is None else len(raw.prompt_ids)
    if (raw.prompt_ids or ids) == ids and theirs in {None, len(ids)}:
        return ""
    return (
        f"the endpoint read a prompt of {theirs} tokens, the checkpoint's tokenizer and chat"
        f" template make {len(ids)}: it has another tokenizer or template"
    )


def _output_ids(
    raw: RawAnswer, tokens: "CheckpointTokenizer"
) -> tuple[tuple[int, ...], str] | None:
    if raw.output_ids:
        return raw.output_ids, FROM_SERVER
    if raw.alternatives:
        named = [_id_of(each.token, tokens) for each in raw.alternatives]
        ids = tuple(each for each in named if each is not None)
        if len(ids) == len(named):
            return ids, FROM_LOGS
    # The tokenizer's own ids of the text, if the endpoint counted as many.
    ids, counted = tokens.answer_ids(raw.text), raw.completion_tokens
    same = counted == len(ids) or (raw.ended and counted == len(ids) + 1)
    return (ids, FROM_TEXT) if same and tokens.text(ids) == raw.text else None


def _same_tokens(
    output: Sequence[int], alternatives: Sequence[Alternatives], tokens: "CheckpointTokenizer"
) -> bool:
    if len(output) != len(alternatives):
        return False
    named = (_id_of(each.token, tokens) for each in alternatives)
    return all(name in {None, token} for name, token in zip(named, output, strict=True))


def _top_logs(each: Alternatives, chosen: int, tokens: "CheckpointTokenizer") -> TopLogs:
    """Those whose ids are known and whose probability is told."""
    logs: dict[int, float] = {}
    for name, log in each.logs:
        token = chosen if name == each.token else _id_of(name, tokens)
        if token is not None and _LEAST_LOG < log <= 0.0:
            logs[token] = log
    return TopLogs(np.array([*logs], np.int64), np.array([*logs.values()], np.float64))


def _id_of(name: str, tokens: "CheckpointTokenizer") -> int | None:
    """None for a text that several ids stand for, or none."""
    if name.startswith(_ID_PREFIX) and name.removeprefix(_ID_PREFIX).isdecimal():
        token = int(name.removeprefix(_ID_PREFIX))
        return token if token < tokens.size else None
    return tokens.pieces.get(name)


@dataclass(frozen=True, slots=True)
class ReadAnswer:
    """One answer beside the published network; numbers are one for each of its n tokens.

    ``errors`` are the endpoint's log-probabilities less ours, less their mean, and ``own`` the same
    of our own honest run; an empty vector where the endpoint told too little.
    ``exact`` are our logits at the same tokens. ``log_p`` is of the chosen tokens, ``surprise`` how
    much less likely they are than drawn ones on the average, in nats a token. ``gaps`` says how far
    their logits are below the largest, ``rounding`` by how much our own honest run moves the two
    largest logits apart. ``log_factors`` [tilts] is what a sampled answer gives to the token test.
    ``likely`` and ``likely_log_p`` [n, some] are the likeliest tokens.
    """

    answer: ProbeAnswer
    errors: tuple[Vector, ...]
    own: tuple[Vector, ...]
    exact: tuple[Floats, ...]
    log_p: Floats
    surprise: float
    gaps: Floats
    rounding: Floats
    log_factors: Floats
    likely: NDArray[np.int64]
    likely_log_p: Floats

    @property
    def is_greedy(self) -> bool:
        return self.answer.prompt.greedy

    @property
    def ratio(self) -> float | None:
        """The length of all errors over that of our own; None without log-probabilities."""
        known = [t for t, error in enumerate(self.errors) if error.size]
        if not known:
            return None
        error, own = (np.concatenate([of[t] for t in known]) for of in (self.errors, self.own))
        return float(np.linalg.norm(error) / np.linalg.norm(own))


@dataclass(frozen=True, slots=True)
class KernelReading:
    """One answer by an honest kernel; ``errors`` are as ``own`` of ReadAnswer.

    ``log_means`` [tilts] is what the token test gets on the average from tokens that this kernel
    draws. ``rounding`` is the most by which it moves the two largest logits of a token apart.
    """

    errors: tuple[Vector, ...]
    log_means: Floats
    rounding: float


@dataclass(frozen=True, slots=True)
class SuspectReading:
    """One answer by a suspect; ``predicted`` is as ``errors`` of ReadAnswer, the others too.

    ``divergence`` is that of its distributions from the published ones, in nats, over all tokens:
    what tokens that the published network draws give against the suspect on the average.
    """

    predicted: tuple[Vector, ...]
    log_p: Floats
    gaps: Floats
    divergence: float


class Readings:
    """Reads each answer once with each network; ``forwards`` are suspects'. Raises EngineFault."""

    def __init__(self, reader: "CheckpointValidator") -> None:
        self._reader = reader
        self._known: dict[tuple[str, int], SuspectReading] = {}
        self._by_kernels: dict[int, Mapping[str, KernelReading]] = {}
        self._means: dict[tuple[str, int], float] = {}
        self.names = tuple(reader.names)
        # Our own run reads each answer anyway, so it is what answers are judged beside.
        self.references = (str(OWN.kernels),)
        self.kernels = tuple(name for name in reader.kernels if name not in self.references)
        self.servers = tuple(reader.references[1:])

    @property
    def forwards(self) -> int:
        return len(self._known)

    def read(self, answers: Sequence[ProbeAnswer]) -> list[ReadAnswer]:
        texts = [each.read for each in answers]
        exact = self._reader.read(PUBLISHED, texts)
        served = self._reader.read(OWN, texts)
        return [_read(*three) for three in zip(answers, exact, served, strict=True)]

    def by_kernels(self, read: ReadAnswer) -> Mapping[str, KernelReading]:
        """The answer by every honest kernel that is emulated."""
        number = read.answer.prompt.number
        if number not in self._by_kernels:
            exact = self._logits(PUBLISHED, read)
            log_p = log_probabilities(exact, _SAMPLED)
            self._by_kernels[number] = {
                name: _by_kernel(read, exact, log_p, self._logits(BankRun(kernels=name), read))
                for name in self.kernels
            }
        return self._by_kernels[number]

    def by_suspect(self, name: str, answers: Sequence[ReadAnswer]) -> list[SuspectReading]:
        return self._once(self._known, name, answers, _suspected)

    def likelihood_means(self, name: str, answers: Sequence[ReadAnswer]) -> list[float]:
        """What honest kernels give to the likelihood test of each answer at most, 0 at least.

        The logarithm of the mean of the suspect's probability over the published one, if a kernel
        draws the tokens.
        """

        def mean(read: ReadAnswer, logits: Vector) -> float:
            """The log of the suspect's mean likelihood ratio, if a kernel draws the tokens."""
            suspected = log_probabilities(logits.astype(np.float64), _SAMPLED)
            ratios = suspected - log_probabilities(self._logits(PUBLISHED, read), _SAMPLED)
            found = [0.0]
            for kernel in self.kernels:
                drawn = log_probabilities(self._logits(BankRun(kernels=kernel), read), _SAMPLED)
                found.append(float(np.log(np.exp(drawn + ratios).sum(axis=1)).sum()))
            return max(found)

        return self._once(self._means, name, answers, mean)

    def _once(
        self,
        known: dict[tuple[str, int], T],
        name: str,
        answers: Sequence[ReadAnswer],
        make: Callable[[ReadAnswer, Vector], T],
    ) -> list[T]:
        """What ``make`` finds for each answer by the logits of a suspect, kept in ``known``."""
        missing = [a for a in answers if (name, a.answer.prompt.number) not in known]
        texts = [each.answer.read for each in missing]
        # Without anything to read the suspect's weights need not be made.
        made = self._reader.read(BankRun(name), texts) if texts else ()
        for each, logits in zip(missing, made, strict=True):
            known[name, each.answer.prompt.number] = make(each, logits)
        return [known[name, each.answer.prompt.number] for each in answers]

    def _logits(self, run: BankRun, read: ReadAnswer) -> Floats:
        (logits,) = self._reader.read(run, [read.answer.read])
        return logits.astype(np.float64)


def _by_kernel(read: ReadAnswer, exact: Floats, log_p: Floats, logits: Floats) -> KernelReading:
    moved = logits - exact
    errors = (_centred(moved[t, top.ids], top) for t, top in enumerate(read.answer.tops))
    means = kernel_log_means(log_p, log_probabilities(logits, _SAMPLED))
    return KernelReading(tuple(errors), means.sum(axis=0), float(moved_apart(exact, logits).max()))


def _read(answer: ProbeAnswer, logits: Vector, served: Vector) -> ReadAnswer:
    exact, rounded = logits.astype(np.float64), served.astype(np.float64)
    tokens = np.array(answer.output_ids)
    rows = np.arange(len(tokens))
    log_p = log_probabilities(exact, _SAMPLED)
    chosen = log_p[rows, tokens]
    entropy = -(np.exp(log_p) * log_p).sum(axis=1)
    likely = np.argsort(-exact, axis=1)[:, :_LIKELY]
    moved = rounded - exact
    tops = answer.tops
    return ReadAnswer(
        answer,
        tuple(_centred(top.logs - exact[t, top.ids], top) for t, top in enumerate(tops)),
        tuple(_centred(moved[t, top.ids], top) for t, top in enumerate(tops)),
        tuple(exact[t, top.ids] for t, top in enumerate(tops)),
        chosen,
        float(np.mean(-chosen - entropy)),
        greedy_gap(exact, tokens),
        moved_apart(exact, rounded),
        token_log_factors(log_p, tokens).sum(axis=0),
        likely,
        np.take_along_axis(log_p, likely, axis=1),
    )


def _suspected(read: ReadAnswer, logits: Vector) -> SuspectReading:
    found = logits.astype(np.float64)
    tokens = np.array(read.answer.output_ids)
    pairs = zip(read.answer.tops, read.exact, strict=True)
    predicted = (_centred(found[t, top.ids] - exact, top) for t, (top, exact) in enumerate(pairs))
    log_p = log_probabilities(found, _SAMPLED)
    return SuspectReading(
        tuple(predicted),
        log_p[np.arange(len(tokens)), tokens],
        greedy_gap(found, tokens),
        _divergence(read.likely_log_p, np.take_along_axis(log_p, read.likely, axis=1)),
    )


def _divergence(log_p: Floats, log_q: Floats) -> float:
    """Of q from p, by the likely tokens and all others taken together, which can only lower it."""

    def with_rest(logs: Floats) -> Floats:
        rest = np.maximum(1.0 - np.exp(logs).sum(axis=1, keepdims=True), _NOTHING)
        return np.concatenate([logs, np.log(rest)], axis=1)

    p, q = with_rest(log_p), with_rest(log_q)
    return float((np.exp(p) * (p - q)).sum())


def _centred(differences: Floats, top: TopLogs) -> Vector:
    """Without their mean: the normaliser, which all log-probabilities of a token share."""
    if len(top.ids) < _LEAST:
        return np.empty(0, np.float32)
    centred: Vector = (differences - differences.mean()).astype(np.float32)
    return centred
