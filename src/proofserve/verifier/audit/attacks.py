"""How a prover could make vectors with less work, and how far those are from the validator's."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Final

import numpy as np
from numpy.typing import NDArray

from proofserve.protocol.verdict.counting import rate_interval
from proofserve.protocol.verdict.directions import cosine
from proofserve.reports import Progress
from proofserve.rounds.computation import chunks
from proofserve.verifier.audit.deployment import AuditedProver, CheckpointDeployment
from proofserve.verifier.judges import Recompute, Vectors, as_sent
from proofserve.verifier.noise import LEAST_LENGTH
from proofserve.verifier.populations import RunFigures

# Tokens; a quarter and a half of the sequence are added.
CONTEXTS: Final = (1, 4, 16)
# A prover that skips a quarter of the layers skips every fourth, beginning with the second.
STRIDE: Final = 4
# The weights whose error a prover hides behind noise, and the length of the noise in honest ones.
HIDDEN: Final = "int8 per channel"
NOISES: Final = (1.0, 2.0)
# The largest distance of two vectors of length 1; in figures a missing vector is as far.
FARTHEST = 2.0
# A forgery for the remaining nonces has to save at least this share.
FORGERY_SAVES = 0.90
# Shares of the nonces that a cautious prover forges; it computes the others honestly.
FORGED_SHARES = (0.10, 0.05, 0.02, 0.01, 0.005)
# Nonces of one step of progress.
AT_ONCE = 16

Floats = NDArray[np.float64]
Errors = NDArray[np.float32]


def attacks(deployment: CheckpointDeployment, honest_distance: float) -> Iterator[AuditedProver]:
    """Every attack that makes all its vectors in one way; the nearest to honest vectors first."""
    for prover in deployment.weights():
        yield prover
        if prover.name == HIDDEN:
            yield from (_noisy(prover, times, times * honest_distance) for times in NOISES)
    yield from _left_out(deployment)
    yield from _of_others(deployment)
    if deployment.price.every_position:
        saving = deployment.price.first_projections
        name = "first layer's projections kept per token"
        yield AuditedProver(name, saving, lambda: deployment.deployed, exact=True)


def _noisy(prover: AuditedProver, times: float, length: float) -> AuditedProver:
    """``prover`` with a random vector of ``length`` added to each of its own."""

    def prepare() -> Recompute:
        plain = prover.prepare()

        def answer(nonces: Sequence[int]) -> Vectors:
            return {
                n: vector + length * _random_unit(n, len(vector))
                for n, vector in plain(nonces).items()
            }

        return answer

    return replace(
        prover, name=f"{prover.name}, noise of {times:g} honest distances", prepare=prepare
    )


def _left_out(deployment: CheckpointDeployment) -> Iterator[AuditedProver]:
    """Layers, and then most of the context."""
    price = deployment.price
    layers = price.layers

    def attack(name: str, left_out: Sequence[int]) -> AuditedProver:
        saving = price.without_layers(len(left_out))
        return AuditedProver(name, saving, partial(deployment.without_layers, left_out))

    yield attack("first layer skipped", [0])
    yield attack("middle layer skipped", [layers // 2])
    yield attack("last layer skipped", [layers - 1])
    if layers >= STRIDE:
        yield attack("every fourth layer skipped", range(1, layers, STRIDE))
    yield attack("model skipped", range(layers))
    # Later tokens do not change the states of the first, where those are read too.
    which = "first" if price.every_position else "last"
    for count in sorted({*CONTEXTS, price.seq_len // 4, price.seq_len // 2}):
        if 0 < count < price.seq_len:
            tokens = f"{which} token" if count == 1 else f"{which} {count} tokens"
            some = partial(deployment.some_tokens, count)
            yield AuditedProver(f"{tokens} only", price.tokens(count), some)


def _of_others(deployment: CheckpointDeployment) -> Iterator[AuditedProver]:
    """Vectors of other work, and of none."""
    width = deployment.width

    def of_next_nonce(nonces: Sequence[int]) -> Vectors:
        computed = deployment.deployed([nonce + 1 for nonce in nonces])
        return {nonce: computed[nonce + 1] for nonce in nonces if nonce + 1 in computed}

    def always(vector: NDArray[np.float32]) -> Callable[[], Recompute]:
        return lambda: lambda nonces: dict.fromkeys(nonces, vector)

    def random(nonces: Sequence[int]) -> Vectors:
        return {nonce: _random_unit(nonce, width) for nonce in nonces}

    yield deployment.other_checkpoint()
    # These vectors exist already, so they cost nothing.
    yield AuditedProver("another nonce's vectors", 1.0, lambda: of_next_nonce)
    yield AuditedProver("another key's vectors", 1.0, deployment.other_key)
    yield AuditedProver("another block's vectors", 1.0, deployment.other_block)
    yield AuditedProver("random unit vectors", 1.0, lambda: random)
    yield AuditedProver("one vector for all", 1.0, always(_unit(np.ones(width))))
    yield AuditedProver("zero vectors", 1.0, always(np.zeros(width, np.float32)))


def _random_unit(nonce: int, width: int) -> NDArray[np.float32]:
    return _unit(np.random.default_rng(nonce).normal(size=width))


def _unit(vector: NDArray[np.float64]) -> NDArray[np.float32]:
    return (vector / np.linalg.norm(vector)).astype(np.float32)


@dataclass(frozen=True, slots=True)
class ProverMeasurement:
    """The vectors of a prover, measured.

    ``errors`` float32 [nonces, width] are its vectors less the validator's, NaN where there is
    none. ``rate`` is the share of mismatches by the count, ``interval`` its 95 % interval. A
    mixture has the errors of two provers, and ``chances`` [nonces] says how often each is met.
    """

    name: str
    saving: float
    errors: Errors
    rate: float
    interval: tuple[float, float]
    exact: bool = False
    chances: Floats | None = None

    @property
    def distances(self) -> Floats:
        """float64 [nonces], infinite where there is no vector."""
        lengths = np.linalg.norm(self.errors, axis=1).astype(np.float64)
        return np.where(np.isnan(lengths), np.inf, lengths)

    @property
    def mean(self) -> float:
        return float(np.average(self._shown, weights=self.chances))

    @property
    def sd(self) -> float:
        spread = np.average((self._shown - self.mean) ** 2, weights=self.chances)
        return float(np.sqrt(spread))

    @property
    def _shown(self) -> Floats:
        return self.distances.clip(max=FARTHEST)


def measured(prover: AuditedProver, errors: Errors, dist_threshold: float) -> ProverMeasurement:
    # The comparison of a validator (protocol B.4) is in float32. A missing vector is too far.
    within = np.linalg.norm(errors, axis=1) <= np.float32(dist_threshold)
    beyond = int((~within).sum())
    return ProverMeasurement(
        name=prover.name,
        saving=prover.saving,
        errors=errors,
        rate=beyond / len(errors),
        interval=rate_interval(beyond, len(errors)),
        exact=prover.exact,
    )


def mixtures(
    honest: ProverMeasurement, forged: Sequence[ProverMeasurement]
) -> list[ProverMeasurement]:
    """Provers that forge a part of their nonces by the attack that mismatches least.

    A validator draws its sample at random, so each nonce in it is forged with the same chance.
    """
    cheap = [each for each in forged if each.saving >= FORGERY_SAVES]
    if not cheap:
        return []
    best = min(cheap, key=lambda each: (each.interval[0], each.mean))
    counts, both = (len(honest.errors), len(best.errors)), (honest, best)
    made = []
    for share in FORGED_SHARES:
        rate, low, high = (
            (1.0 - share) * of_honest + share * of_forged
            for of_honest, of_forged in zip(*((e.rate, *e.interval) for e in both), strict=True)
        )
        mixture = ProverMeasurement(
            name=f"honest on {1.0 - share:.1%}, else {best.name}".replace(".0%", "%"),
            saving=share * best.saving,
            errors=np.concatenate([honest.errors, best.errors]),
            rate=rate,
            interval=(low, high),
            chances=np.repeat([(1.0 - share) / counts[0], share / counts[1]], counts),
        )
        made.append(mixture)
    return made


def vectors_by(prover: AuditedProver, nonces: Sequence[int], progress: Progress) -> Vectors:
    progress.step(f"{prover.name}: {len(nonces)} nonces", len(nonces))
    answer = prover.prepare()
    found: dict[int, NDArray[np.float32]] = {}
    for chunk in chunks(nonces, AT_ONCE):
        found |= answer(chunk)
        for _ in chunk:
            progress.advance()
    return found


def errors_of(made: Vectors, truth: Vectors) -> Errors:
    """As a validator sees them, rounded to the wire's float16 (B.4); NaN without a vector."""
    missing = {n: np.full_like(ours, np.nan) for n, ours in truth.items() if n not in made}
    every = {**made, **missing}
    return np.array([as_sent(every[nonce]) - as_sent(ours) for nonce, ours in truth.items()])


