"""What the published network, honest kernels and suspected writers make of an answer's tokens."""

import hashlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Final, TypeVar

import numpy as np
from numpy.typing import NDArray

from proofserve.protocol.receipts.record import Sampling
from proofserve.protocol.receipts.sampled import log_probabilities, penalised, shortfall
from proofserve.protocol.verdict.chosen_tokens import (
    greedy_gap,
    greedy_log_bets,
    kernel_log_means,
    moved_apart,
    token_log_factors,
)
from proofserve.verifier.judges import OWN, PUBLISHED, BankRun

if TYPE_CHECKING:
    from torch import Tensor

    from proofserve.verifier.validator import CheckpointValidator

T = TypeVar("T")
Floats = NDArray[np.float64]
Vector = NDArray[np.float32]

# Of an answer without a temperature, whose tokens are not drawn.
_PLAIN: Final = Sampling()
# Fewer log-probabilities of one token have no differences.
_LEAST = 2
# The likeliest tokens of a place, whose probabilities are kept.
_LIKELY = 64
# A probability that is none, where its logarithm is needed, and a logarithm of none.
_NOTHING, _LEAST_LOG = 1e-12, -1000.0
# Answers that an honest kernel reads side by side, so that it reads each layer once for all.
_TOGETHER = 4
# Bytes of states that are kept: of 128 tokens by a model 8,192 wide, a run has 4 MB, and some 20
# kernels read so many together.
_STATES = 2**29


@dataclass(frozen=True, slots=True)
class TopLogs:
    """Log-probabilities float64 [k] of the token ids int64 [k], for one place of an answer."""

    ids: NDArray[np.int64]
    logs: NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class WrittenAnswer:
    """An answer whose tokens are known, drawn as ``sampling`` says; a temperature of 0 is greedy.

    Tokens of ``output_ids`` from ``first`` on are read, to the last one. ``tops`` has one entry for
    each of them, none without log-probabilities.
    """

    prompt_ids: tuple[int, ...]
    output_ids: tuple[int, ...]
    sampling: Sampling
    first: int = 0
    tops: tuple[TopLogs, ...] = ()

    @property
    def number(self) -> int:
        """Of its tokens: the same chat again is the same answer."""
        ids = np.array([*self.prompt_ids, -1, *self.output_ids], "<i8").tobytes()
        return int.from_bytes(hashlib.sha256(ids).digest()[:8], "big")

    @property
    def read(self) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """The ids before the tokens that are read, and these."""
        return (*self.prompt_ids, *self.output_ids[: self.first]), self.output_ids[self.first :]


@dataclass(frozen=True, slots=True)
class ReadAnswer:
    """One answer beside the published network; numbers are one for each of its n tokens.

    ``errors`` are the endpoint's log-probabilities less ours, less their mean, and ``own`` the same
    of our own honest run; an empty vector where the endpoint told too little.
    ``exact`` are our logits at the same tokens. ``log_p`` is of the chosen tokens, ``surprise`` how
    much less likely they are than drawn ones on the average, in nats a token. ``gaps`` says how far
    their logits are below the largest, ``rounding`` by how much our own honest run moves the two
    largest logits apart, and ``noise`` is its root mean square. ``excluded`` says how far a token
    that the sampling excludes is below the least one kept, at most. ``log_factors`` [tilts] is what
    a sampled answer gives to the token test.
    ``likely`` and ``likely_log_p`` [n, some] are the likeliest tokens.
    """

    answer: WrittenAnswer
    log_p: Floats
    gaps: Floats
    rounding: Floats
    noise: float
    excluded: float
    log_factors: Floats
    surprise: float = 0.0
    errors: tuple[Vector, ...] = ()
    own: tuple[Vector, ...] = ()
    exact: tuple[Floats, ...] = ()
    likely: NDArray[np.int64] = field(default_factory=lambda: np.empty((0, 0), np.int64))
    likely_log_p: Floats = field(default_factory=lambda: np.empty((0, 0)))

    @property
    def is_greedy(self) -> bool:
        return self.answer.sampling.temperature == 0.0

    @property
    def ratio(self) -> float | None:
        """The length of all errors over that of our own; None without log-probabilities."""
        known = [t for t, error in enumerate(self.errors) if error.size]
        if not known:
            return None
        error, own = (np.concatenate([of[t] for t in known]) for of in (self.errors, self.own))
        return float(np.linalg.norm(error) / np.linalg.norm(own))


