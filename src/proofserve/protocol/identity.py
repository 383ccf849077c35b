"""The seed strings of protocol section 0.2 for a block, a node and a nonce, and their seeds."""

import hashlib
import struct
from dataclasses import dataclass


def projection_string(block_hash: str) -> str:
    return f"{block_hash}_lm_head"


def target_string(block_hash: str) -> str:
    return f"{block_hash}_target"


def layer_string(block_hash: str, layer: int) -> str:
    """Name of the reflection after decoder layer ``layer``, counted from 0 over the whole model."""
    return f"{block_hash}_layer_{layer}_householder"


@dataclass(frozen=True, slots=True)
class Block:
    """The block that a proof is for. Schemes of version 1 do not use its height."""

    hash: str
    height: int


@dataclass(frozen=True)
class Challenge:
    """One node's work on one block. Its methods give the seed strings of a nonce."""

    block_hash: str
    public_key: str

    def input_string(self, nonce: int) -> str:
        """Name of the input embeddings; the only string without ``_`` before the number."""
        return f"{self.block_hash}_{self.public_key}_nonce{nonce}"

    def sign_string(self, nonce: int) -> str:
        return self._of_nonce(nonce, "signs")

    def reflection_string(self, nonce: int, index: int) -> str:
        return self._of_nonce(nonce, f"hidden_r{index}")

    def pick_string(self, nonce: int, k_dim: int) -> str:
        return self._of_nonce(nonce, f"pick_{k_dim}")

    def rotation_string(self, nonce: int, k_dim: int, step: int) -> str:
        return self._of_nonce(nonce, f"haar_hh_{k_dim}_{step}")

    def _of_nonce(self, nonce: int, use: str) -> str:
        return f"{self.block_hash}_{self.public_key}_nonce_{nonce}_{use}"


def seed(string: str) -> int:
    """The ordinary seed of a string: the first word of its digest (protocol 0.1)."""
    return words(string)[0]


def words(string: str) -> tuple[int, ...]:
    """All eight big-endian uint32 words of the SHA-256 digest of a string (protocol 0.9)."""
    return struct.unpack(">8I", hashlib.sha256(string.encode()).digest())