@dataclass(frozen=True, slots=True)
class Reference:
    """Our own run of a kernel, by its name: its errors float32 [m, width] in two orders."""

    name: str
    errors: Errors
    in_another_order: Errors

    @property
    def twins(self) -> list[float]:
        """Cosines [m] of the two."""
        pairs = zip(self.errors, self.in_another_order, strict=True)
        return [cosine(one, other) for one, other in pairs]


def figures_of(
    errors: Errors, reference: Reference, predictions: Mapping[str, Errors]
) -> RunFigures:
    """The figures of ``errors`` [n, width], NaN rows of nonces without a vector included.

    ``predictions`` [m, width] are by suspect; where n is a multiple of m, those nonces come again
    and again.
    """
    rows = np.arange(len(errors)) % len(reference.errors)
    broken = np.isnan(errors).any(axis=1)
    lengths = np.linalg.norm(errors, axis=1).astype(np.float64)

    def cosines(of: Errors) -> Floats:
        found = [cosine(e, o) for e, o in zip(errors, of[rows], strict=True)]
        return np.where(broken, np.nan, np.array(found, dtype=np.float64))

    return RunFigures(
        lengths=np.where(broken, np.inf, np.maximum(lengths, LEAST_LENGTH)),
        footprints={
            reference.name: (cosines(reference.errors) + cosines(reference.in_another_order)) / 2
        },
        cosines={suspect: cosines(predicted) for suspect, predicted in predictions.items()},
        rows=rows,
    )
