"""Replays of our own schemes' files, which ``tests.golden.make`` writes."""

from collections.abc import Callable

import numpy as np
import torch
from transformers import Qwen3Config, Qwen3Model

from proofserve.engines.reference.network import Network
from proofserve.protocol import commitments
from proofserve.protocol.codec import to_float16
from proofserve.protocol.identity import Block
from proofserve.protocol.scheme import ModelFacts
from proofserve.protocol.sketch import SketchBlock, SketchScheme
from proofserve.protocol.tokens import AllowedTokens

from .cases import DEVICE, Case, assert_f16_close
from .make import qwen3


def block_of(case: Case, hidden: int) -> SketchBlock:
    args = case.args
    facts = ModelFacts(
        hidden, args["weights_digest"], AllowedTokens(tuple(map(tuple, args["allowed"])))
    )
    block = Block(args["block_hash"], args["block_height"])
    return SketchScheme(args["k_dim"]).for_block(block, facts, DEVICE)


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
    shape = qwen3.Shape()
    config = Qwen3Config(
        **vars(shape), rope_parameters={"rope_type": "default", "rope_theta": shape.rope_theta}
    )
    decoder = Qwen3Model(config).to(torch.float32).eval()
    weights = {
        name.removeprefix("model."): torch.from_numpy(values)
        for name, values in qwen3.weights_of(shape).items()
    }
    decoder.load_state_dict(weights)
    block = block_of(case, shape.hidden_size)
    network = Network(
        decoder=decoder.to(DEVICE),
        head=torch.nn.Identity(),
        facts=block.model,
        max_seq_len=1024,
        dtype=torch.float32,
        declared_dtype=torch.float32,
        device=DEVICE,
    )
    args = case.args
    z = network.values(block, args["public_key"], (args["nonce"],), args["seq_len"])[0]
    assert_f16_close(to_float16(z.cpu().numpy()), np.array(case.expect["z"]).ravel())


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
    "commitments.json": replay_commitments,
}
