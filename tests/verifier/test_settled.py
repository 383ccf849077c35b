"""What a verdict becomes in view of who chose the nonces, and who the experts."""

from dataclasses import replace

import numpy as np
import pytest

from proofserve.protocol import ARTIFACT, SKETCH, SKETCH_2
from proofserve.protocol.verdict.comparison import ClaimError
from proofserve.protocol.verdict.counting import SequentialResult
from proofserve.verifier.claims import ClaimedArtifacts
from proofserve.verifier.judges import Opinion
from proofserve.verifier.verification import Truth, Verification, settled
from verifier.toy_null import WIDTH, ToyBank

CLAIMED = ClaimedArtifacts("0xabc", "me", (), ())


def found(test: str, result: SequentialResult) -> Verification:
    errors = (ClaimError(0, np.zeros(WIDTH, np.float32)),)
    return Verification(result, (Opinion(test, result, 1, "", {}),), errors)


def truth(*, is_dense: bool) -> Truth:
    return Truth(lambda _nonces: {}, WIDTH, 8, validator=ToyBank({}), is_dense=is_dense)


@pytest.mark.parametrize("scheme", [ARTIFACT, SKETCH])
def test_a_footprint_clears_no_mixture_that_chooses_its_experts(scheme: str) -> None:
    claimed = replace(CLAIMED, scheme=scheme)
    honest = found("footprint", SequentialResult.HONEST)
    outcome = settled(honest, claimed, truth(is_dense=False))
    assert outcome.verdict is SequentialResult.UNDECIDED
    assert outcome.opinions[-1].test == "experts"
    assert SKETCH_2 in outcome.opinions[-1].text
    # Other models, and what convicts or counts, stay.
    assert settled(honest, claimed, truth(is_dense=True)) == honest
    for other in (found("count", SequentialResult.HONEST), found("paired", SequentialResult.FRAUD)):
        assert settled(other, claimed, truth(is_dense=False)) == other


def test_a_scheme_that_chooses_the_experts_clears_a_mixture() -> None:
    honest = found("footprint", SequentialResult.HONEST)
    claimed = replace(CLAIMED, scheme=SKETCH_2)
    assert settled(honest, claimed, truth(is_dense=False)) == honest


def test_a_trusted_engine_clears_any_mixture() -> None:
    honest = found("exact", SequentialResult.HONEST)
    claimed = replace(CLAIMED, scheme=SKETCH)
    assert settled(honest, claimed, Truth(lambda _nonces: {}, WIDTH, 8)) == honest
