"""Every choice of references among honest deployments, and every other one judged beside them."""

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import combinations
from typing import Final

import numpy as np
from numpy.typing import NDArray

from proofserve.protocol.verdict.evidence import mixed
from proofserve.protocol.verdict.nearness import ENOUGH, FarnessBets, LeaningBets, ReferenceVectors
from proofserve.verifier.judges import ALPHA, BETA, SHARE
from proofserve.verifier.nodes.sources import SAME, kind_of
from real_gpus.deployments import Group

Floats = NDArray[np.float64]
Counts = NDArray[np.int64]
# Nonces after which a run has not ended.
NEVER: Final = 10**6
# Of the nonces that a cheap node computes with its own weights.
SHARES: Final = (1.0, 0.5, 0.3, 0.1)
# The network's own rule: more than a tenth of the distances above this is fraud.
DISTANCE, MISMATCHES = 0.75, 0.1


@dataclass(slots=True)
class Endings:
    """After how many nonces runs were convicted and cleared, ``NEVER`` if not.

    int64 [orders] for each choice of references and node, whose names are ``nodes``.
    """

    convicted: list[Counts] = field(default_factory=list)
    cleared: list[Counts] = field(default_factory=list)
    nodes: list[str] = field(default_factory=list)

    def share(self, ended: Sequence[Counts], within: int) -> float:
        """The share of all runs that ended so within so many nonces."""
        return float((np.concatenate(ended) <= within).mean())

    def worst(self, within: int) -> tuple[str, float]:
        """The node that is cleared least often within so many nonces, and how often."""
        found: defaultdict[str, list[Counts]] = defaultdict(list)
        for name, cleared in zip(self.nodes, self.cleared, strict=True):
            found[name].append(cleared)
        shares = {name: self.share(each, within) for name, each in found.items()}
        least = min(shares, key=shares.__getitem__)
        return least, shares[least]

    def nonces(self, ended: Sequence[Counts], share: float) -> int | None:
        """After so many ``share`` of the runs had ended so; None if they never did."""
        found = int(np.quantile(np.concatenate(ended), share, method="higher"))
        return None if found >= NEVER else found


@dataclass(frozen=True, slots=True, order=True)
class Kind:
    """What was judged, ``weights``, beside references on so many ``kinds`` of card.

    ``suspect`` are the weights of a suspect node, empty without one. A cheap node serves its
    weights on ``share`` of the nonces, and is honest in the others.
    """

    cheap: bool
    weights: str
    kinds: int
    suspect: str
    share: float = 1.0


def judged(group: Group, orders: int, nonces: int, seed: int = 0) -> dict[Kind, Endings]:
    """``orders`` verifications of up to ``nonces`` for each choice and node of a group.

    A sample is drawn anew for each order, with the references' own figures of it. A part of a node
    is tried beside references on several kinds of card.
    """
    random, count = np.random.default_rng(seed), group.vectors.shape[1]
    found: defaultdict[Kind, Endings] = defaultdict(Endings)
    for chosen in _choices(group):
        kinds = len({kind_of(group.deployments[i].card) for i in chosen} - {None})
        references = ReferenceVectors(group.vectors[list(chosen)], kinds)
        draws = np.array([random.permutation(count)[:nonces] for _ in range(orders)])
        runs = _Runs(group, chosen, references, draws)
        for by in (None, *group.cheap):
            for node, of in enumerate(group.deployments):
                if node in chosen or node == by or runs.has_equal_bits(node):
                    continue
                suspect = "" if by is None else group.deployments[by].facts.weights
                facts = of.facts
                of_part = not facts.honest and kinds > 1 and suspect in {"", facts.weights}
                for share in SHARES if of_part else SHARES[:1]:
                    ended = found[Kind(not facts.honest, facts.weights, kinds, suspect, share)]
                    forged = random.random(draws.shape) < share
                    convicted, cleared = runs.ended(node, by, forged)
                    ended.convicted.append(convicted)
                    ended.cleared.append(cleared)
                    ended.nodes.append(of.name)
    return dict(sorted(found.items()))


def together(parts: Sequence[Mapping[Kind, Endings]]) -> dict[Kind, Endings]:
    """Those of several seeds."""
    found: defaultdict[Kind, Endings] = defaultdict(Endings)
    for part in parts:
        for kind, of in part.items():
            found[kind].convicted += of.convicted
            found[kind].cleared += of.cleared
            found[kind].nodes += of.nodes
    return dict(found)


