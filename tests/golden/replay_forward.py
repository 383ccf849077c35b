"""Replays of the files that run decoder layers: the layer transforms and the toy model."""

from collections.abc import Callable

import torch
from torch import Tensor

from proofserve.protocol.draws import normal
from proofserve.protocol.identity import Block, seed
from proofserve.protocol.scheme import BlockScheme, ModelFacts, Scheme
from proofserve.protocol.schemes import scheme

from .cases import DEVICE, Case, assert_close, tensor
from .replay_artifact import finish_by_score

_MODES: dict[str, Scheme] = {
    "A_sign_flips": scheme("distance-v1"),
    "A_layer_hooks": scheme("distance-v1", sign_flips=False, layer_hooks=True),
    "A_plain": scheme("distance-v1", sign_flips=False),
}
_ARTIFACT_MODES = {
    "B_no_hooks": ("artifact-v1", False),
    "B_hooks": ("artifact-v1-layers", False),
    "B_hooks_concat": ("artifact-v1-layers", True),
}
_LAYER_SCHEMES = {
    "A": scheme("distance-v1", layer_hooks=True),
    "B": scheme("artifact-v1-layers", k_dim=1),
}


def replay_layer_hooks(case: Case) -> None:
    args, expect = case.args, case.expect
    dtype = getattr(torch, args["dtype"])
    tolerance = 0.0625 if dtype == torch.bfloat16 else 4e-6
    hidden, residual = tensor(args["hidden"], dtype), tensor(args["residual"], dtype)
    extra = object()
    output = {
        "two": (hidden, residual),
        "three": (hidden, residual, extra),
        "one": (hidden,),
        "plain": hidden,
    }[args["output_form"]]
    block = _LAYER_SCHEMES[args["protocol"]].for_block(
        Block(args["block_hash"], 7), ModelFacts(hidden.shape[-1]), DEVICE
    )
    # "Inactive" means only that no code calls the transform outside a proof forward.
    result = block.layer_transform(args["layer_index"], output) if args["poc_active"] else output
    assert isinstance(result, tuple) == isinstance(output, tuple)
    parts = result if isinstance(result, tuple) else (result,)
    assert len(parts) == expect["n_outputs"]
    assert parts[2:] == ((extra,) if args["output_form"] == "three" else ())
    assert_close(parts[0], expect["hidden"], tolerance)
    if expect["residual"] is not None:
        assert_close(parts[1], expect["residual"], tolerance)
    assert parts[0].dtype == dtype


def replay_toy_e2e(case: Case) -> None:
    mode = case.args["mode"]
    if mode in _MODES:
        block, hidden = _toy_forward(case, _MODES[mode])
        distances = block.finish(case.args["public_key"], case.args["nonces"], hidden)
        assert_close(distances.squeeze(1), case.expect["distances"], 2e-5)
        return
    name, stronger = _ARTIFACT_MODES[mode]
    recipe = scheme(name, k_dim=case.args["k_dim"], stronger_rng=stronger)
    block, hidden = _toy_forward(case, recipe)
    vectors = block.finish(case.args["public_key"], case.args["nonces"], hidden)
    _, by_score = finish_by_score(case, hidden)
    assert_close(vectors, case.expect["per_order"]["cuda"]["vectors"], 1e-3)
    assert_close(by_score, case.expect["per_order"]["score"]["vectors"], 1e-3)


def _toy_forward(case: Case, recipe: Scheme) -> tuple[BlockScheme, Tensor]:
    """The block at work and the toy model's last hidden states, as toy_e2e.json describes it."""
    args = case.args
    dim = args["dim"]
    block = recipe.for_block(Block(args["block_hash"], 7), ModelFacts(dim), DEVICE)
    hidden = block.inputs(args["public_key"], args["nonces"], args["seq_len"], torch.float32)
    residual = torch.zeros_like(hidden)
    for layer in range(args["n_layers"]):
        weights = normal([seed(f"toy_W_{layer}")], dim * dim, DEVICE).view(dim, dim) / dim**0.5
        residual = hidden + residual
        hidden = torch.tanh(residual @ weights.T)
        if block.uses_layer_transforms:
            hidden, residual = block.layer_transform(layer, (hidden, residual))
    return block, (hidden + residual)[:, -1]


REPLAYS: dict[str, Callable[[Case], None]] = {
    "layer_hooks.json": replay_layer_hooks,
    "toy_e2e.json": replay_toy_e2e,
}
