"""Replays of our own schemes' files, which ``tests.golden.make`` writes."""

from collections.abc import Callable

import numpy as np
import torch
from transformers import Qwen3Config, Qwen3Model, Qwen3MoeConfig, Qwen3MoeModel

from proofserve.engines.reference.engine import ReferenceEngine
from proofserve.engines.reference.network import Network
from proofserve.protocol import commitments
from proofserve.protocol.codec import to_float16
from proofserve.protocol.identity import Block
from proofserve.protocol.model import AllowedTokens, ExpertLayer
from proofserve.protocol.scheme import ModelFacts
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
    args = case.args
    z = network_of(decoder, block).values(
        block, args["public_key"], (args["nonce"],), args["seq_len"]
    )[0]
    assert_f16_close(to_float16(z.cpu().numpy()), np.array(case.expect["z"]).ravel())


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
    """By the engine, which lets the block choose; weights as transformers stacks them."""
    shape = qwen3.MixtureShape()
    config = Qwen3MoeConfig(
        **vars(shape), rope_parameters={"rope_type": "default", "rope_theta": shape.rope_theta}
    )
    decoder = Qwen3MoeModel(config).to(torch.float32).eval()
    decoder.load_state_dict(stacked(qwen3.weights_of(shape), shape.num_experts))
    args = case.args
    block = block_of(case, shape.hidden_size, seeded_experts=True)
    scheme = SketchScheme(args["k_dim"], seeded_experts=True)
    work = Workload(scheme, block.block, args["public_key"], args["seq_len"])
    made = ReferenceEngine(1).compute(work, network_of(decoder, block), [args["nonce"]])
    assert_f16_close(to_float16(made.values[0]), np.array(case.expect["z"]).ravel())


def stacked(weights: qwen3.Weights, experts: int) -> dict[str, torch.Tensor]:
    """The weights of a mixture under the names of transformers' modules."""
    found = {}
    for name, values in weights.items():
        if ".experts." not in name:
            found[name.removeprefix("model.")] = torch.from_numpy(values)
    for layer in sorted({name.split(".")[2] for name in weights if ".experts." in name}):
        at = f"model.layers.{layer}.mlp.experts"

        def every(kind: str, at: str = at) -> list[torch.Tensor]:
            return [torch.from_numpy(weights[f"{at}.{e}.{kind}.weight"]) for e in range(experts)]

        gates = zip(every("gate_proj"), every("up_proj"), strict=True)
        to = at.removeprefix("model.")
        found[f"{to}.gate_up_proj"] = torch.stack([torch.cat(pair) for pair in gates])
        found[f"{to}.down_proj"] = torch.stack(every("down_proj"))
    return found


def network_of(decoder: torch.nn.Module, block: SketchBlock) -> Network:
    return Network(
        decoder=decoder.to(DEVICE),
        head=torch.nn.Identity(),
        facts=block.model,
        max_seq_len=1024,
        dtype=torch.float32,
        declared_dtype=torch.float32,
        device=DEVICE,
    )


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
