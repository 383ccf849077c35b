import pytest
import torch

from proofserve.protocol.draws import normal, unit_vectors
from proofserve.protocol.errors import ProtocolError
from proofserve.protocol.identity import Block, Challenge, seed
from proofserve.protocol.network_schemes import ArtifactScheme, rotation_steps
from proofserve.protocol.scheme import ModelFacts

CPU = torch.device("cpu")


@pytest.mark.parametrize("k_dim", [1, 2, 12, 64])
def test_vectors_have_length_one(k_dim: int) -> None:
    block = ArtifactScheme(k_dim).for_block(Block("block", 7), ModelFacts(64), CPU)
    vectors = block.finish("key", range(5), normal(range(5), 64, CPU))
    torch.testing.assert_close(vectors.norm(dim=1), torch.ones(5), rtol=0, atol=1e-5)


def test_a_hidden_state_of_zeros_is_a_vector_of_zeros() -> None:
    block = ArtifactScheme().for_block(Block("block", 7), ModelFacts(64), CPU)
    assert block.finish("key", [0], torch.zeros(1, 64)).eq(0).all()


def test_layer_reflections_leave_what_follows_the_forward_alone() -> None:
    hidden = normal([1], 64, CPU)
    plain = ArtifactScheme().for_block(Block("block", 7), ModelFacts(64), CPU)
    layers = ArtifactScheme(layer_reflections=True).for_block(
        Block("block", 7), ModelFacts(64), CPU
    )
    assert torch.equal(plain.finish("key", [0], hidden), layers.finish("key", [0], hidden))


def test_rotation_steps_have_a_name_each() -> None:
    steps = rotation_steps(Challenge("block", "key"), [4, 5], 3, CPU)
    assert steps.shape == (2, 2, 3)
    for row, nonce in enumerate((4, 5)):
        for j in range(2):
            name = f"block_key_nonce_{nonce}_haar_hh_3_{j}"
            assert torch.equal(steps[row, j], unit_vectors([seed(name)], 3, CPU)[0])


def test_one_dimension_is_not_rotated() -> None:
    assert rotation_steps(Challenge("block", "key"), [4, 5], 1, CPU).shape == (2, 0, 1)


def test_more_dimensions_than_the_model_has_are_refused() -> None:
    with pytest.raises(ProtocolError, match=r"^k_dim: 12 "):
        ArtifactScheme().for_block(Block("block", 7), ModelFacts(11), CPU)


@pytest.mark.parametrize("k_dim", [0, -1])
def test_a_vector_has_dimensions(k_dim: int) -> None:
    with pytest.raises(ProtocolError, match=r"^k_dim: "):
        ArtifactScheme(k_dim)


def test_the_stronger_draw_belongs_to_the_layered_scheme() -> None:
    with pytest.raises(ProtocolError, match=r"^stronger_rng: "):
        ArtifactScheme(stronger_rng=True)
    assert ArtifactScheme(layer_reflections=True, stronger_rng=True).stronger_rng
