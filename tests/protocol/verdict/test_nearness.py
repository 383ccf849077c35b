"""A node beside nodes that are trusted: how far, which way, and what evidence that is."""

from itertools import combinations

import numpy as np
import pytest
from numpy.typing import NDArray

from proofserve.protocol.errors import ProtocolError
from proofserve.protocol.verdict.evidence import mixed
from proofserve.protocol.verdict.nearness import (
    LEAST_NONCES,
    FarnessBets,
    LeaningBets,
    ReferenceVectors,
)

Floats = NDArray[np.float64]
WIDTH, NONCES, LIMIT, CLEARED = 12, 64, np.log(1e6), np.log(1000)


class World:
    """Nodes whose vectors are a truth, a suspect's push and their own error of one length."""

    def __init__(self, seed: int, nonces: int = NONCES) -> None:
        self._random = np.random.default_rng(seed)
        self._shape = nonces, WIDTH
        self.truth = self._normal()
        self.push = 2.0 * self._normal()
        # Some nonces feel rounding more than others, in all nodes alike.
        self._noise = np.exp(self._random.normal(0.0, 0.4, (nonces, 1)))

    def _normal(self) -> Floats:
        return self._random.normal(size=self._shape)

    def node(self, size: float = 1.0, cheap: float = 0.0) -> Floats:
        """One whose error is ``size`` honest ones, with the push on a share ``cheap``."""
        forged = self._random.random((self._shape[0], 1)) < cheap
        own = self._normal() * self._noise
        return self.truth + 0.1 * (size * own + np.where(forged, self.push, 0.0))

    def references(self, count: int = 3, kinds: int = 3) -> ReferenceVectors:
        return ReferenceVectors(np.array([self.node() for _ in range(count)]), kinds)


def peak(log_factors: Floats) -> float:
    sums = np.cumsum(log_factors, axis=0)
    return float((np.logaddexp.reduce(sums, axis=1) - np.log(sums.shape[1])).max())


def last(log_factors: Floats) -> float:
    sums = log_factors.sum(axis=0)
    return float(np.logaddexp.reduce(sums) - np.log(len(sums)))


def bets(references: ReferenceVectors) -> FarnessBets:
    return FarnessBets(references.apart, references.honest_beyond)


def test_honest_nodes_are_not_convicted_and_clear_each_other() -> None:
    highest, cleared = -np.inf, 0
    for seed in range(300):
        world = World(seed)
        references = world.references()
        of, far = bets(references), references.farness(world.node())
        highest = max(highest, peak(of.convicting(far)))
        cleared += min(last(of.against_all(far)), last(of.against_half(far))) >= CLEARED
        leaning = LeaningBets(references, world.node(cheap=1.0))
        cosines = references.leaning(world.node(), world.node(cheap=1.0))
        highest = max(highest, peak(leaning.convicting(cosines)))
    # By Ville's inequality one of 600 gets beyond log 600 once.
    assert highest < np.log(600)
    assert cleared > 0.95 * 300


@pytest.mark.parametrize(
    ("kinds", "size", "convicted"),
    [(3, 1.25, 0), (3, 3.0, 60), (2, 1.6, 0), (2, 4.0, 60), (1, 40.0, 0), (0, 40.0, 0)],
)
def test_a_node_is_convicted_by_distances_only_beyond_what_an_honest_one_may_be(
    kinds: int, size: float, convicted: int
) -> None:
    found = 0
    for seed in range(60):
        world = World(seed)
        references = world.references(kinds=kinds)
        far = references.farness(world.node(size))
        found += peak(bets(references).convicting(far)) >= LIMIT
    assert found == convicted


def test_a_node_on_another_kernel_than_all_references_is_not_convicted() -> None:
    """References of one kernel share its error, which the node and the suspect do not have."""
    for seed in range(20):
        world = World(seed)
        vectors = np.array([world.node() + 0.3 * world.push for _ in range(3)])
        suspect = world.node(cheap=1.0)
        for kinds, convicts in ((1, False), (3, True)):
            references = ReferenceVectors(vectors, kinds)
            far = references.farness(world.node())
            assert (peak(bets(references).convicting(far)) >= LIMIT) == convicts
            lean = references.leaning(world.node(), suspect)
            of = LeaningBets(references, suspect)
            assert (peak(of.convicting(lean)) >= LIMIT) == convicts


