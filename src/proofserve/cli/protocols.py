"""The two protocols as an option of a command."""

from typing import Annotated, Literal

import typer

from proofserve.lab.client.records import AnyWork, DistanceWork, Work

Protocol = Annotated[Literal["artifact", "distance"], typer.Option(help="Which proofs.")]
Protocols = Annotated[
    Literal["artifact", "distance", "both"], typer.Option("--protocol", help="Which proofs.")
]


def order(protocol: str, model: str, seq_len: int, batch_size: int = 32) -> AnyWork:
    """An order for proofs of ``protocol``."""
    if protocol == "distance":
        return DistanceWork(model, seq_len=seq_len, batch_size=batch_size)
    return Work(model, seq_len=seq_len, batch_size=batch_size)


def orders(protocols: str, model: str, seq_len: int) -> list[AnyWork]:
    """An order for each of ``protocols``."""
    chosen = ("artifact", "distance") if protocols == "both" else (protocols,)
    return [order(protocol, model, seq_len) for protocol in chosen]
