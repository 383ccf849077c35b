"""The routes that take a body, each with a body that it accepts."""

from typing import Any, NamedTuple

from api.distance_bodies import CLAIMS
from fuzz.hostile import Form
from fuzz.nodes import POW
from gateway.scripted import MODEL
from proofserve.gateway.gateway import ROUTES

COUNTS = ("node_id", "node_count", "block_height", "batch_size")


class Route(NamedTuple):
    """A route, and the form of a body that it accepts."""

    path: str
    form: Form


def node_routes(order: dict[str, Any], distance: dict[str, Any]) -> list[Route]:
    """Routes of a node that accepts ``order`` and ``distance``. It reads all of their fields."""
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
        Route(f"{POW}/generate", job),
        Route(f"{POW}/validate", claims),
        Route(f"{POW}/init/generate", artifact),
        Route(f"{POW}/init/generate", other),
        Route(f"{POW}/init", other),
        Route(f"{POW}/init/validate", other),
    ]


def gateway_routes(backend: str) -> list[Route]:
    """Routes of a gateway with ``backend``. It reads only a few fields of a relayed body."""
    lengths = ("n", "max_tokens", "max_completion_tokens", "max_output_tokens")
    relayed = {path.decode(): route for path, route in ROUTES.items() if not route.form}
    return [
        Route(
            path,
            Form({"model": MODEL, route.prompts[0]: "x"}, ("model",), lengths, reads_all=False),
        )
        for path, route in relayed.items()
    ] + [
        Route(f"/admin/{order}", Form({"backend": backend}, ("backend",)))
        for order in ("drain", "undrain")
    ]
