"""What a validator installs: the wheel with the extra ``reference``, and no vLLM."""

import json
import shutil
import zipfile
from pathlib import Path

import pytest

from proofserve.verifier.claims import Selection, from_file
from proofserve_lab.nodes import tampered
from real_gpus.deployments import FOLDER
from support.environments import Environment, build_wheel, downloaded, linked
from support.models import TINY_THRESHOLD

DEPLOYMENTS = (
    *("04-minimax-m27-fp8-2xb200", "05-minimax-m27-fp8-4xh100"),
    *("05-minimax-m27-fp8-2xb200", "05-minimax-m27-fp8-4xa100"),
)
ARTIFACTS = Path(__file__).parent / "data" / "artifacts-tiny-qwen3.json"


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build_wheel(tmp_path_factory.mktemp("wheel"))


def forged(folder: Path) -> Path:
    """A copy of which every second vector is swapped about."""
    body = json.loads(ARTIFACTS.read_text())
    claims = tampered(from_file(ARTIFACTS, Selection()).claims, k_dim=12, every=2)
    body["artifacts"] = [{"nonce": c.nonce, "vector_b64": c.vector_b64} for c in claims]
    path = folder / "forged.json"
    path.write_text(json.dumps(body))
    return path


def verify(environment: Environment, artifacts: Path, model: Path) -> int:
    options = ("--lane", "0:1", "--model", model, "--dist-threshold", TINY_THRESHOLD)
    done = environment.run("-m", "proofserve", "verify", artifacts, *options)
    print(done.stdout, done.stderr)
    return done.returncode


def judge(environment: Environment, model: Path, folder: Path) -> None:
    """Honest is honest and fraud is fraud, by the wheel's own code and without vLLM."""
    alone = environment.run("-c", "import proofserve; print(proofserve.__file__); import vllm")
    assert Path(alone.stdout.strip()).is_relative_to(environment.site)
    assert "No module named 'vllm'" in alone.stderr
    assert verify(environment, ARTIFACTS, model) == 0
    assert verify(environment, forged(folder), model) == 1


def test_verify_needs_the_extra_and_no_vllm(wheel: Path, tiny: Path, tmp_path: Path) -> None:
    judge(linked(tmp_path / "env", wheel), tiny, tmp_path)


def test_a_client_needs_neither_torch_nor_matplotlib(wheel: Path, tmp_path: Path) -> None:
    """It judges by the files of nodes that it trusts."""
    client = linked(tmp_path / "env", wheel, "client")
    for name in ("torch", "matplotlib"):
        assert f"No module named '{name}'" in client.run("-c", f"import {name}").stderr
    honest, *trusted = (str(FOLDER / f"{each}.json") for each in DEPLOYMENTS)
    code = (
        "import json, sys; from proofserve.client import challenge, verify\n"
        "print(json.dumps(verify(sys.argv[1], references=sys.argv[2:], lane=(0, 1))))"
    )
    done = client.run("-c", code, honest, *trusted)
    assert json.loads(done.stdout)["verdict"] == "honest", done.stderr


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_verify_needs_no_vllm_as_pip_installs_it(wheel: Path, tmp_path: Path) -> None:
    environment, model = downloaded(tmp_path / "env", wheel), tmp_path / "model"
    written = environment.run("-m", "proofserve", "model", "new", model, "--size", "tiny")
    assert written.returncode == 0, written.stderr
    judge(environment, model, tmp_path)
    # Removes a gigabyte that no other test needs.
    shutil.rmtree(tmp_path / "env")


def test_the_wheel_has_every_file_of_the_package(wheel: Path) -> None:
    source = Path(__file__).parents[1] / "src"
    expected = {
        str(path.relative_to(source))
        for path in (source / "proofserve").rglob("*")
        if path.is_file() and path.parent.name != "__pycache__"
    }
    with zipfile.ZipFile(wheel) as packed:
        names = {name for name in packed.namelist() if name.startswith("proofserve/")}
    assert names == expected
