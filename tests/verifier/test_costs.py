"""What a verification will cost, before it computes."""

import json
import shutil
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode
from typer.testing import CliRunner

from benchmarks import costs as page
from proofserve.cli.main import app
from proofserve.engines.checkpoints import CheckpointFiles
from proofserve.engines.reference.forward import states
from proofserve.protocol.sketch import SketchScheme
from proofserve.verifier.judges import OWN, PUBLISHED, BankRun
from proofserve.verifier.judging import COUNT, DIRECTION, FOOTPRINT, GivenThreshold, JudgingOptions
from proofserve.verifier.plans import CostPlan, disk_rate, expected_passes, layer_size
from support.mixtures import CHOSEN, EXPERTS, MIXTURES, mixture, network_of

ROOT = Path(__file__).parents[2]
REFERENCE = BankRun(kernels="vLLM on a GPU")
AGAIN = replace(OWN, order=0)
BANK = (("int4 g128", "fp8 per channel"), (str(OWN.kernels), str(REFERENCE.kernels)))
SEQ_LEN = 24


def options(*tests: str) -> JudgingOptions:
    threshold = GivenThreshold(0.1, 0.01) if COUNT in tests else None
    return JudgingOptions(tests, share=0.5, threshold=threshold)


def test_operations_are_those_that_torch_counts() -> None:
    network = network_of("qwen3", head_dim=16)
    config, shapes = network.config, network.shapes
    layers = [layer_size(each, config, 0) for each in shapes]
    plan = CostPlan(layers, config.hidden_size, [], "nonces", 1, SEQ_LEN, 1)
    with FlopCounterMode(display=False) as counted:
        states(network, torch.randn(1, SEQ_LEN, config.hidden_size))
    # Torch does not count attention's kernel on a processor.
    attention = 2 * SEQ_LEN**2 * sum(each.attended for each in layers)
    assert plan.operations(1) - attention == counted.get_total_flops()


def test_a_token_multiplies_the_experts_that_it_has() -> None:
    network = mixture("Qwen3MoeTopKRouter")
    layer = network.shapes[0]
    others = sum(each.numel() for each in layer.parameters() if each.ndim == 2)
    stacks = sum(each.numel() for each in layer.parameters() if each.ndim == 3)
    size = layer_size(layer, network.config, 0)
    assert size.multiplied == others + stacks * CHOSEN // EXPERTS


@pytest.mark.parametrize("router", MIXTURES)
def test_every_known_mixture_has_fewer_multiplied_weights_than_it_holds(router: str) -> None:
    network = mixture(router)
    for layer in network.shapes:
        size = layer_size(layer, network.config, 0)
        assert (0 < size.multiplied < size.weights) == (size.stacked > 0)


def test_files_hold_what_layers_take() -> None:
    checkpoint = network_of("qwen3", head_dim=16).checkpoint
    for index, layer in enumerate(checkpoint.shapes):
        numbers = sum(weight.numel() for weight in layer.parameters())
        assert checkpoint.stored_bytes(index) == 4 * numbers


def test_passes_grow_until_every_suspect_is_ruled_out() -> None:
    passes = expected_passes(options(DIRECTION), 100, BANK, at_once=8)
    assert [each.get(PUBLISHED) for each in passes] == [2, None, 7, 8, 6]
    both = {BankRun("int4 g128"), BankRun("fp8 per channel")}
    assert passes[0].keys() == {PUBLISHED, OWN, REFERENCE, *both}
    # A nonce says how far suspects reach, the first two which reference to go on with.
    assert {passes[0][suspect] for suspect in both} == {1}
    assert passes[1] == {AGAIN: 2}
    assert all(each.keys() == {PUBLISHED, OWN, AGAIN} for each in passes[2:])


def test_of_a_server_that_says_its_kernel_only_that_is_planned() -> None:
    passes = expected_passes(options(FOOTPRINT), 100, (BANK[0], BANK[1][:1]), at_once=8)
    assert all(each.keys() == {PUBLISHED, OWN, AGAIN} for each in passes)


def test_a_footprint_needs_no_suspect() -> None:
    first, *_ = expected_passes(options(FOOTPRINT), 100, BANK, at_once=8)
    assert first == {PUBLISHED: 2, OWN: 2, REFERENCE: 2}


def test_a_count_computes_the_truth_alone_and_no_more_than_the_sample() -> None:
    assert expected_passes(options(COUNT), 5, BANK, 8) == [{PUBLISHED: n} for n in (2, 3)]


def test_a_plan_reads_no_weights_of_layers(
    tiny: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    of_files = CheckpointFiles.read

    def read(files: CheckpointFiles, name: str) -> torch.Tensor:
        if ".layers." in name:
            pytest.fail(f"{name} was read")
        return of_files(files, name)

    monkeypatch.setattr(CheckpointFiles, "read", read)
    copy = shutil.copytree(tiny, tmp_path / "copy")
    (copy / "weights_digest.json").unlink(missing_ok=True)
    claims = [{"nonce": n, "vector_b64": "AA" * 16} for n in range(100)]
    body = {"public_key": "key", "block_hash": "block", "artifacts": claims}
    body |= {
        "params": {"seq_len": SEQ_LEN},
        "encoding": {"dtype": "f16", "k_dim": 12, "endian": "le"},
    }
    (tmp_path / "claims.json").write_text(json.dumps(body))
    options = ["--model", copy, "--scheme", SketchScheme().name, "--block-height", "7"]
    options += ["--test", "direction", "--plan"]
    result = CliRunner().invoke(app, ["verify", str(tmp_path / "claims.json"), *map(str, options)])
    assert result.exit_code == 0, result.output
    plan = [line for line in result.output.splitlines() if line.startswith("plan: ")]
    assert len(plan) == 6
    assert "100 nonces" in plan[0]
    assert "once for the weights' digest" in plan[1]
    assert "truth" in plan[2]
    assert "on this machine" in plan[5]
    assert not (copy / "weights_digest.json").exists()


def test_a_file_is_read_to_know_the_disk(tmp_path: Path) -> None:
    (file := tmp_path / "some").write_bytes(bytes(10_001))
    assert disk_rate([file]) > 0


def test_the_table_of_the_page_is_computed() -> None:
    assert "\n".join(page.rows()) in (ROOT / "docs" / "validator.md").read_text()
