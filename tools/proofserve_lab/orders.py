"""The orders of checks and benchmarks, and the options that choose them."""

from typing import Annotated, Literal

import typer

from proofserve.protocol import DEFAULT_SCHEME, default_k_dim
from proofserve.remote.records import AnyWork, DistanceWork, Work

Protocol = Annotated[Literal["artifact", "distance"], typer.Option(help="Of the proofs.")]
Protocols = Annotated[
    Literal["artifact", "distance", "both"], typer.Option("--protocol", help="Of the proofs.")
]
SchemeName = Annotated[
    Literal["artifact-v1", "artifact-v1-layers", "sketch-v1", "sketch-v2"] | None,
    typer.Option("--scheme", help="Of the artifact protocol; the node's default if unset."),
]


def work_of_scheme(scheme: str | None, model: str, seq_len: int, batch_size: int = 32) -> Work:
    k_dim = default_k_dim(scheme or DEFAULT_SCHEME)
    return Work(model, seq_len=seq_len, batch_size=batch_size, k_dim=k_dim, scheme=scheme)


def work_of(
    protocol: str, model: str, seq_len: int, batch_size: int = 32, scheme: str | None = None
) -> AnyWork:
    """An order of the protocol; ``scheme`` is for the artifact protocol."""
    if protocol == "distance":
        return DistanceWork(model, seq_len=seq_len, batch_size=batch_size)
    return work_of_scheme(scheme, model, seq_len, batch_size)


def works_of(protocols: str, model: str, seq_len: int, scheme: str | None = None) -> list[AnyWork]:
    names = ("artifact", "distance") if protocols == "both" else (protocols,)
    return [work_of(name, model, seq_len, scheme=scheme) for name in names]
