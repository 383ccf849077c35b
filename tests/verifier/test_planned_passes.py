"""The planned passes of a calibration and of an audit are those that they make."""

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest

from proofserve.engines.reference.engine import ReferenceEngine, Run
from proofserve.protocol.identity import Block
from proofserve.protocol.sketch import SketchScheme
from proofserve.reports import Progress
from proofserve.rounds.records import ProofBatch, Workload
from proofserve.verifier.audit.attacks import AT_ONCE, attacks
from proofserve.verifier.audit.audit import AuditOptions, ConvictionRule, audit
from proofserve.verifier.audit.deployment import AuditSetup, CheckpointDeployment
from proofserve.verifier.noise import MeasuringPlan, measured_calibration
from proofserve.verifier.plans import Pass, audit_passes, measuring_passes
from proofserve.verifier.validator import CheckpointValidator, ValidatorSetup, proofs_of

SCHEME = SketchScheme()
ABOUT = {
    **{"model": "tiny", "shape": {}, "kv_dtype": "auto", "scheme": SCHEME.name, "k_dim": 64},
    **{"stronger_rng": False, "seq_len": 8, "block_hash": "block", "public_key": "key"},
}


@pytest.fixture
def made(monkeypatch: pytest.MonkeyPatch) -> list[list[int]]:
    """The nonces of each run of each pass that engines were asked for; vectors are random."""
    passes: list[list[int]] = []
    drawn = np.random.default_rng(0)

    def compute_all(
        _engine: ReferenceEngine, work: Workload, runs: Sequence[Run]
    ) -> list[ProofBatch]:
        passes.append([len(run.nonces) for run in runs])
        return [
            ProofBatch(
                tuple(run.nonces),
                drawn.normal(0.0, 0.02, (len(run.nonces), work.scheme.width)).astype(np.float32),
                (),
            )
            for run in runs
        ]

    monkeypatch.setattr(ReferenceEngine, "compute_all", compute_all)
    return passes


def sizes(passes: Sequence[Pass]) -> list[list[int]]:
    return [list(each.values()) for each in passes]


@pytest.mark.usefixtures("few_kernels")
@pytest.mark.parametrize(("emulated", "bank"), [(20, 12), (100, 0), (16, 100), (3, 5)])
def test_a_calibration(tiny: Path, made: list[list[int]], emulated: int, bank: int) -> None:
    work = Workload(SCHEME, Block("block", 7), "key", 8)
    validator = CheckpointValidator(ValidatorSetup(tiny), proofs_of(work, 4))
    plan = MeasuringPlan(tuple(range(40)), emulated, bank)
    validator.truth(plan.nonces)
    measured_calibration(validator, (), plan, ABOUT, Progress())
    planned = measuring_passes(plan, (validator.names, validator.kernels, validator.references))
    assert made == sizes(planned)


@pytest.mark.usefixtures("few_kernels")
def test_an_audit_makes_no_more_than_planned(tiny: Path, made: list[list[int]]) -> None:
    setup = AuditSetup(tiny, scheme=SCHEME, seq_len=16, forward_batch=4)
    deployment = CheckpointDeployment(setup)
    audit(deployment, AuditOptions(ConvictionRule(), 20, runs=10), Progress())
    cheats = [each.name for each in attacks(deployment, 0.0)]
    kernels = CheckpointValidator(ValidatorSetup(tiny)).kernels
    planned = audit_passes(20, (deployment.names, kernels, ()), cheats)
    # Random and fixed vectors need no model, and are planned as if they did.
    free = 3 * -(-20 // AT_ONCE)
    assert sorted(made) == sorted(sizes(planned)[:-free])
