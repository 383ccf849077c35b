"""Small checkpoints with seeded random weights, for a machine that cannot download real ones."""

from proofserve.models.architectures import ARCHITECTURES, SHAPES
from proofserve.models.errors import DirectoryInUseError, ModelError, UnknownModelError
from proofserve.models.writer import DTYPES, ModelSummary, write_model

__all__ = [
    "ARCHITECTURES",
    "DTYPES",
    "SHAPES",
    "DirectoryInUseError",
    "ModelError",
    "ModelSummary",
    "UnknownModelError",
    "write_model",
]
