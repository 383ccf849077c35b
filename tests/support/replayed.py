"""A prover of artifact-v1 that answers from a store of hidden states, and computes nothing new."""

import hashlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from proofserve.engines.reference.engine import Run, proof_values
from proofserve.engines.reference.network import load
from proofserve.protocol.codec import encode
from proofserve.protocol.identity import Block
from proofserve.protocol.network_schemes import ArtifactScheme
from proofserve.protocol.verdict.comparison import Claim

# Nonces of each of two blocks: some 37 pairs of them share the 32 bits that inputs depend on.
TRIED = 400_000
STORED, ASKED = ("earlier-block", "earlier-key"), ("lab-block", "lab-key")


def replayed(model: Path, count: int, seq_len: int) -> list[Claim]:
    """``count`` claims about chosen nonces of ``ASKED``, from states that ``STORED`` needed."""
    stored = {_word(STORED, nonce): nonce for nonce in range(TRIED)}
    pairs = [(n, stored[word]) for n in range(TRIED) if (word := _word(ASKED, n)) in stored][:count]
    network = load(model, "float32", "cpu")
    kept: list[Tensor] = []
    before = ArtifactScheme().for_block(Block(STORED[0], 1), network.facts, torch.device("cpu"))
    finish = before.finish

    def keep(key: str, nonces: Sequence[int], states: Tensor) -> Tensor:
        kept.append(states.clone())
        return finish(key, nonces, states)

    before.finish = keep  # type: ignore[method-assign]
    old = [nonce for _, nonce in pairs]
    proof_values(before, STORED[1], seq_len, [Run(network, old)], 8)
    now: Any = ArtifactScheme().for_block(Block(ASKED[0], 2), network.facts, torch.device("cpu"))
    chosen = [nonce for nonce, _ in pairs]
    vectors = now.finish(ASKED[1], chosen, torch.cat(kept)).numpy()
    return [Claim(*pair) for pair in zip(chosen, encode(vectors), strict=True)]


def _word(of: tuple[str, str], nonce: int) -> bytes:
    return hashlib.sha256(f"{of[0]}_{of[1]}_nonce{nonce}".encode()).digest()[:4]
