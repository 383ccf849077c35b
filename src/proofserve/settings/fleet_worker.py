"""Settings of a fleet's worker: its variables, which are also options."""

from pydantic import Field, SecretStr
from pydantic_settings import BaseSettings

from proofserve.settings.fleet import CONFIG
from proofserve.settings.node import Texts


class FleetWorkerSettings(BaseSettings):
    """The settings of a worker; each field is a variable and an option of ``fleet worker``."""

    model_config = CONFIG

    database: str = "proofserve-fleet.sqlite"
    """The database of the fleet: SQLite file, or postgresql://USER:PASSWORD@HOST/NAME."""
    model: Texts = ()
    """Folder of a checkpoint whose members this worker verifies. Several: repeat the option."""
    device: str = "cpu"
    """Where to recompute: cpu, or cuda."""
    forward_batch: int = Field(8, ge=1)
    """Nonces that are recomputed in one forward."""
    member_key: SecretStr | None = None
    """The operators' key of all members, to have them open roots; better as a variable."""
    attempts: int = Field(3, ge=1)
    """How often this worker tries a job that a fault ended, with pauses of 1 s, 2 s, ..."""
    stop_wait_sec: int = Field(25, ge=0)
    """Longest time that a worker finishes its job after SIGTERM; then another one gets it."""
    worker_name: str | None = Field(None, min_length=1, max_length=100)
    """How operators see this worker; unset: the host's name and a number."""