def without_likely(read: ReadAnswer) -> ReadAnswer:
    """Without what only readings with suspects need, a thousand values a token."""
    return replace(read, likely=np.empty((0, 0), np.int64), likely_log_p=np.empty((0, 0)))


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
    """One answer by a suspect; ``predicted`` is as ``errors`` of ReadAnswer, ``gaps`` too.

    ``log_ratio`` is the logarithm of its probability of all tokens over the published one, and
    ``against`` the same of the published one over its; of a greedy answer both are sums of
    ``verdict.chosen_tokens.greedy_log_bets``.
    ``divergence`` is that of its distributions from the published ones, in nats, over all tokens:
    what tokens that the published network draws give against the suspect on the average.
    """

    log_ratio: float
    against: float
    divergence: float
    gaps: Floats
    predicted: tuple[Vector, ...] = ()


class _KeptStates:
    """The states that chose the tokens of answers: no run reads an answer twice.

    Those that were not asked for longest go where all take more than ``_STATES``.
    """

    def __init__(self, reader: "CheckpointValidator") -> None:
        self._reader = reader
        self._kept: dict[tuple[BankRun, int], Tensor] = {}

    def of(self, run: BankRun, answers: Sequence[WrittenAnswer]) -> "list[Tensor]":
        keys = [(run, answer.number) for answer in answers]
        found = {key: self._kept.pop(key) for key in keys if key in self._kept}
        missing = {key: a.read for key, a in zip(keys, answers, strict=True) if key not in found}
        if missing:
            made = self._reader.states(run, [*missing.values()])
            found |= zip(missing, made, strict=True)
        self._kept |= found
        left = sum(each.nbytes for each in self._kept.values()) - _STATES
        for key in [*self._kept]:
            if left <= 0:
                break
            left -= self._kept.pop(key).nbytes
        return [found[key] for key in keys]


