"""``proofserve bench verify``: how long a validator on this machine takes to clear a node."""

from dataclasses import replace
from pathlib import Path
from typing import Annotated

import numpy as np
import typer

from proofserve.cli.bench.running import show
from proofserve.cli.model import NAMES, checkpoint_named
from proofserve.cli.options import Device, ForwardBatch, Json
from proofserve.cli.session import open_session
from proofserve.lab.calibrate.calibration_file import calibrated, checkpoint_shape, read
from proofserve.lab.client.errors import LabError
from proofserve.lab.report.machine import machine
from proofserve.lab.verify.claimed import ClaimedArtifacts, vector_scheme
from proofserve.lab.verify.direction import KernelBank
from proofserve.lab.verify.timing import bench_verification
from proofserve.lab.verify.verification import Verification
from proofserve.protocol.codec import encode
from proofserve.protocol.identity import Block
from proofserve.protocol.nonces import fresh_seed
from proofserve.protocol.verdict.comparison import Claim
from proofserve.rounds.records import Workload
from proofserve.wiring.judges import JudgingOptions
from proofserve.wiring.verification.judging import SampleOptions, Truth, judged

# As `verify` has them.
ALPHA, BETA, P_FRAUD = 1e-6, 1e-3, 0.5
KEY = "bench"


def bench_verify(
    model: Annotated[str, typer.Argument(help=f"{', '.join(NAMES)}, or a folder.")],
    *,
    calibration: Annotated[
        Path, typer.Option(help="Of this model: what `calibrate noise --out` wrote.")
    ],
    kernel: Annotated[
        str | None,
        typer.Option(help="The honest node: one of the kernels that are emulated; else the first."),
    ] = None,
    nonces: Annotated[
        int, typer.Option(help="Size of the sample; from 80 on a forged tenth is excluded.", min=2)
    ] = 128,
    size: Annotated[str, typer.Option(help="Of a small model: tiny, small, or 0.6b.")] = "small",
    device: Device = "cpu",
    forward_batch: ForwardBatch = 8,
    json: Json = None,
) -> None:
    """Measure how long `verify` takes to clear an honest node of a model.

    The node is emulated, so no server is needed; what it claims is computed
    before the clock starts. The report shows the share of the time that goes to
    suspects, each of which is a forward by other weights.

    \b
    proofserve bench verify ./model --calibration calibration.json
    """
    # This import takes seconds, and --help must not wait for it.
    from proofserve.wiring.validator import CheckpointValidator, ValidatorSetup, proofs_of  # noqa: PLC0415

    with open_session() as session, session.interrupts.allowed():
        session.line.step(f"loading {model}, after writing it if it is not in the cache")
        found, measured = checkpoint_named(model, size), read(calibration)
        scheme = vector_scheme(measured.scheme, measured.k_dim, measured.stronger_rng)
        work = Workload(scheme, Block(fresh_seed(), 1), KEY, measured.seq_len)
        setup = ValidatorSetup(found.folder, device)
        setup = replace(setup, served_dtype=measured.served_dtype, kv_dtype=measured.kv_dtype)
        node = CheckpointValidator(setup, proofs_of(work, forward_batch))
        options = JudgingOptions((), ALPHA, BETA, None, P_FRAUD, True, calibrated(measured))
        shape, digest = checkpoint_shape(found.folder), node.weights_digest
        options.require(work, [found.name], shape, digest, node.is_dense)
        served = kernel or node.kernels[0]
        if served not in node.kernels:
            raise LabError(f"--kernel {served}: choose from {', '.join(node.kernels)}")
        session.line.step(f"computing {nonces} nonces as {served} does")
        vectors = node.honest_vectors(served, range(nonces))
        texts = encode(np.stack(list(vectors.values())))
        claims = tuple(Claim(nonce, text) for nonce, text in zip(vectors, texts, strict=True))
        claimed = ClaimedArtifacts(work.block.hash, KEY, tuple(vectors), claims)
        validator = node.with_other(proofs_of(work, forward_batch))

        def verified(bank: KernelBank) -> Verification:
            truth = Truth(validator.truth, digest, bank, node.is_dense)
            sampling = SampleOptions(fresh_seed(), None, forward_batch)
            return judged(claimed, work, truth, options, sampling, session.line).outcome

        plan = {"model": found.name, "kernel": served, "scheme": scheme.name, "sample": nonces}
        show(bench_verification(found.name, validator, verified, plan, machine()), json, session)
