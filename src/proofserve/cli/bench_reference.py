"""``proofserve bench reference``: how fast a validator is who has no vLLM."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import torch
import typer

from proofserve.cli.checkpoints import named
from proofserve.cli.session import open_desk
from proofserve.lab.bench.reference import Forward, ReferencePlan, ReferenceSubject, bench_reference
from proofserve.lab.report.machine import machine
from proofserve.protocol.artifact import ArtifactScheme
from proofserve.rounds.errors import EngineFault
from proofserve.rounds.records import Workload

if TYPE_CHECKING:
    from proofserve.engines.reference.network import Network

SEQ_LENS, BATCHES = [64, 256], [8, 32, 128]


def reference(
    model: Annotated[str, typer.Argument(help="qwen, llama, gemma, or a checkpoint's folder.")],
    *,
    size: Annotated[
        str, typer.Option(help="Of our models: tiny, small, or 0.6b (the shape of Qwen3-0.6B).")
    ] = "small",
    seq_len: Annotated[
        list[int] | None, typer.Option(help="Tokens per nonce, once or more; 64 and 256.", min=1)
    ] = None,
    batch: Annotated[
        list[int] | None, typer.Option(help="Nonces per forward, once or more; 8, 32, 128.", min=1)
    ] = None,
    dtype: Annotated[str, typer.Option(help="bfloat16, float16 or float32.")] = "bfloat16",
    device: Annotated[str, typer.Option(help="cpu or cuda.")] = "cpu",
    seconds: Annotated[float, typer.Option(help="Of each combination.", min=0.1)] = 2.0,
    json: Annotated[
        Path | None, typer.Option("--json", help="Write the figures to this file.")
    ] = None,
) -> None:
    """How many nonces a second does the reference engine recompute?

    Beside it stands its share of what the device reaches in bare matrix
    multiplications, measured in the same run. Batches that the device has
    no room for are left out.

    \b
    proofserve bench reference qwen --size small
    proofserve bench reference qwen --size 0.6b --device cuda --batch 32 --batch 512
    """
    # Two seconds of imports that other commands of the group do without.
    from proofserve.engines.reference.network import load  # noqa: PLC0415

    with open_desk() as desk:
        desk.line.step(f"loading {model}, written first unless it is in the cache")
        found = named(model, size)
        network = load(found.folder, dtype, device)
        subject = ReferenceSubject(
            found.name, network.weights, network.device, network.dtype, _forward(network)
        )
        plan = ReferencePlan(seq_len or SEQ_LENS, batch or BATCHES, seconds)
        with desk.interrupts.allowed():
            report = bench_reference(subject, plan, machine(), desk.line)
        desk.console.print(report.table())
        if json is not None:
            report.write(json)
            desk.console.print(f"figures written to {json}")


def _forward(network: "Network") -> Forward:
    from proofserve.engines.reference.engine import ReferenceEngine  # noqa: PLC0415 - as above

    def forward(seq_len: int, batch: int) -> bool:
        engine = ReferenceEngine(network, "bench", batch)
        try:
            engine.compute(Workload(ArtifactScheme(), "block", "key", seq_len), range(batch))
        except EngineFault as error:
            if isinstance(error.__cause__, torch.OutOfMemoryError):
                return False
            raise
        return True

    return forward
