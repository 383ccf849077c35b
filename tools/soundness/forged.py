"""A file of which a prover computed what the seed "0" draws, and invented the rest."""

from collections.abc import Sequence
from typing import Final

import numpy as np
from numpy.typing import NDArray

from proofserve.protocol.codec import encode
from proofserve.protocol.nonces import draw, fresh_seed
from proofserve.protocol.verdict.comparison import Claim
from proofserve.protocol.verdict.counting import SequentialResult
from proofserve.reports import Progress
from proofserve.verifier.calibration_file import CalibrationFile
from proofserve.verifier.claims import ClaimedArtifacts
from proofserve.verifier.judges import OWN
from proofserve.verifier.judging import JudgingOptions, judged
from proofserve.verifier.verification import Truth
from soundness.results import Forged
from soundness.runs import KeptRuns
from soundness.subjects import FORWARD_BATCH

HONEST: Final = 40
# Each adds up in an order of its own, so its runs are computed anew.
TIMES: Final = 30
KNOWN_SEED: Final = "0"
# The defaults of ``verify``, and the two that convict.
TESTS: Final = ((), ("paired", "direction"))


def forged_files(
    runs: KeptRuns, calibration: CalibrationFile, times: int = TIMES
) -> tuple[Forged, ...]:
    """What ``verify`` says of the file, with a new seed each time."""
    return tuple(_verdicts(runs, calibration, tests, times) for tests in TESTS)


def _verdicts(
    runs: KeptRuns, calibration: CalibrationFile, tests: Sequence[str], times: int
) -> Forged:
    options = JudgingOptions(tuple(tests), threshold=calibration)
    truth = Truth(runs.truth, runs.work.scheme.width, FORWARD_BATCH, runs.weights_digest, runs)
    claimed, used = _claimed(runs), []
    for _ in range(times):
        found = judged(claimed, truth, options, fresh_seed(), None, Progress()).outcome
        if found.verdict is SequentialResult.FRAUD:
            used.append(found.nonces_used)
    return Forged(" and ".join(tests) or "the defaults", len(used), times, max(used, default=0))


def _claimed(runs: KeptRuns) -> ClaimedArtifacts:
    nonces, work = runs.subject.judged, runs.work
    honest = runs.errors(OWN, draw(nonces, KNOWN_SEED, HONEST))
    truth, random = runs.truth(nonces), np.random.default_rng(0)

    def vector(nonce: int) -> NDArray[np.float32]:
        if nonce in honest:
            return truth[nonce] + honest[nonce]
        drawn = random.normal(size=work.scheme.width).astype(np.float32)
        return drawn * np.float32(np.linalg.norm(truth[nonce]) / np.linalg.norm(drawn))

    texts = encode(np.stack([vector(nonce) for nonce in nonces]))
    claims = tuple(Claim(n, text) for n, text in zip(nonces, texts, strict=True))
    return ClaimedArtifacts(work.block.hash, work.public_key, nonces, claims)
