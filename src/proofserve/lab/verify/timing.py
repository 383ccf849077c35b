"""How long it takes to clear an honest node, and how much of that the suspects take."""

import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from proofserve.lab.client.errors import LabError
from proofserve.lab.report.figures import Figure
from proofserve.lab.report.report import Report
from proofserve.lab.verify.direction import KernelBank
from proofserve.lab.verify.judges import Vectors
from proofserve.lab.verify.verification import Verification
from proofserve.protocol.verdict.sequential import SequentialResult


class TimedBank:
    """The bank ``of``; ``seconds`` were spent on the predictions of its suspects."""

    def __init__(self, of: KernelBank) -> None:
        self._of = of
        self.names = of.names
        self.kernels = of.kernels
        self.seconds = 0.0

    def predictions(self, name: str, nonces: Sequence[int]) -> Vectors:
        began = time.monotonic()
        found = self._of.predictions(name, nonces)
        self.seconds += time.monotonic() - began
        return found

    def own_errors(self, nonces: Sequence[int]) -> Vectors:
        return self._of.own_errors(nonces)

    def kernel_errors(self, kernel: str, nonces: Sequence[int]) -> Vectors:
        return self._of.kernel_errors(kernel, nonces)


def bench_verification(
    name: str,
    bank: KernelBank,
    verified: Callable[[KernelBank], Verification],
    setup: Mapping[str, Any],
    where: Mapping[str, str | int],
) -> Report:
    """Time one verification of an honest node of the model ``name`` by a ``bank`` that is loaded.

    Raises LabError if it does not end with the node cleared: then it took no time to clear.
    """
    timed = TimedBank(bank)
    began = time.monotonic()
    outcome = verified(timed)
    seconds = time.monotonic() - began
    if outcome.verdict is not SequentialResult.HONEST:
        raise LabError(
            f"the honest node ended {outcome.verdict} after {outcome.nonces_used} nonces;"
            " give more --nonces, or a calibration of more kernels"
        )
    figures = (
        Figure("seconds_to_honest", seconds, "from the first nonce to the verdict, model loaded"),
        Figure("nonces", float(outcome.nonces_used), "recomputed until then"),
        Figure(
            "share_of_suspects", timed.seconds / seconds, "of that time, for the direction test"
        ),
    )
    return Report(f"verification, {name}", figures, setup, {}, where)
