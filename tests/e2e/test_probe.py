"""``proofserve probe`` against stock vLLM routes, and against the gateway in front of them."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from proofserve.cli.main import app
from proofserve.settings.process import environment
from support.four_bits import one_thread
from support.gateway import gateway_process
from support.models import SmallModels
from support.node import DTYPE, ServedNode

pytestmark = pytest.mark.engine


@pytest.fixture(autouse=True)
def few_threads() -> Iterator[None]:
    with one_thread():
        yield


def probed(folder: Path, url: str, model: Path, *args: object) -> tuple[int, dict[str, Any]]:
    file = folder / "probe.json"
    argv = ["probe", url, "--model", model, "--seed", "7", "--json", file, *args]
    found = CliRunner().invoke(app, [*map(str, argv)])
    assert file.exists(), found.output
    return found.exit_code, json.loads(file.read_text())


@pytest.mark.usefixtures("few_kernels")
def test_vllm_is_honest_directly_and_behind_the_gateway(
    node: ServedNode, tiny: Path, tmp_path: Path
) -> None:
    code, found = probed(tmp_path, node.server.url, tiny)
    assert (code, found["label"]) == (0, "honest")
    # In float32 a server rounds hardly at all beside our own run in bfloat16.
    assert (0.7 if DTYPE == "bfloat16" else 0.0) < found["error_over_own_rounding"] < 1.4
    assert {each["ids_from"] for each in found["prompts"]} == {"token ids"}
    with gateway_process(tmp_path, environment({}), backend_url=node.server.url) as gateway:
        code, found = probed(tmp_path, gateway.url, tiny, "--no-completions")
    assert (code, found["label"]) == (0, "honest")


def test_vllm_serves_another_checkpoint_than_this_one(
    node: ServedNode, small_models: SmallModels, tmp_path: Path
) -> None:
    claimed = small_models.get("qwen3", seed=1)
    for args in ((), ("--no-logprobs",)):
        code, found = probed(tmp_path, node.server.url, claimed, *args)
        assert (code, found["label"]) == (1, "another model")
        assert found["prompts_asked"] == 4
