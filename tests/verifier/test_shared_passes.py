"""Judges of several nodes that share passes over the weights, and what they get from these."""

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from proofserve.engines.reference.engine import ReferenceEngine, Run
from proofserve.engines.reference.network import load
from proofserve.engines.reference.suspects import suspect
from proofserve.protocol.identity import Block
from proofserve.protocol.sketch import SketchScheme
from proofserve.rounds.errors import EngineFault
from proofserve.rounds.records import ProofBatch, Workload
from proofserve.verifier.judges import PUBLISHED, Vectors
from proofserve.verifier.validation.judging import side_by_side
from proofserve.verifier.validator import CheckpointValidator, ValidatorSetup, proofs_of
from support.models import SmallModels

WORK = Workload(SketchScheme(), Block("block", 7), "key", 8)
Asked = Mapping[str, Sequence[Any]]


def test_a_pass_for_several_keys_has_the_bits_of_one_for_each(tiny: Path) -> None:
    network = load(tiny, "float32", "cpu")
    four_bits = suspect(network, "int4 g128")
    engine, keys = ReferenceEngine(4), ("key", "other", "third")
    runs = [
        Run(each, range(place, 6), public_key=key)
        for place, key in enumerate(keys)
        for each in (network, four_bits)
    ]
    together = engine.compute_all(WORK, runs)
    for run, made in zip(runs, together, strict=True):
        work = Workload(WORK.scheme, WORK.block, str(run.public_key), WORK.seq_len)
        (alone,) = engine.compute_all(work, [Run(run.network, run.nonces)])
        assert made.nonces == alone.nonces
        assert np.array_equal(made.values, alone.values)
    assert not np.array_equal(together[0].values[1:], together[2].values)


def test_nodes_of_a_mixture_get_the_vectors_that_they_get_alone(small_models: SmallModels) -> None:
    """Suspects hold the experts that the published weights choose for the same node's nonces."""
    engine = ReferenceEngine(4)
    loaded = CheckpointValidator(ValidatorSetup(small_models.mixture()), proofs_of(WORK, 4))
    keys, suspects = ("key", "other"), ("int4 g128", "int8 g32")

    def predictions(validator: CheckpointValidator, names: Sequence[str]) -> list[Vectors]:
        return [validator.predictions(name, range(5)) for name in names]

    def compute(asked: Asked) -> Mapping[str, Sequence[ProofBatch]]:
        runs = [run for of in asked.values() for run in of]
        for key, of in asked.items():
            for run in of:
                run.public_key = key
        runs.sort(key=lambda run: run.network is not published)
        made = iter(engine.compute_all(WORK, runs))
        batches = {id(run): next(made) for run in runs}
        return {key: [batches[id(run)] for run in of] for key, of in asked.items()}

    shared = loaded.with_other()
    published = shared.network(PUBLISHED)
    # The second node's first suspect is the first one's second.
    orders = dict(zip(keys, (suspects, suspects[::-1]), strict=True))
    judges = {
        key: lambda ask, names=names: predictions(shared.beside(ask), names)
        for key, names in orders.items()
    }
    for key, ended in side_by_side(judges, compute):
        work = Workload(WORK.scheme, WORK.block, key, WORK.seq_len)
        alone = predictions(loaded.with_other(proofs_of(work, 4)), orders[key])
        for one, other in zip(ended.result(), alone, strict=True):
            assert all(np.array_equal(one[nonce], other[nonce]) for nonce in range(5))


def judge(count: int) -> Callable[[Any], int]:
    """A judge that asks ``count`` times, and returns how often it was answered."""

    def judged(compute: Callable[[Sequence[Any]], Sequence[Any]]) -> int:
        return sum(len(compute([number])) for number in range(count))

    return judged


def test_a_pass_is_for_all_that_have_not_ended() -> None:
    passes: list[set[str]] = []

    def compute(asked: Asked) -> Mapping[str, Sequence[Any]]:
        passes.append({*asked})
        return {name: [None for _ in runs] for name, runs in asked.items()}

    judges = {"a": judge(1), "b": judge(3), "none": judge(0), "c": judge(2)}
    found = {name: ended.result() for name, ended in side_by_side(judges, compute)}
    assert found == {"a": 1, "b": 3, "none": 0, "c": 2}
    assert passes == [{"a", "b", "c"}, {"b", "c"}, {"b"}]
    assert [*side_by_side({}, compute)] == []


def test_a_fault_is_that_of_all_who_wait_and_of_no_other() -> None:
    faults = iter([EngineFault("one"), None])

    def compute(asked: Asked) -> Mapping[str, Sequence[ProofBatch]]:
        if (fault := next(faults)) is not None:
            raise fault
        return dict.fromkeys(asked, ())

    def patient(ask: Callable[[Sequence[Any]], Sequence[Any]]) -> str:
        try:
            ask([1])
        except EngineFault:
            ask([2])
        return "went on"

    ended = dict(side_by_side({"first": judge(1), "patient": patient}, compute))
    assert isinstance(ended["first"].exception(), EngineFault)
    assert ended["patient"].result() == "went on"


@pytest.mark.parametrize("ends", ["by a signal", "by the caller"])
def test_no_judge_outlives_the_caller(ends: str) -> None:
    def compute(asked: Asked) -> Mapping[str, Sequence[ProofBatch]]:
        if ends == "by a signal":
            raise SystemExit(143)
        return dict.fromkeys(asked, ())

    judges = side_by_side({"short": judge(0), "a": judge(99), "b": judge(99)}, compute)
    next(judges)
    if ends == "by the caller":
        judges.close()  # type: ignore[attr-defined]
    else:
        with pytest.raises(SystemExit):
            next(judges)
