"""How a prover could make vectors with less work, and how far those are from the validator's."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import product
from typing import Final

import numpy as np
from numpy.typing import NDArray

from proofserve.protocol.verdict.counting import rate_interval
from proofserve.protocol.verdict.directions import cosine, levelled
from proofserve.reports import Progress
from proofserve.rounds.computation import chunks
from proofserve.verifier.audit.deployment import AuditedProver, CheckpointDeployment
from proofserve.verifier.judges import Recompute, Vectors, as_sent
from proofserve.verifier.noise import LEAST_LENGTH
from proofserve.verifier.populations import HonestPopulations, RunFigures
from proofserve.verifier.simulation import NodeFigures, node_figures

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
    both, made = (honest, best), []
    for share in FORGED_SHARES:
        rate, low, high = (
            (1.0 - share) * of_honest + share * of_forged
            for of_honest, of_forged in zip(*((e.rate, *e.interval) for e in both), strict=True)
        )
        errors, chances = mixed(honest.errors, best.errors, share)
        mixture = ProverMeasurement(
            name=f"honest on {1.0 - share:.1%}, else {best.name}".replace(".0%", "%"),
            saving=share * best.saving,
            errors=errors,
            rate=rate,
            interval=(low, high),
            chances=chances,
        )
        made.append(mixture)
    return made


def mixed(honest: Errors, forged: Errors, share: float) -> tuple[Errors, Floats]:
    """The errors of both, and how often each is met if a ``share`` of the nonces is forged."""
    counts = len(honest), len(forged)
    chances = np.repeat([(1.0 - share) / counts[0], share / counts[1]], counts)
    return np.concatenate([honest, forged]), chances


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
class Beside:
    """What provers are compared with: our own run of the kernel ``name``, and suspects.

    Errors float32 [m, width] of our run, the same added up ``in_another_order``, and what the
    ``predictions`` of each suspect are.
    """

    name: str
    errors: Errors
    in_another_order: Errors
    predictions: Mapping[str, Errors]

    @property
    def width(self) -> int:
        return len(self.errors[0])

    @property
    def between_orders(self) -> list[float]:
        """Cosines [m] of our run's errors in two orders."""
        return [cosine(*two) for two in zip(self.errors, self.in_another_order, strict=True)]

    @property
    def lengths(self) -> dict[str, Floats]:
        """Of the predictions, float64 [m] each."""
        of = self.predictions.items()
        return {name: np.linalg.norm(each, axis=1).astype(np.float64) for name, each in of}

    def figures(self, errors: Errors) -> RunFigures:
        """Of ``errors`` [n, width], NaN rows of nonces without a vector included.

        Where n is a multiple of m, those nonces come again and again.
        """
        rows = np.arange(len(errors)) % len(self.errors)
        broken = np.isnan(errors).any(axis=1)
        lengths = np.linalg.norm(errors, axis=1).astype(np.float64)

        def cosines(of: Errors) -> Floats:
            found = [cosine(*two) for two in zip(errors, of[rows], strict=True)]
            return np.where(broken, np.nan, np.array(found, dtype=np.float64))

        both = (cosines(self.errors) + cosines(self.in_another_order)) / 2
        between = np.array(self.between_orders)
        return RunFigures(
            lengths=np.where(broken, np.inf, np.maximum(lengths, LEAST_LENGTH)),
            footprints={self.name: levelled(both, between[rows], float(between.mean()))},
            cosines={suspect: cosines(of) for suspect, of in self.predictions.items()},
            rows=rows,
        )

    def of_node(self, errors: Errors, null: HonestPopulations) -> NodeFigures:
        """Of a node with these ``errors``, for simulated verifications by ``null``."""
        ours = {null.reference: self.figures(self.errors)}
        return node_figures(self.figures(errors), ours, null, self.lengths)


# Nonces of a verification, for each of which there is a price.
SAMPLES: Final = (24, 66, 200)
# Shares of verifications above this clear a lie too often.
CLEARED_AT_MOST: Final = 0.001
# Of the layers, from the last one and from the first one on; of the nonces; and the length of the
# noise in that of an honest error.
_PARTS: Final = (1 / 6, 1 / 3, 1 / 2, 2 / 3, 5 / 6, 1.0)
_SHARES: Final = (1.0, 0.7, 0.5, 0.3, 0.2, 0.1, 0.05)
_NOISES: Final = (0.0, 0.5)


@dataclass(frozen=True, slots=True)
class Lie:
    """Errors float32 [n, width] of a way to save the share ``saving`` (0 to 1) of the work."""

    name: str
    saving: float
    errors: Errors


@dataclass(frozen=True, slots=True)
class ClearedLie:
    """The lie of most worth among those that verifications of ``nonces`` clear too often.

    ``name`` is empty, and ``saving`` 0, if they clear none. ``cleared`` is the share that do.
    """

    nonces: int
    name: str = ""
    saving: float = 0.0
    cleared: float = 0.0

    @property
    def text(self) -> str:
        if not self.name:
            return f"{self.nonces} nonces: none of the lies that were tried is cleared"
        return f"{self.nonces} nonces: {self.saving:.0%} ({self.name}; {self.cleared:.1%} clear it)"


def lies(
    deployment: CheckpointDeployment, truth: Vectors, typical: float, progress: Progress
) -> Iterator[Lie]:
    """All that are tried in every nonce; noise is ``typical`` times as long as ``_NOISES``."""
    layers, nonces = deployment.price.layers, tuple(truth)
    counts = sorted({max(1, round(part * layers)) for part in _PARTS})
    places = {f"the last {n}": range(layers - n, layers) for n in counts}
    places |= {f"the first {n}": range(n) for n in counts[:-1]}
    drawn = np.random.default_rng(0)
    # What rounds less leaves a lie room for errors of its own.
    for (where, some), how in product(places.items(), ("", ", these in float16", ", in float16")):
        finer = {"": (), ", these in float16": some}.get(how, range(layers))
        rotated = deployment.rotated(some, finer)
        name = f"private int8 in {where} of {layers} layers{how}"
        saving = deployment.price.bits(8) * len(some) / layers
        prover = AuditedProver(name, saving, lambda rotated=rotated: rotated)  # type: ignore[misc]
        errors = errors_of(vectors_by(prover, nonces, progress), truth)
        if not np.isfinite(errors).all():
            continue
        noise = drawn.normal(size=errors.shape).astype(np.float32)
        noise *= typical / np.linalg.norm(noise, axis=1, keepdims=True)
        for times in _NOISES:
            said = f"{name}, noise of {times:g} honest errors" if times else name
            yield Lie(said, saving, errors + np.float32(times) * noise)


def dearest(
    tried: Sequence[Lie], nonces: int, clearing: Callable[[Lie, float, int], float]
) -> ClearedLie:
    """The price at ``nonces``: lies are tried from the one that saves most.

    ``clearing`` gives the share of verifications that clear a lie in a share of so many nonces.
    """
    every = [(share * lie.saving, share, lie) for lie in tried for share in _SHARES]
    for saving, share, lie in sorted(every, key=lambda each: -each[0]):
        cleared = clearing(lie, share, nonces)
        if cleared > CLEARED_AT_MOST:
            where = "" if share == 1.0 else f", on {share:.0%} of the nonces"
            return ClearedLie(nonces, f"{lie.name}{where}", saving, cleared)
    return ClearedLie(nonces)