def _choices(group: Group) -> Iterator[tuple[int, ...]]:
    """Three honest deployments, none of which has the bits of another."""
    for chosen in combinations(group.honest, ENOUGH):
        if not any(_equal(group, a, b) for a, b in combinations(chosen, 2)):
            yield chosen


def _equal(group: Group, one: int, other: int) -> bool:
    same = (group.vectors[one] == group.vectors[other]).all(axis=-1)
    return bool(same.mean() >= SAME)


class _Runs:
    """Verifications beside one choice of references; ``draws`` int64 [orders, nonces]."""

    def __init__(
        self, group: Group, chosen: tuple[int, ...], references: ReferenceVectors, draws: Counts
    ) -> None:
        self._group = group
        self._chosen = chosen
        self._references = references
        self._draws = draws
        self._bets = [FarnessBets(references.apart[:, d], references.honest_beyond) for d in draws]
        self._leaning: dict[int, list[LeaningBets]] = {}

    def has_equal_bits(self, node: int) -> bool:
        """Such a node is cleared by its bits alone."""
        return any(_equal(self._group, node, each) for each in self._chosen)

    @property
    def _honest(self) -> int:
        """The honest node that a cheap one asks for a part of the nonces."""
        left = [i for i in self._group.honest if i not in self._chosen]
        return next((i for i in left if not self.has_equal_bits(i)), self._chosen[0])

    def ended(self, node: int, by: int | None, forged: NDArray[np.bool_]) -> tuple[Counts, Counts]:
        """When each order convicts, and when it clears: int64 [orders] each.

        The node computes those that are ``forged`` [orders, nonces], an honest one the others.
        """
        vectors, honest = self._group.vectors, self._group.vectors[self._honest]
        suspects = 0 if by is None else 1
        limit = -np.log(ALPHA / (1 + suspects))
        far = [self._references.farness(each) for each in (honest, vectors[node])]
        convicted, cleared = [], []
        lean = None
        if by is not None:
            lean = [self._references.leaning(e, vectors[by]) for e in (honest, vectors[node])]
            if by not in self._leaning:
                self._leaning[by] = self._leaning_bets(by)
        for order, drawn in enumerate(self._draws):
            bets, is_forged = self._bets[order], forged[order]
            here = np.where(is_forged, far[1][drawn], far[0][drawn])
            at = _first(_evidence(bets.convicting(here)), limit)
            clearing = np.minimum(
                _evidence(bets.against_all(here)), _evidence(bets.against_half(here))
            )
            if lean is not None and by is not None:
                of = self._leaning[by][order]
                there = np.where(is_forged, lean[1][drawn], lean[0][drawn])
                at = min(at, _first(_evidence(of.convicting(there)), limit))
                if not of.is_unseen:
                    against = -np.cumsum(mixed(of.log_ratios(there), SHARE))
                    clearing = np.minimum(clearing, against)
            convicted.append(at)
            cleared.append(_first(clearing, -np.log(BETA)))
        ended, passed = np.array(convicted), np.array(cleared)
        # What comes first is the verdict.
        return np.where(ended <= passed, ended, NEVER), np.where(passed < ended, passed, NEVER)

    def _leaning_bets(self, by: int) -> list[LeaningBets]:
        chosen, suspect = self._group.vectors[list(self._chosen)], self._group.vectors[by]
        kinds = self._references.kinds
        return [LeaningBets(ReferenceVectors(chosen[:, d], kinds), suspect[d]) for d in self._draws]


def _evidence(log_factors: Floats) -> Floats:
    """log E after each nonce, of factors [n, bets]: float64 [n]."""
    sums = np.cumsum(log_factors, axis=0)
    found: Floats = np.logaddexp.reduce(sums, axis=1) - np.log(sums.shape[1])
    return found


def _first(evidence: Floats, limit: float) -> int:
    reached = evidence >= limit
    return int(reached.argmax()) + 1 if reached.any() else NEVER


def by_the_network(group: Group) -> tuple[int, int, int, int]:
    """Pairs of a reference and a node that the network's rule convicts.

    Of honest nodes and of all pairs of such, then of cheap ones.
    """
    counts = [0, 0, 0, 0]
    for reference in group.honest:
        for node in range(len(group.deployments)):
            if node == reference:
                continue
            away = np.linalg.norm(group.vectors[node] - group.vectors[reference], axis=-1)
            place = 0 if group.deployments[node].facts.honest else 2
            counts[place] += bool((away > DISTANCE).mean() > MISMATCHES)
            counts[place + 1] += 1
    return counts[0], counts[1], counts[2], counts[3]
