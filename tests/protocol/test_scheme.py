import pytest
import torch

from proofserve.protocol.draws import normal, unit_vectors
from proofserve.protocol.errors import ProtocolError
from proofserve.protocol.identity import Block, seed
from proofserve.protocol.network_schemes import (
    ArtifactScheme,
    DistanceScheme,
    input_embeddings,
    normalise_reflect,
    reflect,
)
from proofserve.protocol.scheme import ModelFacts, Scheme

CPU = torch.device("cpu")
HIDDEN = 32
BLOCK = Block("block", 7)
FACTS = ModelFacts(HIDDEN)
RECIPES = [
    DistanceScheme(),
    DistanceScheme(sign_flips=False, layer_hooks=True),
    ArtifactScheme(),
    ArtifactScheme(k_dim=4, layer_reflections=True, stronger_rng=True),
]
every_recipe = pytest.mark.parametrize("recipe", RECIPES, ids=repr)


@every_recipe
def test_finish_gives_a_row_per_nonce_whatever_the_others(recipe: Scheme) -> None:
    block = recipe.for_block(BLOCK, FACTS, CPU)
    nonces = [3, 0, 2**63 - 1, -1]
    hidden = normal(range(4), HIDDEN, CPU, torch.bfloat16)
    rows = block.finish("key", nonces, hidden)
    assert rows.shape == (4, recipe.width)
    assert rows.dtype == torch.float32
    for i, nonce in enumerate(nonces):
        alone = block.finish("key", [nonce], hidden[i : i + 1])
        torch.testing.assert_close(rows[i : i + 1], alone, rtol=0, atol=2e-6)


@every_recipe
@pytest.mark.parametrize("poison", [torch.nan, torch.inf, -torch.inf, 3e38])
def test_a_broken_row_is_nan_and_harms_no_other(recipe: Scheme, poison: float) -> None:
    block = recipe.for_block(BLOCK, FACTS, CPU)
    hidden = normal([1, 2, 3], HIDDEN, CPU)
    whole = block.finish("key", [0, 1, 2], hidden)
    # One dimension is enough, also one that no pick looks at; 3e38 overflows the norm.
    for dimension in range(HIDDEN):
        broken = hidden.clone()
        broken[1, dimension] = poison
        rows = block.finish("key", [0, 1, 2], broken)
        assert rows[1].isnan().all()
        assert torch.equal(rows[0], whole[0])
        assert torch.equal(rows[2], whole[2])


@every_recipe
@pytest.mark.parametrize("shape", [(2, HIDDEN), (3, HIDDEN - 1), (3,)])
def test_finish_refuses_other_shapes(recipe: Scheme, shape: tuple[int, ...]) -> None:
    block = recipe.for_block(BLOCK, FACTS, CPU)
    with pytest.raises(ProtocolError, match=r"^states: "):
        block.finish("key", [0, 1, 2], torch.zeros(shape))


@every_recipe
def test_no_nonces_no_rows(recipe: Scheme) -> None:
    block = recipe.for_block(BLOCK, FACTS, CPU)
    assert block.inputs("key", [], 4, torch.float32).shape == (0, 4, HIDDEN)
    assert block.finish("key", [], torch.zeros(0, HIDDEN)).shape == (0, recipe.width)


@every_recipe
def test_numbers_do_not_follow_torchs_defaults(recipe: Scheme) -> None:
    """Model loaders change the default dtype; the proof must not notice."""
    hidden = normal([1], HIDDEN, CPU)
    expected = recipe.for_block(BLOCK, FACTS, CPU).finish("key", [5], hidden)
    torch.set_default_dtype(torch.float16)
    try:
        rows = recipe.for_block(BLOCK, FACTS, CPU).finish("key", [5], hidden)
    finally:
        torch.set_default_dtype(torch.float32)
    assert torch.equal(rows, expected)


@every_recipe
def test_inputs_follow_the_recipe(recipe: Scheme) -> None:
    block = recipe.for_block(BLOCK, FACTS, CPU)
    stronger = recipe.to_wire().get("stronger_rng") is True
    expected = input_embeddings(
        ["block_key_nonce7", "block_key_nonce-1"], 4, HIDDEN, torch.bfloat16, CPU, stronger
    )
    assert torch.equal(block.inputs("key", [7, -1], 4, torch.bfloat16), expected)


@every_recipe
def test_layer_transforms_only_where_the_recipe_has_them(recipe: Scheme) -> None:
    block = recipe.for_block(BLOCK, FACTS, CPU)
    wire = recipe.to_wire()
    transforms = wire.get("layer_hooks") is True or wire["name"] == "artifact-v1-layers"
    assert block.uses_layer_transforms == transforms
    x = normal([1, 2], HIDDEN, CPU, torch.bfloat16)
    if not transforms:
        with pytest.raises(RuntimeError, match="no layer transforms"):
            block.layer_transform(0, x)
        return
    v = unit_vectors([seed("block_layer_3_householder")], HIDDEN, CPU)[0]
    step = normalise_reflect if isinstance(recipe, DistanceScheme) else reflect
    for dtype in (torch.bfloat16, torch.float32, torch.bfloat16):
        hidden, residual = block.layer_transform(3, (x.to(dtype), 2 * x.to(dtype)))
        assert torch.equal(hidden, step(x.to(dtype), v.to(dtype)))
        assert torch.equal(residual, step(2 * x.to(dtype), v.to(dtype)))


@pytest.mark.parametrize("hidden_size", [0, -8])
def test_a_model_has_dimensions(hidden_size: int) -> None:
    with pytest.raises(ProtocolError, match=r"^hidden_size: "):
        DistanceScheme().for_block(BLOCK, ModelFacts(hidden_size), CPU)