class Readings:
    """Reads each answer once with each network; ``forwards`` are suspects'. Raises EngineFault.

    Suspects are those of ``names``, all of the reader's if None; ``known`` are of earlier ones, by
    suspect and answer.
    """

    def __init__(self, reader: "CheckpointValidator", names: Sequence[str] | None = None) -> None:
        self._reader = reader
        self._states = _KeptStates(reader)
        self.known: dict[tuple[str, int], SuspectReading] = {}
        self._by_kernels: dict[int, Mapping[str, KernelReading]] = {}
        self._means: dict[tuple[str, int], float] = {}
        self.names = tuple(reader.names if names is None else names)
        # Our own run reads each answer anyway, so it is what answers are judged beside.
        self.references = (str(OWN.kernels),)
        self.kernels = tuple(name for name in reader.kernels if name not in self.references)
        self.servers = tuple(reader.references[1:])
        self.hides_lies = reader.hides_lies
        self.round_activations = reader.round_activations

    @property
    def forwards(self) -> int:
        return len(self.known)

    def read(self, answers: Sequence[WrittenAnswer]) -> list[ReadAnswer]:
        exact, served = self._logits(PUBLISHED, answers), self._logits(OWN, answers)
        return [_read(*three) for three in zip(answers, exact, served, strict=True)]

    def by_kernels(self, reads: Sequence[ReadAnswer]) -> list[Mapping[str, KernelReading]]:
        """Each answer by every honest kernel that is emulated."""
        for group in _groups([r for r in reads if r.answer.number not in self._by_kernels]):
            self._have_kernels_read(group)
            for read in group:
                (exact,) = self._logits(PUBLISHED, [read.answer])
                log_p = _log_p(read.answer, exact)
                self._by_kernels[read.answer.number] = {
                    name: _by_kernel(read, exact, log_p, logits)
                    for name, logits in self._of_kernels(read.answer)
                }
        return [self._by_kernels[read.answer.number] for read in reads]

    def by_suspect(self, name: str, answers: Sequence[ReadAnswer]) -> list[SuspectReading]:
        def suspected(read: ReadAnswer, logits: Floats) -> SuspectReading:
            exact = None
            if read.is_greedy or _excludes(read.answer.sampling):
                (exact,) = self._logits(PUBLISHED, [read.answer])
            return _suspected(read, logits, exact)

        return self._once(self.known, name, answers, suspected)

    def likelihood_means(self, name: str, answers: Sequence[ReadAnswer]) -> list[float]:
        """What honest kernels give to the likelihood test of each answer at most, 0 at least.

        The logarithm of the mean of the suspect's probability over the published one, if a kernel
        draws the tokens.
        """

        def mean(read: ReadAnswer, logits: Floats) -> float:
            answer = read.answer
            (exact,) = self._logits(PUBLISHED, [answer])
            if read.is_greedy:
                bets = greedy_log_bets(exact, logits, read.noise)
                given = [0.0]
                for _, of_kernel in self._of_kernels(answer):
                    chosen = of_kernel.argmax(axis=1)
                    given.append(float(bets[np.arange(len(chosen)), chosen].sum()))
                return max(given)
            log_p = _log_p(answer, exact)
            kept = np.isfinite(log_p)
            suspected = _over(logits / _drawn(answer).temperature, kept)
            ratios = np.subtract(suspected, log_p, out=np.zeros_like(log_p), where=kept)
            found = [0.0]
            for _, of_kernel in self._of_kernels(answer):
                drawn = _log_p(answer, of_kernel)
                found.append(float(np.log(np.exp(drawn + ratios).sum(axis=1)).sum()))
            return max(found)

        means = list[float]()
        for group in _groups(answers):
            if any((name, each.answer.number) not in self._means for each in group):
                self._have_kernels_read(group)
            means += self._once(self._means, name, group, mean)
        return means

    def _once(
        self,
        known: dict[tuple[str, int], T],
        name: str,
        answers: Sequence[ReadAnswer],
        make: Callable[[ReadAnswer, Floats], T],
    ) -> list[T]:
        """What ``make`` finds for each answer by the logits of a suspect, kept in ``known``."""
        # Without anything to read the suspect's weights need not be made.
        if missing := [a for a in answers if (name, a.answer.number) not in known]:
            texts = [each.answer for each in missing]
            # A watch that goes on has not read these: a suspect uses the experts that they chose.
            self._states.of(PUBLISHED, texts)
            made = self._logits(BankRun(name), texts)
            for each, logits in zip(missing, made, strict=True):
                known[name, each.answer.number] = make(each, logits)
        return [known[name, each.answer.number] for each in answers]

    def _have_kernels_read(self, reads: Sequence[ReadAnswer]) -> None:
        for run in (PUBLISHED, *(BankRun(kernels=name) for name in self.kernels)):
            self._states.of(run, [read.answer for read in reads])

    def _of_kernels(self, answer: WrittenAnswer) -> Iterator[tuple[str, Floats]]:
        """The logits of each kernel."""
        for name in self.kernels:
            (logits,) = self._logits(BankRun(kernels=name), [answer])
            yield name, logits

    def _logits(self, run: BankRun, answers: Sequence[WrittenAnswer]) -> Iterator[Floats]:
        for answer, states in zip(answers, self._states.of(run, answers), strict=True):
            yield _penalised(answer, self._reader.logits(run, states))


def _groups(reads: Sequence[ReadAnswer]) -> list[Sequence[ReadAnswer]]:
    return [reads[start : start + _TOGETHER] for start in range(0, len(reads), _TOGETHER)]


def _drawn(answer: WrittenAnswer) -> Sampling:
    return answer.sampling if answer.sampling.temperature > 0.0 else _PLAIN


def _excludes(sampling: Sampling) -> bool:
    return sampling.temperature > 0.0 and (
        sampling.top_p < 1.0 or sampling.top_k > 0 or sampling.min_p > 0.0
    )


def _penalised(answer: WrittenAnswer, logits: Vector) -> Floats:
    sampling = answer.sampling
    costs = (sampling.presence_penalty, sampling.frequency_penalty)
    if any(costs) or sampling.repetition_penalty != 1.0:
        ids = (answer.prompt_ids, answer.output_ids, answer.first)
        return penalised(logits.astype(np.float64), sampling, *ids)
    return logits.astype(np.float64)