def test_a_suspects_direction_convicts_and_rules_out() -> None:
    for seed in range(40):
        world = World(seed)
        references, suspect = world.references(), world.node(cheap=1.0)
        of = LeaningBets(references, suspect)
        assert not of.is_unseen
        cheap = references.leaning(world.node(cheap=1.0), suspect)
        assert peak(of.convicting(cheap)) >= LIMIT
        assert -mixed(of.log_ratios(cheap), 0.3).sum() < 0.0
        honest = references.leaning(world.node(), suspect)
        assert -mixed(of.log_ratios(honest), 0.3).sum() >= CLEARED


def test_who_cheats_on_a_half_is_not_cleared_by_distances() -> None:
    for seed in range(60):
        world = World(seed)
        references = world.references()
        # Twice as far: a push of 2 beside an error of 1 that the references have too.
        far = references.farness(world.node(cheap=0.5))
        assert min(last(bets(references).against_half(far)), 0.0) < CLEARED


def test_a_claim_without_a_vector_is_beyond_all_quartiles() -> None:
    references = World(0).references()
    of, none = bets(references), np.full(NONCES, np.inf)
    assert peak(of.convicting(none)) >= LIMIT
    assert max(last(of.against_all(none)), last(of.against_half(none))) < 0.0


def test_a_reference_that_cheats_is_odd_and_honest_ones_are_not() -> None:
    for seed in range(40):
        world = World(seed)
        honest = [world.node() for _ in range(3)]
        assert ReferenceVectors(np.array(honest)).odd() is None
        world.push *= 2.0
        assert ReferenceVectors(np.array([*honest[:2], world.node(cheap=1.0)])).odd() == 2
        # Of two it is not known which one it is.
        assert ReferenceVectors(np.array([honest[0], world.node(cheap=1.0)])).odd() is None


def test_the_nearest_reference_is_named() -> None:
    world = World(0)
    vectors = np.array([world.node() for _ in range(3)])
    references = ReferenceVectors(vectors)
    beside = vectors[1] + 0.001
    assert references.nearest(beside[:5], range(5)) == 1
    one = references.farness(beside[7:8], [7])
    assert one == pytest.approx(references.farness(beside)[7:8])


def test_two_references_have_no_distances_and_still_a_direction() -> None:
    world = World(0)
    references, suspect = world.references(2), world.node(cheap=1.0)
    assert not references.are_enough
    with pytest.raises(ProtocolError, match="distances need 3"):
        bets(references)
    of = LeaningBets(references, suspect)
    cheap = references.leaning(world.node(cheap=1.0), suspect)
    assert peak(of.convicting(cheap)) >= LIMIT


def test_a_suspect_as_near_as_the_references_is_not_tested() -> None:
    world = World(0)
    assert LeaningBets(world.references(), world.node()).is_unseen


def test_what_is_wrong_with_references_is_named() -> None:
    world = World(0)
    node = world.node()
    with pytest.raises(ProtocolError, match="at least two"):
        ReferenceVectors(np.array([node]))
    with pytest.raises(ProtocolError, match=f"too few, {LEAST_NONCES}"):
        ReferenceVectors(np.array([node[:5], world.node()[:5]]))
    with pytest.raises(ProtocolError, match="one witness"):
        ReferenceVectors(np.array([node, node, node]))


def test_the_order_of_references_changes_nothing() -> None:
    world = World(0)
    vectors, node = np.array([world.node() for _ in range(4)]), world.node()
    for chosen in combinations(range(4), 3):
        one = ReferenceVectors(vectors[list(chosen)]).farness(node)
        other = ReferenceVectors(vectors[list(chosen)[::-1]]).farness(node)
        assert one == pytest.approx(other)
