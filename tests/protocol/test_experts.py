"""Experts that the block chooses: the formula of docs/native.md, in integers."""

import hashlib
from math import gcd

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from proofserve.protocol.errors import ProtocolError
from proofserve.protocol.identity import Block
from proofserve.protocol.scheme import DRAWS, AllowedTokens, ExpertLayer, ModelFacts
from proofserve.protocol.sketch import SketchBlock, SketchScheme

CPU = torch.device("cpu")
DIGEST = "ab" * 32
SEQ_LEN = 48
FACTS = ModelFacts(16, DIGEST, AllowedTokens(((3, 64),)))
BLOCK = Block("0xabc", 7)


def block_of(scheme: SketchScheme) -> SketchBlock:
    return scheme.for_block(BLOCK, FACTS, CPU)


@pytest.fixture
def block() -> SketchBlock:
    return block_of(SketchScheme(seeded_experts=True))


def drawn(layer: int, position: int) -> list[int]:
    """The four numbers of a position, written out."""
    text = b"proofserve sketch-v1\0"
    for value in (
        *(b"routing", b"0xabc", (7).to_bytes(8, "little"), b"", bytes.fromhex(DIGEST)),
        *(number.to_bytes(8, "little") for number in (SEQ_LEN, 64, 0)),
    ):
        text += len(value).to_bytes(4, "little") + value
    place = 32 * (layer * SEQ_LEN + position)
    stream = hashlib.shake_256(hashlib.sha256(text).digest()).digest(place + 32)[place:]
    return [int.from_bytes(stream[8 * i : 8 * i + 8], "little") for i in range(4)]


@pytest.mark.parametrize("layer", [0, 5, 2])
def test_experts_are_those_of_the_formula(block: SketchBlock, layer: int) -> None:
    found = block.experts(layer, ExpertLayer(32, 4), SEQ_LEN)
    steps = [b for b in range(1, 32) if gcd(b, 32) == 1]
    for position in range(SEQ_LEN):
        a, b, *_ = drawn(layer, position)
        wanted = [(a + j * steps[b % len(steps)]) % 32 for j in range(4)]
        assert found[position].tolist() == wanted


def test_groups_hold_the_experts_of_a_position(block: SketchBlock) -> None:
    found = block.experts(1, ExpertLayer(16, 4, groups=4, chosen_groups=2), SEQ_LEN)
    for position in range(SEQ_LEN):
        a, b, c, d = drawn(1, position)
        groups = [(c + j * [1, 3][d % 2]) % 4 for j in range(2)]
        places = [(a + j * [1, 3, 5, 7][b % 4]) % 8 for j in range(4)]
        assert found[position].tolist() == [groups[x // 4] * 4 + x % 4 for x in places]


def test_layers_lengths_and_blocks_differ_and_order_does_not_matter(block: SketchBlock) -> None:
    layer = ExpertLayer(32, 4)
    first = block.experts(3, layer, SEQ_LEN)
    assert not torch.equal(first, block.experts(4, layer, SEQ_LEN))
    assert not torch.equal(first[:32], block.experts(3, layer, 32))
    assert torch.equal(first, block.experts(3, layer, SEQ_LEN))
    other = SketchScheme(seeded_experts=True).for_block(Block("0xabd", 7), FACTS, CPU)
    assert not torch.equal(first, other.experts(3, layer, SEQ_LEN))


@given(st.data())
def test_experts_are_different_and_within_their_groups(data: st.DataObject) -> None:
    groups = data.draw(st.integers(1, 8))
    size = data.draw(st.integers(1, 12))
    chosen_groups = data.draw(st.integers(1, groups))
    chosen = data.draw(st.integers(1, chosen_groups * size))
    layer = ExpertLayer(groups * size, chosen, groups, chosen_groups)
    rng = np.random.default_rng(data.draw(st.integers(0, 2**32)))
    ids = layer.experts_of(rng.integers(0, 2**64, (9, DRAWS), dtype=np.uint64))
    assert ids.shape == (9, chosen)
    assert all(len(set(row)) == chosen for row in ids.tolist())
    assert ids.min() >= 0
    assert ids.max() < layer.experts
    assert all(len({each // size for each in row}) <= chosen_groups for row in ids.tolist())


@pytest.mark.parametrize("layer", [ExpertLayer(32, 4), ExpertLayer(16, 4, 4, 2)])
def test_every_expert_is_used_equally(layer: ExpertLayer) -> None:
    rng = np.random.default_rng(0)
    ids = layer.experts_of(rng.integers(0, 2**64, (40_000, DRAWS), dtype=np.uint64))
    counts = np.bincount(ids.ravel(), minlength=layer.experts)
    expected = ids.size / layer.experts
    assert np.abs(counts - expected).max() < 5 * np.sqrt(expected)


@pytest.mark.parametrize(
    "numbers", [(8, 9), (8, 0), (8, 2, 3, 1), (8, 3, 4, 1), (8, 2, 4, 5), (8, 2, 4, 0)]
)
def test_layers_without_such_a_choice_are_refused(numbers: tuple[int, ...]) -> None:
    with pytest.raises(ProtocolError, match="sketch-v2 cannot choose experts of ExpertLayer"):
        ExpertLayer(*numbers)


def test_the_first_version_leaves_experts_to_the_router() -> None:
    first, second = block_of(SketchScheme()), block_of(SketchScheme(seeded_experts=True))
    assert (first.chooses_experts, second.chooses_experts) == (False, True)
    # All else is the same numbers.
    states = torch.randn(4, SEQ_LEN, 16)
    for each in ("inputs", "finish"):
        arguments = ("key", [0, 1], *((SEQ_LEN, torch.float32) if each == "inputs" else (states,)))
        assert torch.equal(getattr(first, each)(*arguments), getattr(second, each)(*arguments))
