"""The checkpoints of a worker: they compute what members should have sent."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import NoReturn

from proofserve.engines.checkpoints.digest import weights_digest
from proofserve.fleet.verification.policy import queue_name
from proofserve.fleet.verification_records import VerificationTask
from proofserve.lab.calibrate.calibration_file import checkpoint_shape
from proofserve.lab.client.errors import LabError
from proofserve.protocol.errors import ProtocolError
from proofserve.settings.fleet_worker import FleetWorkerSettings
from proofserve.wiring.judges import JudgingOptions
from proofserve.wiring.validator import CheckpointValidator, ValidatorSetup, proofs_of
from proofserve.wiring.verification.checking import SampleChecker
from proofserve.wiring.verification.judging import Truth


@dataclass(frozen=True, slots=True)
class WorkerCheckpoints:
    """The checkpoints of a worker, by queue, and how it computes with them."""

    folders: Mapping[str, Path]
    device: str = "cpu"
    dtype: str | None = None
    forward_batch: int = 8


class CheckpointTruths:
    """Implements ``checking.TruthSource``. A checkpoint is loaded once, at its first job."""

    def __init__(self, checkpoints: WorkerCheckpoints) -> None:
        self._checkpoints = checkpoints
        self._loaded: dict[tuple[Path, str | None], CheckpointValidator] = {}

    def truth(self, task: VerificationTask, options: JudgingOptions) -> Truth:
        job, work = task.job, task.round.spec.work
        folder = self._checkpoints.folders.get(job.queue)
        if folder is None:
            raise LabError(f"this worker has no checkpoint for {job.queue}; give it --model")
        measured = options.calibration
        dtype = self._checkpoints.dtype
        dtype = measured.validator_dtype(dtype) if measured else dtype
        options.require(work, [job.model or folder.name, folder.name], checkpoint_shape(folder))
        known = self._validator(folder, dtype)
        validator = known.with_other(proofs_of(work, self._checkpoints.forward_batch))
        return Truth(validator.truth, validator.weights_digest, validator)

    def _validator(self, folder: Path, dtype: str | None) -> CheckpointValidator:
        if (folder, dtype) not in self._loaded:
            setup = ValidatorSetup(folder, dtype, self._checkpoints.device)
            self._loaded[folder, dtype] = CheckpointValidator(setup, _no_work)
        return self._loaded[folder, dtype]


def worker_checkpoints(settings: FleetWorkerSettings) -> WorkerCheckpoints:
    """The checkpoints in the settings. Raises ValueError.

    A checkpoint is known by its weights, and by the name of its folder in fleets whose members do
    not say their weights.
    """
    if not settings.model:
        raise ValueError("--model: name the folder of at least one checkpoint")
    found: dict[str, Path] = {}
    for text in settings.model:
        folder = Path(text).absolute()
        try:
            digest = weights_digest(folder)
        except (ProtocolError, OSError) as error:
            raise ValueError(f"--model {text}: {error}") from error
        found |= {queue_name(digest, None): folder, queue_name(None, folder.name): folder}
    return WorkerCheckpoints(found, settings.device, settings.dtype, settings.forward_batch)


def checker_of(settings: FleetWorkerSettings, checkpoints: WorkerCheckpoints) -> SampleChecker:
    key = settings.member_key
    secret = None if key is None else key.get_secret_value()
    return SampleChecker(CheckpointTruths(checkpoints), settings.forward_batch, secret)


def _no_work(*_: object) -> NoReturn:
    raise AssertionError("each job brings its own work")
