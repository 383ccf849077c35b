"""The formulas of sketches (``docs/native.md``): seeds, prompts, signs, experts, the sketch."""

import hashlib
import math
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

VERSION = b"proofserve sketch-v1\0"


@dataclass(frozen=True)
class Setting:
    """What all nonces of one node and block share. ``weights_digest`` is in hexadecimal."""

    block_hash: str
    block_height: int
    public_key: str
    weights_digest: str
    seq_len: int
    k_dim: int

    def seed(self, label: str, nonce: int, public_key: str | None = None) -> bytes:
        key = self.public_key if public_key is None else public_key
        fields = (
            label.encode(),
            self.block_hash.encode(),
            self.block_height.to_bytes(8, "little"),
            key.encode(),
            bytes.fromhex(self.weights_digest),
            self.seq_len.to_bytes(8, "little"),
            self.k_dim.to_bytes(8, "little"),
            nonce.to_bytes(8, "little"),
        )
        text = VERSION
        for value in fields:
            text += len(value).to_bytes(4, "little") + value
        return hashlib.sha256(text).digest()

    def stream(self, label: str, nonce: int, length: int, public_key: str | None = None) -> bytes:
        return hashlib.shake_256(self.seed(label, nonce, public_key)).digest(length)

    def twins(self, nonce: int, allowed: list[int]) -> list[list[int]]:
        """The token ids of both prompts of a nonce."""
        stream = self.stream("tokens", nonce, 8 * self.seq_len)
        places = [
            int.from_bytes(stream[8 * p : 8 * p + 8], "little") % len(allowed)
            for p in range(self.seq_len)
        ]
        step = int.from_bytes(self.stream("twin", nonce, 8), "little") % (len(allowed) - 1)
        other = (places[0] + 1 + step) % len(allowed)
        return [[allowed[p] for p in places], [allowed[p] for p in (other, *places[1:])]]

    def signs(self, nonce: int) -> NDArray[np.int64]:
        """+1 and -1 for each position [seq_len], the same for both twins."""
        stream = self.stream("signs", nonce, math.ceil(self.seq_len / 8))
        return _signs(stream, self.seq_len)

    def rows(self, hidden: int) -> NDArray[np.int64]:
        """+1 and -1 [k_dim, hidden], the same for every key and nonce of the block."""
        count = self.k_dim * hidden
        stream = self.stream("rows", 0, math.ceil(count / 8), public_key="")
        return _signs(stream, count).reshape(self.k_dim, hidden)

    def experts(
        self, layer: int, experts: int, chosen: int, groups: int = 1, chosen_groups: int = 1
    ) -> list[list[int]]:
        """The experts of each position in a layer, of sketch-v2."""
        stream = self.stream("routing", 0, 32 * self.seq_len * (layer + 1), public_key="")
        size = experts // groups
        rows = []
        for position in range(self.seq_len):
            at = 32 * (layer * self.seq_len + position)
            a, b, c, d = (
                int.from_bytes(stream[at + i : at + i + 8], "little") for i in (0, 8, 16, 24)
            )
            of_groups = _progression(c, d, groups, chosen_groups)
            places = _progression(a, b, size * chosen_groups, chosen)
            rows.append([of_groups[place // size] * size + place % size for place in places])
        return rows

    def sketch(self, nonce: int, states: NDArray[np.float64]) -> NDArray[np.float64]:
        """z [2, k_dim] of the twins' final states [2, seq_len, hidden]."""
        sketches = []
        for twin in states:
            y = np.zeros(twin.shape[1])
            for sign, h in zip(self.signs(nonce), twin, strict=True):
                y += sign * h / math.sqrt(float(h @ h))
            y /= math.sqrt(float(y @ y))
            sketches.append(self.rows(twin.shape[1]) @ y / math.sqrt(self.k_dim))
        return np.array(sketches)


def digest_of(tensors: dict[str, tuple[str, NDArray[np.generic]]]) -> str:
    """The weights digest of tensors by name, each with its dtype as safetensors names it."""
    lines = b""
    for name in sorted(tensors):
        dtype, values = tensors[name]
        shape = "[" + ",".join(map(str, values.shape)) + "]"
        content = hashlib.sha256(values.tobytes()).hexdigest()
        lines += f"{name} {dtype} {shape} {content}\n".encode()
    return hashlib.sha256(lines).hexdigest()


def _progression(first: int, step: int, modulus: int, count: int) -> list[int]:
    steps = [b for b in range(1, modulus + 1) if math.gcd(b, modulus) == 1]
    return [(first + j * steps[step % len(steps)]) % modulus for j in range(count)]


def _signs(stream: bytes, count: int) -> NDArray[np.int64]:
    return np.array([1 if stream[i // 8] >> (i % 8) & 1 else -1 for i in range(count)])
