"""The routes that take a body, each with a body that it accepts."""

from typing import Any, NamedTuple

from api.distance_bodies import CLAIMS
from fuzz.hostile import Form
from fuzz.nodes import POW
from gateway.scripted import MODEL

COUNTS = ("node_id", "node_count", "block_height", "batch_size")


class Door(NamedTuple):
    """A route, and a form of what it takes."""

    path: str
    form: Form


def doors_of_node(order: dict[str, Any], distance: dict[str, Any]) -> list[Door]:
    """Those of a node that takes ``order`` and ``distance``. All of their fields are read."""
    texts = ("block_hash", "public_key")
    artifact = Form(order, texts, COUNTS)
    other = Form(distance, texts, (*COUNTS, "seq_len", "group_id"), ("r_target", "fraud_threshold"))
    job = Form(
        order={**order, "nonces": [1, 2]},
        texts=(*texts, "scheme", "url"),
        integers=COUNTS,
        lists=("nonces",),
        takes_claims=True,
    )
    claims = Form(CLAIMS, texts, ("node_id", "block_height"), lists=("nonces", "dist"))
    return [
        Door(f"{POW}/generate", job),
        Door(f"{POW}/validate", claims),
        Door(f"{POW}/init/generate", artifact),
        Door(f"{POW}/init/generate", other),
        Door(f"{POW}/init", other),
        Door(f"{POW}/init/validate", other),
    ]


def doors_of_gateway(backend: str) -> list[Door]:
    """Those of a gateway with ``backend``. Of what is relayed it reads a few fields only."""
    lengths = ("n", "max_tokens", "max_completion_tokens", "max_output_tokens")
    relayed = {
        "/v1/chat/completions": "messages",
        "/v1/completions": "prompt",
        "/v1/embeddings": "input",
        "/v1/responses": "input",
    }
    return [
        Door(path, Form({"model": MODEL, prompt: "x"}, ("model",), lengths, reads_all=False))
        for path, prompt in relayed.items()
    ] + [
        Door(f"/admin/{order}", Form({"backend": backend}, ("backend",)))
        for order in ("drain", "undrain")
    ]
