"""Writes the files of our own schemes: their names stand in ``files``."""

import json
from pathlib import Path
from typing import Any

import numpy as np

from tests.golden.make import commitments, qwen3, sketch_v1
from tests.golden.make.sketch_v1 import Setting

DATA = Path(__file__).parents[1] / "data"
DIGEST = "5e" * 32
# Ids with gaps, as of a tokenizer whose special tokens lie before, between and behind the others.
GAPS = [[5, 40], [41, 42], [50, 1000]]

SETTINGS = (
    Setting("block-1", 1, "node-key", DIGEST, seq_len=16, k_dim=64),
    Setting("", 0, "", "00" * 32, seq_len=1, k_dim=1),
    Setting("bl\u00f6ck", 2**40, "schl\u00fcssel", "a1" * 32, seq_len=37, k_dim=12),
    Setting("0xabc", 2**63 - 1, "k" * 100, "ff" * 32, seq_len=256, k_dim=3),
)
NONCES = (0, 1, 2**32, 2**63 - 1)


def ids_of(ranges: list[list[int]]) -> list[int]:
    return [token for first, end in ranges for token in range(first, end)]


def integer_cases() -> list[dict[str, Any]]:
    return [
        {
            "id": f"{number}-{nonce}-{len(allowed)}",
            "args": {**vars(setting), "nonce": nonce, "allowed": allowed, "hidden": 24},
            "expect": {
                "seed": setting.seed("tokens", nonce).hex(),
                "twins": setting.twins(nonce, ids_of(allowed)),
                "signs": setting.signs(nonce).tolist(),
                "rows": ["".join("+" if s > 0 else "-" for s in row) for row in setting.rows(24)],
            },
        }
        for number, setting in enumerate(SETTINGS)
        for nonce in NONCES
        for allowed in (GAPS, [[3, 4], [9, 10]])
    ]


def forward_cases() -> list[dict[str, Any]]:
    shape = qwen3.Shape()
    weights = qwen3.weights_of(shape)
    digest = sketch_v1.digest_of({name: ("F32", values) for name, values in weights.items()})
    allowed = [[2, shape.vocab_size]]
    cases = []
    for seq_len, k_dim in ((1, 8), (16, 64), (50, 16)):
        setting = Setting("block-1", 7, "node-key", digest, seq_len, k_dim)
        for nonce in (0, 3):
            prompts = setting.twins(nonce, ids_of(allowed))
            states = np.array([qwen3.forward(shape, weights, ids) for ids in prompts])
            cases.append(
                {
                    "id": f"{seq_len}-{k_dim}-{nonce}",
                    "args": {**vars(setting), "nonce": nonce, "allowed": allowed},
                    "expect": {
                        "weights_digest": digest,
                        "z": setting.sketch(nonce, states).tolist(),
                    },
                }
            )
    return cases


def expert_cases() -> list[dict[str, Any]]:
    layers = (
        (32, 4, 1, 1),
        (128, 8, 1, 1),
        (7, 7, 1, 1),
        (1, 1, 1, 1),
        (256, 8, 8, 4),
        (16, 4, 4, 2),
    )
    names = ("experts", "chosen", "groups", "chosen_groups")
    return [
        {
            "id": f"{number}-{layer}-{'-'.join(map(str, numbers))}",
            "args": {**vars(setting), "layer": layer, **dict(zip(names, numbers, strict=True))},
            "expect": {"experts": setting.experts(layer, *numbers)},
        }
        for number, setting in enumerate(SETTINGS[:3])
        for layer in (0, 5)
        for numbers in layers
    ]


def mixture_cases() -> list[dict[str, Any]]:
    shape = qwen3.MixtureShape()
    weights = qwen3.weights_of(shape)
    digest = sketch_v1.digest_of({name: ("F32", values) for name, values in weights.items()})
    allowed = [[2, shape.vocab_size]]
    cases = []
    for seq_len, k_dim, nonce in ((1, 8, 0), (16, 64, 0), (16, 64, 3), (50, 16, 1)):
        setting = Setting("block-1", 7, "node-key", digest, seq_len, k_dim)
        chosen = [
            setting.experts(layer, shape.num_experts, shape.num_experts_per_tok)
            for layer in range(shape.num_hidden_layers)
        ]
        prompts = setting.twins(nonce, ids_of(allowed))
        states = np.array([qwen3.forward(shape, weights, ids, chosen) for ids in prompts])
        args = {**vars(setting), "nonce": nonce, "allowed": allowed}
        expect = {"weights_digest": digest, "z": setting.sketch(nonce, states).tolist()}
        cases.append({"id": f"{seq_len}-{k_dim}-{nonce}", "args": args, "expect": expect})
    return cases


def commitment_cases() -> list[dict[str, Any]]:
    cases = []
    for count in (1, 2, 3, 5, 8, 13, 32):
        vectors = [bytes([i, 255 - i]) * (i + 1) for i in range(count)]
        leaves = [commitments.leaf(7 * i, vector) for i, vector in enumerate(vectors)]
        expect = {
            "leaves": [leaf.hex() for leaf in leaves],
            "root": commitments.root(leaves).hex(),
            "paths": [[h.hex() for h in commitments.path(i, leaves)] for i in range(count)],
        }
        args = {"nonces": [7 * i for i in range(count)], "vectors": [v.hex() for v in vectors]}
        cases.append({"id": str(count), "args": args, "expect": expect})
    return cases


def files() -> dict[str, list[dict[str, Any]]]:
    """The cases of every file."""
    return {
        "sketch_v1.json": integer_cases(),
        "sketch_forward.json": forward_cases(),
        "sketch_experts.json": expert_cases(),
        "sketch_mixture.json": mixture_cases(),
        "commitments.json": commitment_cases(),
    }


if __name__ == "__main__":
    for name, cases in files().items():
        lines = ",\n".join(json.dumps(case) for case in cases)
        (DATA / name).write_text(f'{{"cases": [\n{lines}\n]}}\n', "utf-8")
        print(f"{name}: {len(cases)} cases")
