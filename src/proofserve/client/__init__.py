"""For programs that use nodes: verdicts, calibrations, and a recorder of chats with receipts.

These names are stable: within 0.x a change of theirs is announced in CHANGELOG.md one minor version
ahead, and reports keep the fields of ``docs/api``. Everything else in proofserve may change at any
time. Each is imported when it is first used, so that a recorder does not wait for the tests of a
verdict; torch only with a checkpoint.
"""

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from proofserve.client.judging import Calibration, VerdictError, challenge, check_bundle, verify
    from proofserve.remote.recorder import Recorder

__all__ = ["Calibration", "Recorder", "VerdictError", "challenge", "check_bundle", "verify"]


def __getattr__(name: str) -> object:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    home = "proofserve.remote.recorder" if name == "Recorder" else "proofserve.client.judging"
    return getattr(import_module(home), name)