def _log_p(answer: WrittenAnswer, logits: Floats) -> Floats:
    return log_probabilities(logits, _drawn(answer))


def _over(scaled: Floats, kept: NDArray[np.bool_] | None) -> Floats:
    """Logarithms of the distribution over the tokens that are ``kept``, of scaled logits."""
    inside = scaled if kept is None else np.where(kept, scaled, -np.inf)
    return log_probabilities(inside, _PLAIN)


def _by_kernel(read: ReadAnswer, exact: Floats, log_p: Floats, logits: Floats) -> KernelReading:
    moved = logits - exact
    errors = (_centred(moved[t, top.ids], top) for t, top in enumerate(read.answer.tops))
    means = kernel_log_means(log_p, _log_p(read.answer, logits))
    return KernelReading(tuple(errors), means.sum(axis=0), float(moved_apart(exact, logits).max()))


def _read(answer: WrittenAnswer, exact: Floats, served: Floats) -> ReadAnswer:
    tokens = np.array(answer.read[1])
    log_p = _log_p(answer, exact)
    chosen = log_p[np.arange(len(tokens)), tokens]
    entropy = -(np.exp(log_p) * np.maximum(log_p, _LEAST_LOG)).sum(axis=1)
    likely = np.argsort(-exact, axis=1)[:, :_LIKELY]
    moved = served - exact
    tops, apart = answer.tops, moved_apart(exact, served)
    return ReadAnswer(
        answer,
        chosen,
        greedy_gap(exact, tokens),
        apart,
        float(np.sqrt(np.square(apart).mean())),
        float(shortfall(exact, log_p, tokens).max()),
        token_log_factors(log_p, tokens).sum(axis=0),
        float(np.mean(-chosen - entropy)),
        tuple(_centred(top.logs - exact[t, top.ids], top) for t, top in enumerate(tops)),
        tuple(_centred(moved[t, top.ids], top) for t, top in enumerate(tops)),
        tuple(exact[t, top.ids] for t, top in enumerate(tops)),
        likely,
        np.take_along_axis(log_p, likely, axis=1),
    )


def _suspected(read: ReadAnswer, found: Floats, exact: Floats | None) -> SuspectReading:
    """A token that the sampling excludes says nothing; the others are drawn from those it keeps.

    ``exact`` are the published logits, needed where it excludes any, and of greedy answers.
    """
    tokens = np.array(read.answer.read[1])
    kept = None if exact is None else np.isfinite(_log_p(read.answer, exact))
    pairs = zip(read.answer.tops, read.exact, strict=True)
    predicted = (_centred(found[t, top.ids] - exact, top) for t, (top, exact) in enumerate(pairs))
    log_q = _over(found / _drawn(read.answer).temperature, kept)
    can = np.flatnonzero(np.isfinite(read.log_p))
    log_ratio = float((log_q[can, tokens[can]] - read.log_p[can]).sum())
    against = -log_ratio
    if read.is_greedy and exact is not None:
        rows = np.arange(len(tokens))
        log_ratio = float(greedy_log_bets(exact, found, read.noise)[rows, tokens].sum())
        against = float(greedy_log_bets(found, exact, read.noise)[rows, tokens].sum())
    return SuspectReading(
        log_ratio,
        against,
        _divergence(read.likely_log_p, np.take_along_axis(log_q, read.likely, axis=1)),
        greedy_gap(found, tokens),
        tuple(predicted),
    )


def _divergence(log_p: Floats, log_q: Floats) -> float:
    """Of q from p, by the likely tokens and all others taken together, which can only lower it."""

    def with_rest(logs: Floats) -> Floats:
        rest = np.maximum(1.0 - np.exp(logs).sum(axis=1, keepdims=True), _NOTHING)
        whole: Floats = np.concatenate([logs, np.log(rest)], axis=1)
        return whole.clip(_LEAST_LOG)

    p, q = with_rest(log_p), with_rest(log_q)
    return float((np.exp(p) * (p - q)).sum())


def _centred(differences: Floats, top: TopLogs) -> Vector:
    """Without their mean: the normaliser, which all log-probabilities of a token share."""
    if len(top.ids) < _LEAST:
        return np.empty(0, np.float32)
    centred: Vector = (differences - differences.mean()).astype(np.float32)
    return centred
