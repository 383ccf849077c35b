"""Replays of our own schemes' files, which ``tests.golden.make`` writes."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import torch
from safetensors.numpy import save_file
from transformers import Qwen3Config, Qwen3MoeConfig

from proofserve.engines.reference.engine import ReferenceEngine
from proofserve.engines.reference.network import load
from proofserve.protocol import commitments
from proofserve.protocol.codec import to_float16
from proofserve.protocol.identity import Block
from proofserve.protocol.scheme import AllowedTokens, ExpertLayer, ModelFacts
from proofserve.protocol.sketch import SketchBlock, SketchScheme
from proofserve.rounds.records import Workload

from .cases import DEVICE, Case, assert_f16_close
from .make import qwen3


def block_of(case: Case, hidden: int, seeded_experts: bool = False) -> SketchBlock:
    args = case.args
    facts = ModelFacts(
        hidden, args["weights_digest"], AllowedTokens(tuple(map(tuple, args["allowed"])))
    )
    block = Block(args["block_hash"], args["block_height"])
    return SketchScheme(args["k_dim"], seeded_experts).for_block(block, facts, DEVICE)


def replay_sketch(case: Case) -> None:
    args, key, nonce = case.args, case.args["public_key"], case.args["nonce"]
    seq_len, hidden = args["seq_len"], args["hidden"]
    block = block_of(case, hidden)
    assert block.inputs(key, [nonce], seq_len, torch.float32).tolist() == case.expect["twins"]
    # A basis vector as the only state that is not the same at all positions picks one sign out.
    signs = torch.tensor(case.expect["signs"], dtype=torch.float32, device=DEVICE)
    rows = torch.tensor(
        [[1.0 if sign == "+" else -1.0 for sign in row] for row in case.expect["rows"]],
        device=DEVICE,
    )
    states = torch.eye(hidden, device=DEVICE)[torch.arange(seq_len) % hidden]
    y = signs @ states
    wanted = (rows @ (y / y.norm())) / args["k_dim"] ** 0.5
    found = block.finish(key, [nonce], states.expand(2, -1, -1))[0]
    torch.testing.assert_close(found, wanted.repeat(2), rtol=0, atol=1e-6)


def replay_forward(case: Case) -> None:
    replay_network(case, Qwen3Config, qwen3.Shape())


def replay_experts(case: Case) -> None:
    args = case.args
    facts = ModelFacts(16, args["weights_digest"], AllowedTokens(((3, 64),)))
    block = SketchScheme(args["k_dim"], seeded_experts=True).for_block(
        Block(args["block_hash"], args["block_height"]), facts, DEVICE
    )
    layer = ExpertLayer(args["experts"], args["chosen"], args["groups"], args["chosen_groups"])
    found = block.experts(args["layer"], layer, args["seq_len"])
    assert found.tolist() == case.expect["experts"]


def replay_mixture(case: Case) -> None:
    """The block chooses the experts, whose weights are stored one by one."""
    replay_network(case, Qwen3MoeConfig, qwen3.MixtureShape(), seeded_experts=True)


def replay_network(
    case: Case, made_by: Callable[..., Any], shape: qwen3.Shape, seeded_experts: bool = False
) -> None:
    """By the engine, of a checkpoint on disk."""
    args = case.args
    block = block_of(case, shape.hidden_size, seeded_experts)
    config = made_by(
        **vars(shape), rope_parameters={"rope_type": "default", "rope_theta": shape.rope_theta}
    )
    with TemporaryDirectory() as folder:
        config.save_pretrained(folder)
        save_file(qwen3.weights_of(shape), Path(folder) / "model.safetensors", {"format": "pt"})
        network = replace(load(Path(folder), "float32", str(DEVICE)), facts=block.model)
        scheme = SketchScheme(args["k_dim"], seeded_experts)
        work = Workload(scheme, block.block, args["public_key"], args["seq_len"])
        made = ReferenceEngine(1).compute(work, network, [args["nonce"]])
    assert_f16_close(to_float16(made.values[0]), np.array(case.expect["z"]).ravel())


def replay_commitments(case: Case) -> None:
    args, expect = case.args, case.expect
    vectors = [bytes.fromhex(vector) for vector in args["vectors"]]
    leaves = [commitments.leaf(n, v) for n, v in zip(args["nonces"], vectors, strict=True)]
    root = commitments.root(leaves)
    assert [leaf.hex() for leaf in leaves] == expect["leaves"]
    assert root.hex() == expect["root"]
    paths = commitments.paths(leaves, range(len(leaves)))
    assert [[each.hex() for each in path] for path in paths] == expect["paths"]
    for index, path in enumerate(paths):
        assert commitments.opens(root, len(leaves), index, leaves[index], path)


REPLAYS: dict[str, Callable[[Case], None]] = {
    "sketch_v1.json": replay_sketch,
    "sketch_forward.json": replay_forward,
    "sketch_experts.json": replay_experts,
    "sketch_mixture.json": replay_mixture,
    "commitments.json": replay_commitments,
}
