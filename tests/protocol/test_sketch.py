import numpy as np
import pytest
import torch

from proofserve.protocol.errors import ProtocolError
from proofserve.protocol.identity import Block
from proofserve.protocol.nonces import pad
from proofserve.protocol.scheme import AllowedTokens, ModelFacts
from proofserve.protocol.sketch import SketchBlock, SketchScheme

CPU = torch.device("cpu")
HIDDEN, SEQ_LEN, K = 32, 24, 16
BLOCK = Block("block", 7)
FACTS = ModelFacts(HIDDEN, "5e" * 32, AllowedTokens(((5, 100),)))


def block(of: Block = BLOCK, facts: ModelFacts = FACTS, k_dim: int = K) -> SketchBlock:
    return SketchScheme(k_dim).for_block(of, facts, CPU)


def prompts(of: SketchBlock, nonce: int, key: str = "key", seq_len: int = SEQ_LEN) -> torch.Tensor:
    return of.inputs(key, [nonce], seq_len, torch.bfloat16)


def states(count: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(count, SEQ_LEN, HIDDEN, generator=torch.Generator().manual_seed(seed))


def test_twins_differ_in_their_first_token_alone() -> None:
    for nonce in range(50):
        first, second = prompts(block(), nonce)
        assert first[0] != second[0]
        assert torch.equal(first[1:], second[1:])
        assert ((first >= 5) & (first < 100)).all()
        assert 5 <= second[0] < 100


def test_with_two_tokens_the_twin_has_the_other_one() -> None:
    facts = ModelFacts(HIDDEN, "5e" * 32, AllowedTokens(((3, 4), (9, 10))))
    for nonce in range(20):
        first, second = prompts(block(facts=facts), nonce)
        assert {int(first[0]), int(second[0])} == {3, 9}


@pytest.mark.parametrize(
    "other",
    [
        lambda: prompts(block(Block("other", 7)), 1),
        lambda: prompts(block(Block("block", 8)), 1),
        lambda: prompts(block(facts=ModelFacts(HIDDEN, "5f" * 32, FACTS.tokens)), 1),
        lambda: prompts(block(k_dim=K + 1), 1),
        lambda: prompts(block(), 1, key="other"),
        lambda: prompts(block(), 2),
    ],
    ids=["hash", "height", "weights", "k_dim", "key", "nonce"],
)
def test_every_part_of_the_work_changes_the_prompts(other: object) -> None:
    assert callable(other)
    assert not torch.equal(prompts(block(), 1), other())


def test_the_length_changes_the_prompts_and_not_only_their_end() -> None:
    longer = prompts(block(), 1, seq_len=SEQ_LEN + 1)
    assert not torch.equal(prompts(block(), 1), longer[:, :SEQ_LEN])


def test_a_sketch_does_not_depend_on_the_others_of_its_forward() -> None:
    nonces, made = (4, 9, 2), states(6)
    together = block().finish("key", nonces, made)
    for index, nonce in enumerate(nonces):
        alone = block().finish("key", [nonce], made[2 * index : 2 * index + 2])
        assert torch.equal(together[index], alone[0])


def test_the_distance_of_sketches_estimates_the_relative_error() -> None:
    """In the mean over the projection's signs ||z - z'|| is the length of the error of y."""
    exact = states(2)
    changed = exact + 0.01 * states(2, seed=1)
    apart = []
    for height in range(200):
        of = block(Block("block", height), k_dim=64)
        a, b = of.finish("key", [0], exact), of.finish("key", [0], changed)
        apart.append(float((a - b).norm()) / 2**0.5)
    # Every position's error has about 0.01 of its state's length, in a random direction, and
    # signs add states and errors up alike.
    assert np.mean(apart) == pytest.approx(0.01, rel=0.1)


@pytest.mark.parametrize("broken", [float("nan"), float("inf"), 3e38])
def test_a_broken_state_at_any_position_breaks_its_nonce_alone(broken: float) -> None:
    made = states(4)
    made[1, 3] = broken
    values = block().finish("key", [0, 1], made)
    assert values[0].isnan().any()
    assert values[1].isfinite().all()


def test_padding_nonces_have_prompts_of_their_own() -> None:
    drawn = block().inputs("key", pad([0], 3), SEQ_LEN, torch.bfloat16)
    assert drawn.shape == (6, SEQ_LEN)
    assert len({tuple(row.tolist()) for row in drawn}) == 6


@pytest.mark.parametrize(
    "facts", [ModelFacts(HIDDEN, None, FACTS.tokens), ModelFacts(HIDDEN, "5e" * 32, None)]
)
def test_a_model_without_digest_or_tokens_is_refused(facts: ModelFacts) -> None:
    with pytest.raises(ProtocolError, match="weights digest"):
        block(facts=facts)


@pytest.mark.parametrize("k_dim", [0, -1, 4097])
def test_a_length_out_of_range_is_refused(k_dim: int) -> None:
    with pytest.raises(ProtocolError, match="k_dim"):
        SketchScheme(k_dim)


def test_states_of_the_last_position_alone_are_refused() -> None:
    with pytest.raises(ProtocolError, match="states"):
        block().finish("key", [0], states(1))
