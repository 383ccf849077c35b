"""Loads a checkpoint to judge by; torch is imported only then."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from proofserve.reports import ReportedError
from proofserve.rounds.records import Workload
from proofserve.verifier.calibration_file import CalibrationFile
from proofserve.verifier.verification import Truth

if TYPE_CHECKING:
    from proofserve.verifier.validator import CheckpointValidator, ValidatorSetup


@contextmanager
def reference_extra() -> Iterator[None]:
    """Raises ReportedError, which names the extra, if an import within lacks a package."""
    try:
        yield
    except ModuleNotFoundError as error:
        raise ReportedError(f"{error}; install proofserve with its extra `reference`") from error


def validator_setup(
    model: Path,
    device: str = "cpu",
    suspects: Sequence[Path] | None = None,
    measured: CalibrationFile | None = None,
    kv_dtype: str = "auto",
) -> "ValidatorSetup":
    """Honest nodes serve as in the calibration ``measured``, or as the checkpoint says.

    Raises ReportedError without the extra ``reference``, and for a ``kv_dtype`` that no server has.
    """
    # Its import takes seconds, and --help must not wait for it.
    with reference_extra():
        from proofserve.verifier.validator import KV_DTYPES, ValidatorSetup  # noqa: PLC0415
    if kv_dtype not in KV_DTYPES:
        raise ReportedError(f"--kv-cache {kv_dtype}: choose from {', '.join(KV_DTYPES)}")
    setup = ValidatorSetup(model, device, tuple(suspects or ()), kv_dtype=kv_dtype)
    return setup.serving_as(measured)


def proof_validator(
    setup: "ValidatorSetup",
    work: Workload,
    forward_batch: int,
    passed: Callable[[int, int], None] = lambda _index, _of: None,
) -> "CheckpointValidator":
    """Loads the checkpoint. ``passed`` hears of each layer, of how many."""
    from proofserve.verifier.validator import CheckpointValidator, proofs_of  # noqa: PLC0415

    return CheckpointValidator(setup, proofs_of(work, forward_batch, passed))


def truths_of_checkpoint(
    setup: "ValidatorSetup",
    work: Workload,
    forward_batch: int,
    passed: Callable[[int, int], None] = lambda _index, _of: None,
    measured: CalibrationFile | None = None,
) -> Callable[[Workload], Truth]:
    """Load a model once, for ``work`` and others, as ``proof_validator``.

    Raises ReportedError unless the figures of ``measured`` hold for it.
    """
    loaded = proof_validator(setup, work, forward_batch, passed)
    loaded.require(measured, work)
    return lambda about: loaded.truth_about(about, forward_batch, passed)
