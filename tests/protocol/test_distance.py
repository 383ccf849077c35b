import math

import pytest
import torch

from proofserve.protocol.draws import normal
from proofserve.protocol.identity import Block
from proofserve.protocol.network_schemes import (
    OUTPUT_DIM,
    DistanceScheme,
    is_winner,
    projection,
    target,
)
from proofserve.protocol.scheme import ModelFacts

CPU = torch.device("cpu")


def test_distances_lie_around_the_square_root_of_two() -> None:
    block = DistanceScheme().for_block(Block("block", 7), ModelFacts(64), CPU)
    distances = block.finish("key", range(200), normal(range(200), 64, CPU))
    assert abs(distances.mean().item() - math.sqrt(2)) < 0.003
    assert 0.005 < distances.std().item() < 0.011


def test_distances_ignore_the_scale_of_the_hidden_state() -> None:
    block = DistanceScheme().for_block(Block("block", 7), ModelFacts(64), CPU)
    hidden = normal([1, 2], 64, CPU)
    torch.testing.assert_close(
        block.finish("key", [0, 1], hidden * 1000), block.finish("key", [0, 1], hidden)
    )


def test_sign_flips_and_the_key_change_the_numbers() -> None:
    hidden = normal([1], 64, CPU)
    flipped = DistanceScheme().for_block(Block("block", 7), ModelFacts(64), CPU)
    plain = DistanceScheme(sign_flips=False).for_block(Block("block", 7), ModelFacts(64), CPU)
    assert flipped.finish("key", [0], hidden) != plain.finish("key", [0], hidden)
    assert flipped.finish("key", [0], hidden) != flipped.finish("other", [0], hidden)


def test_a_hidden_state_of_zeros_has_no_distance() -> None:
    block = DistanceScheme().for_block(Block("block", 7), ModelFacts(16), CPU)
    assert block.finish("key", [0], torch.zeros(1, 16)).isnan().all()


def test_what_depends_on_the_block_is_built_once() -> None:
    block = DistanceScheme().for_block(Block("block", 7), ModelFacts(16), CPU)
    assert block.projection is block.projection
    assert torch.equal(block.projection, projection("block", OUTPUT_DIM, 16, CPU))
    assert block.target is block.target
    assert torch.equal(block.target, target("block", OUTPUT_DIM, CPU))


@pytest.mark.parametrize(
    ("distance", "wins"), [(1.39, True), (1.4, False), (1.41, False), (math.nan, False)]
)
def test_a_winner_is_strictly_below_the_target(distance: float, wins: bool) -> None:
    assert is_winner(distance, 1.4) is wins
