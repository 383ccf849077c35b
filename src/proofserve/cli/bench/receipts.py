"""``proofserve bench receipts``: two servers of the same model, one with receipts."""

from typing import Annotated

import typer

from proofserve.cli.bench.running import Arch, exit_if_failed, show, small_model
from proofserve.cli.model import SmallModel
from proofserve.cli.options import Json, Size
from proofserve.cli.session import open_session
from proofserve.lab.bench.receipts import ReceiptsPlan, measure_receipts, receipts_report
from proofserve.lab.report.machine import machine

# By the model's size: the least throughput with receipts over that without. The engine spends less
# of its time on the model itself when that is small.
LEAST_RATIO = {"tiny": 0.97, "small": 0.99}
# No proof runs, so its size has no meaning here.
_FORWARD_BATCH = 8


def receipts(
    *,
    size: Size = "tiny",
    arch: Arch = "qwen3",
    clients: Annotated[int, typer.Option(help="Chats at a time.", min=1)] = 16,
    max_tokens: Annotated[int, typer.Option(help="About so many tokens of each chat.", min=2)] = 64,
    chats: Annotated[int, typer.Option(help="Chats of a turn.", min=1)] = 64,
    pairs: Annotated[int, typer.Option(help="Pairs of turns: without, with.", min=1)] = 20,
    compared: Annotated[
        int, typer.Option(help="Greedy chats whose answers are compared.", min=1)
    ] = 50,
    json: Json = None,
) -> None:
    """Measure the cost of receipts for chat: its speed with them and without.

    It starts two servers of the same model, one with receipts, and asks them
    in turns, so that a machine whose speed drifts slows both alike. Greedy
    answers must be the same byte for byte, and each must have its receipt.

    \b
    proofserve bench receipts --json figures.json
    proofserve bench receipts --size small
    """
    small = SmallModel(arch, size)
    plan = ReceiptsPlan(
        small.name,
        LEAST_RATIO["small" if size == "small" else "tiny"],
        clients,
        tokens=max_tokens,
        chats=chats,
        pairs=pairs,
        answers=compared,
    )
    with open_session() as session:
        plain = small_model(small, _FORWARD_BATCH, session)
        kept = small_model(small, _FORWARD_BATCH, session, receipts=True)
        with plain.start() as off, kept.start() as on:
            found = measure_receipts(off, on, plan, session.line)
            report = receipts_report(plan, found, {**machine(), **on.versions()})
        show(report, json, session)
    exit_if_failed(report)
