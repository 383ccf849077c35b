"""The forward of a small qwen3 in float64, and weights that need no random generator.

With experts it is a small qwen3_moe, whose experts are given and not routed.
"""

import hashlib
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

Weights = dict[str, NDArray[np.float32]]
Floats = NDArray[np.float64]


@dataclass(frozen=True)
class Shape:
    """The dimensions; their names are those of transformers' configuration."""

    vocab_size: int = 64
    hidden_size: int = 32
    intermediate_size: int = 48
    num_hidden_layers: int = 2
    num_attention_heads: int = 4
    num_key_value_heads: int = 2
    head_dim: int = 8
    rope_theta: float = 10000.0
    rms_norm_eps: float = 1e-6


@dataclass(frozen=True)
class MixtureShape(Shape):
    """As above; every layer has experts."""

    num_experts: int = 6
    num_experts_per_tok: int = 2
    moe_intermediate_size: int = 24
    norm_topk_prob: bool = True


def weights_of(shape: Shape) -> Weights:
    """Every weight under its name in a checkpoint, drawn from its name."""
    d, h = shape.hidden_size, shape.head_dim
    queries, keys = shape.num_attention_heads * h, shape.num_key_value_heads * h
    weights = {
        "model.embed_tokens.weight": _matrix("embed_tokens", shape.vocab_size, d),
        "model.norm.weight": _norm("norm", d),
    }
    for index in range(shape.num_hidden_layers):
        at = f"model.layers.{index}."
        weights |= {
            at + "input_layernorm.weight": _norm(at + "input", d),
            at + "post_attention_layernorm.weight": _norm(at + "post", d),
            at + "self_attn.q_proj.weight": _matrix(at + "q", queries, d),
            at + "self_attn.k_proj.weight": _matrix(at + "k", keys, d),
            at + "self_attn.v_proj.weight": _matrix(at + "v", keys, d),
            at + "self_attn.o_proj.weight": _matrix(at + "o", d, queries),
            at + "self_attn.q_norm.weight": _norm(at + "q_norm", h),
            at + "self_attn.k_norm.weight": _norm(at + "k_norm", h),
        }
        if isinstance(shape, MixtureShape):
            weights[at + "mlp.gate.weight"] = _matrix(at + "router", shape.num_experts, d)
            for expert in range(shape.num_experts):
                to = f"{at}mlp.experts.{expert}."
                weights |= _mlp_weights(to, d, shape.moe_intermediate_size)
        else:
            weights |= _mlp_weights(at + "mlp.", d, shape.intermediate_size)
    return weights


def _mlp_weights(at: str, d: int, m: int) -> Weights:
    return {
        at + "gate_proj.weight": _matrix(at.replace("mlp.", "") + "gate", m, d),
        at + "up_proj.weight": _matrix(at.replace("mlp.", "") + "up", m, d),
        at + "down_proj.weight": _matrix(at.replace("mlp.", "") + "down", d, m),
    }


def forward(
    shape: Shape, weights: Weights, ids: list[int], experts: list[list[list[int]]] | None = None
) -> Floats:
    """The states behind the final norm, float64 [len(ids), hidden_size].

    ``experts`` of a mixture are those of each position in each layer.
    """
    exact = {name: values.astype(np.float64) for name, values in weights.items()}
    x = exact["model.embed_tokens.weight"][ids]
    for index in range(shape.num_hidden_layers):
        at = f"model.layers.{index}."
        layer = {name.removeprefix(at): w for name, w in exact.items() if name.startswith(at)}
        x = x + _attention(shape, layer, _rms(x, layer["input_layernorm.weight"], shape))
        normed = _rms(x, layer["post_attention_layernorm.weight"], shape)
        x = x + (
            _mlp(layer, "mlp.", normed)
            if experts is None
            else _mixed(layer, normed, experts[index])
        )
    return _rms(x, exact["model.norm.weight"], shape)


def _attention(shape: Shape, layer: dict[str, Floats], x: Floats) -> Floats:
    def heads(kind: str, count: int) -> Floats:
        return (x @ layer[f"self_attn.{kind}_proj.weight"].T).reshape(len(x), count, -1)

    q = heads("q", shape.num_attention_heads)
    k = heads("k", shape.num_key_value_heads)
    v = heads("v", shape.num_key_value_heads)
    q = _turned(shape, _rms(q, layer["self_attn.q_norm.weight"], shape))
    k = _turned(shape, _rms(k, layer["self_attn.k_norm.weight"], shape))
    share = shape.num_attention_heads // shape.num_key_value_heads
    mixed = np.empty_like(q)
    for head in range(shape.num_attention_heads):
        scores = q[:, head] @ k[:, head // share].T / np.sqrt(shape.head_dim)
        scores[np.triu_indices(len(x), 1)] = -np.inf
        shares = np.exp(scores - scores.max(axis=1, keepdims=True))
        shares /= shares.sum(axis=1, keepdims=True)
        mixed[:, head] = shares @ v[:, head // share]
    return mixed.reshape(len(x), -1) @ layer["self_attn.o_proj.weight"].T


def _turned(shape: Shape, x: Floats) -> Floats:
    """Rotary positions: the first and second halves of a head are the two coordinates."""
    half = shape.head_dim // 2
    speeds = shape.rope_theta ** (-np.arange(half) / half)
    angles = np.arange(len(x))[:, np.newaxis] * speeds
    cos, sin = np.cos(angles)[:, np.newaxis], np.sin(angles)[:, np.newaxis]
    first, second = x[..., :half], x[..., half:]
    return np.concatenate((first * cos - second * sin, second * cos + first * sin), axis=-1)


def _mlp(layer: dict[str, Floats], at: str, x: Floats) -> Floats:
    gate = x @ layer[at + "gate_proj.weight"].T
    up = x @ layer[at + "up_proj.weight"].T
    return (gate / (1 + np.exp(-gate)) * up) @ layer[at + "down_proj.weight"].T


def _mixed(layer: dict[str, Floats], x: Floats, experts: list[list[int]]) -> Floats:
    """Each position's experts, weighed by the softmax of their scores."""
    mixed = np.zeros_like(x)
    for position, chosen in enumerate(experts):
        scores = np.exp(layer["mlp.gate.weight"][chosen] @ x[position])
        for expert, share in zip(chosen, scores / scores.sum(), strict=True):
            mixed[position] += share * _mlp(layer, f"mlp.experts.{expert}.", x[position])
    return mixed


def _rms(x: Floats, weight: Floats, shape: Shape) -> Floats:
    return x / np.sqrt((x * x).mean(axis=-1, keepdims=True) + shape.rms_norm_eps) * weight


def _matrix(name: str, rows: int, columns: int) -> NDArray[np.float32]:
    """Uniform numbers of a variance of about 1 / columns."""
    return (
        (_uniform(name, rows * columns) * np.sqrt(3 / columns)).reshape(rows, columns).astype("<f4")
    )


def _norm(name: str, length: int) -> NDArray[np.float32]:
    return (1 + _uniform(name, length) / 4).astype("<f4")


def _uniform(name: str, count: int) -> Floats:
    """``count`` numbers in [-1, 1)."""
    stream = hashlib.shake_256(name.encode()).digest(4 * count)
    return np.frombuffer(stream, dtype="<i4").astype(np.float64) / 2**31
