"""vLLM's second model runner: the same vectors, chat and receipts as with the first."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from proofserve.engines.reference.network import load
from support.adapters import write_adapter
from support.engines import EmbeddedEngine, workload
from support.receipts import chats
from support.reference import reference_vectors
from support.second_runner import CHOSEN, NONCES, SCHEMES, run_on_second_runner

pytestmark = pytest.mark.engine

SCRIPT = Path(__file__).parent / "second_runner.py"
FOLDER = "tests/embedded_engine"
# All tests of an engine, as `make test` and `make slow` run them on the first runner.
ALL = (
    *("test_embedded.py", "test_experts.py", "test_receipts.py", "test_shapes.py"),
    "test_receipt_deployments.py",
)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("second_runner")


@pytest.fixture(scope="module")
def happened(tiny: Path, folder: Path, cpu_environment: pytest.MonkeyPatch) -> dict[str, Any]:
    """What ``second_runner.py`` saw; a share makes proofs run between the steps of chat."""
    write_adapter(folder / "adapter", load(tiny, "float32", "cpu"))
    arguments = (str(SCRIPT), str(tiny), str(folder / "adapter"), str(folder / "vectors.npz"))
    ran = run_on_second_runner(*arguments, timeout=540, POC_SHARE="0.3")
    assert CHOSEN in ran.stdout + ran.stderr
    read: dict[str, Any] = json.loads(ran.stdout.splitlines()[-1])
    return read


@pytest.fixture(scope="module")
def values(happened: dict[str, Any], folder: Path) -> dict[str, NDArray[np.float32]]:
    with np.load(folder / "vectors.npz") as stored:
        return dict(stored)


@pytest.mark.parametrize("name", SCHEMES)
def test_vectors_are_those_of_the_first_runner(
    name: str, engine: EmbeddedEngine, values: dict[str, NDArray[np.float32]]
) -> None:
    first = engine.run(engine.prove(workload(made_by=SCHEMES[name]), NONCES)).values
    apart = np.linalg.norm(values[name] - first, axis=1) / np.linalg.norm(first, axis=1)
    print(f"{name}: largest relative distance between the runners {apart.max():.2e}")
    # Two roundings to bfloat16 are 0.01 apart.
    assert apart.max() < 1e-4


@pytest.mark.parametrize("name", ["artifact", "sketch", "distance"])
def test_vectors_agree_with_transformers(
    name: str, tiny: Path, values: dict[str, NDArray[np.float32]]
) -> None:
    expected = reference_vectors(tiny, workload(made_by=SCHEMES[name]), NONCES, torch.float32)
    apart = np.linalg.norm(values[name] - expected, axis=1) / np.linalg.norm(expected, axis=1)
    assert apart.max() < 0.002


def test_a_vector_does_not_depend_on_its_batch(happened: dict[str, Any]) -> None:
    assert happened["depends_on_its_batch"] == []


def test_chat_is_that_of_the_first_runner_and_identical_beside_a_round(
    happened: dict[str, Any], engine: EmbeddedEngine
) -> None:
    assert happened["forwards_during_chat"] > 0
    assert happened["same_chat"]
    first = engine.run(chats(engine, "first"))
    assert [[tuple(each) for each in answers] for answers in happened["chat"]] == first


def test_receipts_of_chat_beside_a_round(happened: dict[str, Any]) -> None:
    assert happened["answers"] == 6
    assert happened["farthest_sketch"] < 0.002


def test_proofs_after_chat_with_an_adapter_are_of_the_base_model(happened: dict[str, Any]) -> None:
    assert happened["adapter_changed_chat"]
    assert happened["changed_by_an_adapter"] == []


def test_all_blocks_came_back(happened: dict[str, Any]) -> None:
    assert happened["leaked_blocks"] == 0


@pytest.mark.slow
@pytest.mark.parametrize("runner", ["0", "1"], ids=["first", "second"])
def test_kernels_with_smaller_blocks_than_the_pool(
    runner: str,
    tiny: Path,
    folder: Path,
    vectors: NDArray[np.float32],
    cpu_environment: pytest.MonkeyPatch,
) -> None:
    script, out = str(SCRIPT.with_name("split_blocks.py")), str(folder / f"split{runner}.npy")
    changes = {"VLLM_USE_V2_MODEL_RUNNER": runner, "VLLM_ENABLE_V1_MULTIPROCESSING": "0"}
    ran = run_on_second_runner(script, str(tiny), out, timeout=540, **changes)
    assert (CHOSEN in ran.stdout + ran.stderr) == (runner == "1")
    assert json.loads(ran.stdout.splitlines()[-1]) == [32]
    assert np.linalg.norm(np.load(out) - vectors[:16], axis=1).max() < 1e-4


@pytest.mark.slow
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("file", ALL)
def test_every_test_of_the_first_runner(file: str) -> None:
    arguments = ("-m", "pytest", "-m", "engine", "-p", "no:xdist", f"{FOLDER}/{file}")
    print(run_on_second_runner(*arguments, timeout=3500).stdout)
