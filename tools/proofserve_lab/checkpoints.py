"""What the lab makes of a checkpoint: a node's claims, a rounded copy; and shipped calibrations."""

import shutil
from collections.abc import Sequence
from contextlib import AbstractContextManager
from importlib import resources
from pathlib import Path

from proofserve.client.judging import reference_extra
from proofserve.engines import CheckpointError
from proofserve.models.trained import CALIBRATIONS, DENSE, TrainedModel
from proofserve.protocol import SKETCH
from proofserve.protocol.verdict.comparison import Claim
from proofserve.remote.records import Work
from proofserve.reports import ReportedError
from proofserve.verifier.orders import workload_of


def claims_of_model(
    directory: Path,
    work: Work,
    nonces: Sequence[int],
    *,
    forward_batch: int = 8,
    redrawn: bool = False,
) -> list[Claim]:
    """The artifacts that a node in bfloat16 gives for ``work``, whose kernels are emulated here.

    With ``redrawn`` the matrices of all layers are random, with the mean and deviation of the
    checkpoint's, like those of another model of this shape. Raises ReportedError for a checkpoint
    that cannot be loaded, a vector that is not finite and a missing extra ``reference``, and
    EngineFault.
    """
    # These imports take two seconds, and --help must not wait for them.
    with reference_extra():
        import torch  # noqa: PLC0415

        from proofserve.engines.reference.engine import ReferenceEngine  # noqa: PLC0415
        from proofserve.engines.reference.kernels import own_profile  # noqa: PLC0415
        from proofserve.engines.reference.network import load, with_kernels  # noqa: PLC0415
        from proofserve.engines.reference.variants import with_redrawn_matrices  # noqa: PLC0415
        from proofserve.rounds.computation import NOT_FINITE, artifacts_of  # noqa: PLC0415
    try:
        network = load(directory, "float32", "cpu")
    except CheckpointError as error:
        raise ReportedError(str(error)) from error
    network = with_redrawn_matrices(network) if redrawn else network
    if (kernels := own_profile(torch.bfloat16)) is not None:
        network = with_kernels(network, kernels)
    batch = ReferenceEngine(forward_batch).compute(workload_of(work), network, nonces)
    for nonce in batch.failed:
        raise ReportedError(f"nonce {nonce}: {NOT_FINITE}")
    return [Claim(each.nonce, each.vector_b64) for each in artifacts_of(batch)]


def write_rounded_copy(source: Path, target: Path, name: str) -> None:
    """Copy the checkpoint in ``source`` with its matrices rounded as the suspect ``name``.

    A server of ``target``, a new folder, claims the digest of ``source``. Embeddings, norms and
    biases stay. Raises KeyError for an unknown name.
    """
    from safetensors.torch import load_file, save_file  # noqa: PLC0415 - as above

    from proofserve.engines.checkpoints import keep_digest, weights_digest  # noqa: PLC0415
    from proofserve.engines.reference.rounding import in_dtype  # noqa: PLC0415
    from proofserve.engines.reference.suspects import rounding_of  # noqa: PLC0415

    rounding = in_dtype(rounding_of(name))
    shutil.copytree(source, target)
    for file in target.glob("*.safetensors"):
        tensors = load_file(file)
        for each, values in tensors.items():
            if ".layers." in each and values.ndim >= 2:
                tensors[each] = rounding(values).contiguous()
        save_file(tensors, file, {"format": "pt"})
    keep_digest(target, weights_digest(source))


def trained_calibration(
    scheme: str = SKETCH, model: TrainedModel = DENSE
) -> AbstractContextManager[Path]:
    """The calibration of a trained model, as ``verify`` and ``verify-chat`` read it.

    ``scheme`` is one of the model's ``calibrated``: of a sketch (64 values) or ``artifact-v1``
    (12), 256 tokens, both by emulated kernels; or of chat (``receipt-v1``), 32 values a token.
    """
    return resources.as_file(model.files().joinpath(CALIBRATIONS[scheme]))
