"""Which steps there are, and why one is skipped on a host."""

from dataclasses import replace
from pathlib import Path
from typing import Literal

import pytest
from typer.testing import CliRunner

from gpu.steps import RunOptions, Step, all_steps, lack
from proofserve.cli.main import app
from proofserve_lab.facts import HostFacts, TorchFacts
from support.hosts import CARD, HOST

CARDLESS = replace(HOST, torch=TorchFacts("2.13.0", problem="torch 2.13.0 was built without CUDA"))


def options(device: str = "cuda", url: str | None = None) -> RunOptions:
    return RunOptions(device, Path("/out"), url=url)


def step(name: str, device: str = "cuda") -> Step:
    (found,) = (each for each in all_steps(options(device)) if each.name == name)
    return found


def test_names_are_unique_and_each_step_writes_its_own_record() -> None:
    steps = all_steps(options())
    names = [each.name for each in steps]
    assert len(set(names)) == len(names)
    for each in steps:
        assert f"/out/{each.name}.json" in each.argv


def test_a_host_with_everything_lacks_only_the_second_card() -> None:
    lacking = {each.name: lack(each, options(), HOST) for each in all_steps(options())}
    assert {name: why for name, why in lacking.items() if why} == {
        "noise-vllm-tp2": "needs 2 cards, and this host has 1"
    }
    two = replace(HOST, torch=replace(HOST.torch, cards=(CARD, CARD)))
    assert not any(lack(each, options(), two) for each in all_steps(options()))


def test_without_a_card_every_step_says_why() -> None:
    for each in all_steps(options()):
        assert lack(each, options(), CARDLESS) == "no card: torch 2.13.0 was built without CUDA"
    here = options("cpu")
    lacking = [each.name for each in all_steps(here) if lack(each, here, CARDLESS)]
    assert lacking == ["pick-order", "noise-vllm-v2"]


@pytest.mark.parametrize(
    ("host", "reason"),
    [
        (replace(HOST, vllm=None), "vLLM is not installed"),
        (replace(HOST, vllm="0.32.0+cpu"), "vLLM 0.32.0+cpu is a build for processors"),
        (
            replace(HOST, plugin=False),
            "vLLM would not load proofserve: it is not installed as a package",
        ),
    ],
)
def test_steps_with_a_server_need_vllm(host: HostFacts, reason: str) -> None:
    assert lack(step("generation"), options(), host) == reason
    assert lack(step("reference"), options(), host) is None
    # A running node is there, whatever is installed here.
    assert lack(step("generation"), options(url="http://x"), host) is None


def test_the_second_runner_of_a_version_that_was_vetted_on_the_first_is_skipped() -> None:
    old = replace(HOST, vllm="0.26.0")
    assert "second model runner of vLLM 0.26" in str(lack(step("noise-vllm-v2"), options(), old))
    assert lack(step("noise-vllm-v1"), options(), old) is None


def test_a_step_needs_its_own_packages() -> None:
    host = replace(HOST, missing=("pytest", "fastapi"))
    assert lack(step("golden"), options(), host) == "not installed: pytest; see docs/gpu.md"
    assert lack(step("pick-order"), options(), host) is None
    assert lack(step("profile"), options(), host) is None
    found = lack(step("reference"), options(), host)
    assert found == "not installed: pytest fastapi; see docs/gpu.md"


@pytest.mark.parametrize(
    "name", [step.name for step in all_steps(options()) if "proofserve" in step.argv]
)
@pytest.mark.parametrize("scale", ["full", "short"])
def test_a_command_understands_the_words_of_its_step(
    name: str, scale: Literal["full", "short"], tmp_path: Path
) -> None:
    """It refuses the model, which is no folder, and not an option; sizes are checked before."""
    run = RunOptions("cpu", tmp_path, scale, model=str(tmp_path / "no-model"))
    (step,) = (each for each in all_steps(run) if each.name == name)
    result = CliRunner().invoke(app, list(step.argv[3:]))
    assert result.exit_code in {2, 3}, result.output
    assert "is not a folder" in result.output


def test_an_unknown_host_skips_nothing() -> None:
    assert not any(lack(each, options(), None) for each in all_steps(options()))


def test_a_running_node_is_measured_beside_its_checkpoint_alone() -> None:
    run = RunOptions("cpu", Path("/out"), "short", url="http://node")
    served = [each for each in all_steps(run) if each.served]
    assert len(served) == 7
    lacking = {each.name for each in served if lack(each, run, HOST)}
    assert lacking == {"noise-vllm-v1", "noise-vllm-v2", "noise-vllm-tp2"}
    for each in served:
        assert "http://node" in each.argv
        assert ("qwen" in each.argv) == (each.name in lacking)
    named = replace(run, model="theirs")
    for each in all_steps(named):
        assert not lack(each, named, HOST) or each.name == "pick-order" or each.cards > 1
