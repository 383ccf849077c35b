"""The checkpoints of a worker: they compute what members should have sent."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import NoReturn

from proofserve.engines.checkpoints import weights_digest
from proofserve.fleet.verification.control import queue_name
from proofserve.fleet.verification_records import VerificationTask
from proofserve.lab.calibrate.calibration_file import checkpoint_shape
from proofserve.lab.client.errors import LabError
from proofserve.protocol.errors import ProtocolError
from proofserve.settings.fleet import FleetWorkerSettings
from proofserve.wiring.judges import JudgingOptions
from proofserve.wiring.validator import CheckpointValidator, ValidatorSetup, proofs_of
from proofserve.wiring.verification.checking import SampleChecker
from proofserve.wiring.verification.judging import Truth


@dataclass(frozen=True, slots=True)
class WorkerCheckpoints:
    """The checkpoints of a worker, by queue, and how it computes with them."""

    folders: Mapping[str, Path]
    device: str = "cpu"
    forward_batch: int = 8


class CheckpointTruths:
    """Implements ``checking.TruthSource``. A checkpoint is loaded once, at its first job."""

    def __init__(self, checkpoints: WorkerCheckpoints) -> None:
        self._checkpoints = checkpoints
        self._loaded: dict[ValidatorSetup, CheckpointValidator] = {}

    def truth(self, task: VerificationTask, options: JudgingOptions) -> Truth:
        job, work = task.job, task.round.spec.work
        folder = self._checkpoints.folders.get(job.queue)
        if folder is None:
            raise LabError(f"this worker has no checkpoint for {job.queue}; give it --model")
        setup = ValidatorSetup(folder, self._checkpoints.device)
        if measured := options.calibration:
            served, kv_dtype = measured.served_dtype, measured.kv_dtype
            setup = replace(setup, served_dtype=served, kv_dtype=kv_dtype)
        if setup not in self._loaded:
            self._loaded[setup] = CheckpointValidator(setup, _no_work)
        known = self._loaded[setup]
        models, shape = [job.model or folder.name, folder.name], checkpoint_shape(folder)
        options.require(work, models, shape, known.weights_digest, known.is_dense)
        validator = known.with_other(proofs_of(work, self._checkpoints.forward_batch))
        return Truth(validator.truth, validator.weights_digest, validator)


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
    return WorkerCheckpoints(found, settings.device, settings.forward_batch)


def checker_of(settings: FleetWorkerSettings, checkpoints: WorkerCheckpoints) -> SampleChecker:
    key = settings.member_key
    secret = None if key is None else key.get_secret_value()
    return SampleChecker(CheckpointTruths(checkpoints), settings.forward_batch, secret)


def _no_work(*_: object) -> NoReturn:
    raise AssertionError("each job brings its own work")
