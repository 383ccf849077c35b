import json
from pathlib import Path

import pytest
from click.testing import Result
from typer.testing import CliRunner

from cli.challenged import OPERATOR, challenged_node
from proofserve.cli.main import app
from proofserve.cli.servers import ServerOptions
from proofserve.cli.session import ProgressLine
from proofserve.engines.reference.kernels import PROFILES, SERVED
from proofserve.engines.reference.suspects import SUSPECTS
from proofserve.protocol.identity import Block
from proofserve.protocol.sketch import SketchScheme
from proofserve.reports import write_json
from proofserve.rounds.records import Workload
from proofserve.verifier.calibration_file import CalibrationFile, KernelFacts
from proofserve.verifier.claims import Selection, document, from_file
from proofserve.verifier.judges import OWN, BankRun
from proofserve.verifier.orders import order_for
from proofserve.verifier.validator import CheckpointValidator, ValidatorSetup, proofs_of
from proofserve.verifier.verification import claims_of_vectors
from support.four_bits import one_thread
from support.models import SmallModels
from support.stub_node import stub_node

# Few and short nonces: what they measure does not matter here.
SIMULATED = ("--verifications", "100")
FEW = ("--nonces", "16", "--emulated", "16", "--seq-len", "8", *SIMULATED)
NO_BANK = ("--bank", "0")
SKETCH = ("--scheme", "sketch-v1")
OURS = str(OWN.kernels)


def run(*args: str | Path) -> Result:
    with one_thread():
        return CliRunner().invoke(app, ["calibrate", "noise", *map(str, args)])


def test_the_help_has_an_example() -> None:
    result = run("--help")
    assert result.exit_code == 0
    assert "proofserve calibrate noise ./model --out calibration.json" in result.output


def test_without_any_trusted_node_the_emulated_kernels_make_a_calibration(
    tiny: Path, small_models: SmallModels, tmp_path: Path
) -> None:
    out, picture = tmp_path / "calibration.json", tmp_path / "noise.png"
    bank = ("--bank", "8", "--suspect", small_models.get("qwen3", seed=1))
    made = run(tiny, *FEW, *SKETCH, *bank, "--out", out, "--png", picture)
    assert made.exit_code == 0, made.output
    calibration = CalibrationFile.read(out)
    assert (calibration.model, calibration.served_dtype) == (tiny.name, "bfloat16")
    assert (calibration.scheme, calibration.seq_len, calibration.k_dim) == ("sketch-v1", 8, 64)
    assert calibration.weights_digest
    kernels = [each.facts.name for each in calibration.populations]
    assert set(kernels) == {OURS, *PROFILES} - {"torch"}
    assert calibration.references == (OURS, *SERVED)
    # Our own run is no population beside itself: it has no spread.
    assert set(calibration.honest(OURS).names) == {*kernels} - {OURS}
    assert all(each.facts.emulated for each in calibration.populations)
    assert set(calibration.suspects) == {*SUSPECTS, "qwen3-1"}
    assert calibration.honest(OURS).reaches["int4 g128"].log_mean > 1.0
    assert calibration.left_out is not None
    assert "left out" in " ".join(made.output.split())
    assert picture.read_bytes().startswith(b"\x89PNG")
    same = run(tiny, *FEW, "--bank", "8", "--suspect", tiny)
    assert same.exit_code == 2
    assert f"suspect {tiny.name}: its vectors are those of the published" in same.output


@pytest.mark.usefixtures("few_kernels")
def test_a_cache_in_8_bits_is_honest_only_where_it_is_allowed(
    tiny: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out, passed = tmp_path / "calibration.json", set[tuple[int, int]]()
    monkeypatch.setattr(ProgressLine, "layer", lambda _line, *layer: passed.add(layer))
    made = run(tiny, *FEW, "--bank", "8", "--kv-cache", "fp8", "--out", out)
    assert made.exit_code == 0, made.output
    assert passed == {(index, 6) for index in range(1, 7)}
    calibration = CalibrationFile.read(out)
    assert calibration.kv_dtype == "fp8"
    assert "our own rounding with a cache in fp8" in calibration.honest(OURS).names
    assert "KV cache in fp8" not in calibration.suspects


@pytest.mark.usefixtures("few_kernels")
def test_nodes_and_files_of_other_machines_are_populations(tiny: Path, tmp_path: Path) -> None:
    there, out, both = (tmp_path / f"{name}.json" for name in ("there", "out", "both"))
    with challenged_node(tiny, tmp_path) as node:
        honest = ("--other", node.url, "--api-key", OPERATOR)
        saved = run(tiny, *FEW, *honest, "--save", there)
        assert saved.exit_code == 0, saved.output
        claimed = from_file(there, Selection())
        assert claimed.nonces == tuple(range(16))
        assert (claimed.seq_len, claimed.width, claimed.scheme) == (8, 12, "artifact-v1")
        # The file names the block, key and nonces, and says what they ran on.
        measured = run(tiny, *NO_BANK, *FEW[2:4], *SIMULATED, "--other", there, "--out", out)
        assert measured.exit_code == 0, measured.output
        joined = run(tiny, *FEW, *NO_BANK, *honest, "--add", out, "--out", both)
        assert joined.exit_code == 0, joined.output
    populations = CalibrationFile.read(out).populations
    facts = [each.facts for each in populations if not each.facts.emulated]
    assert [each.engine for each in facts] == ["vLLM none"]
    # The same node measured twice is one population.
    together, alone = (CalibrationFile.read(file).honest(OURS) for file in (both, out))
    assert together.names == alone.names
    other = run(tiny, *FEW, "--seq-len", "4", *NO_BANK, "--add", out)
    assert other.exit_code == 2
    assert "seq_len: this calibration has 4, the added one 8" in other.output


def test_without_a_length_nonces_have_256_tokens_as_those_of_a_round(
    tiny: Path, tmp_path: Path
) -> None:
    there = tmp_path / "there.json"
    with stub_node() as (_, url):
        saved = run(tiny, "--nonces", "16", "--other", url, "--save", there)
    assert saved.exit_code == 0, saved.output
    assert from_file(there, Selection()).seq_len == 256


@pytest.mark.usefixtures("few_kernels")
def test_a_node_with_other_weights_is_refused_unless_it_is_trusted(
    tiny: Path, tmp_path: Path
) -> None:
    """Whoever measures a cheat as honest would have its like cleared."""
    honest, cheat, out = (tmp_path / f"{name}.json" for name in ("honest", "cheat", "out"))
    compute_elsewhere(tiny, honest, "mine")
    compute_elsewhere(tiny, cheat, "a neighbour", "int8 per channel")
    options = (tiny, "--emulated", "16", "--bank", "16", *SIMULATED, "--out", out)
    refused = run(*options, "--other", honest, "--other", cheat)
    assert refused.exit_code == 2, refused.output
    text = "populations: a neighbour would be convicted by the emulated kernels alone"
    assert text in " ".join(refused.output.split())
    assert "--trust 'a neighbour'" in " ".join(refused.output.split())
    assert not out.exists()
    unknown = run(*options, "--other", honest, "--trust", "neighbour")
    assert unknown.exit_code == 2, unknown.output
    assert "--trust neighbour: no such node was measured; measured: mine" in unknown.output
    known = run(*options, "--other", honest)
    assert known.exit_code == 0, known.output
    trusted = run(*options, "--other", honest, "--other", cheat, "--trust", "a neighbour")
    assert "by the emulated kernels alone" not in trusted.output
    assert "each kernel left out, margins times 1 ..." in trusted.output


def compute_elsewhere(model: Path, file: Path, name: str, weights: str | None = None) -> None:
    """Save what a node in bfloat16 computes with these weights, as ``--save`` does."""
    work = Workload(SketchScheme(), Block("0xabc", 7), "key", 8)
    with one_thread():
        node = CheckpointValidator(ValidatorSetup(model), proofs_of(work, 8))
        vectors = node.vectors(BankRun(weights, "vLLM on a GPU"), range(16))
    said = ("engine", "processor", "torch", "dtype", "kv_dtype", "attention", "ranks")
    facts = KernelFacts(name=name, emulated=False, **dict.fromkeys(said))
    write_json(file, document(order_for(work), claims_of_vectors(vectors), facts.model_dump()))


@pytest.mark.usefixtures("few_kernels")
def test_the_command_starts_the_named_servers(
    deployments: list[ServerOptions], tiny: Path, tmp_path: Path
) -> None:
    engines = ("--other", "vllm", "--other", "vllm:tp2")
    # In their places are servers that send random vectors.
    trust = ("--trust", "vLLM 0", "--trust", "vLLM 0 (2)")
    result = run(tiny, *engines, *trust, *FEW, *NO_BANK, "--forward-batch", "4")
    assert result.exit_code == 0, result.output
    assert [(each.checkpoint, each.ranks) for each in deployments] == [(tiny, 1), (tiny, 2)]
    assert {each.forward_batch for each in deployments} == {4}
    saved = run(tiny, "--other", "vllm", "--save", tmp_path / "a.json", *FEW)
    assert saved.exit_code == 0, saved.output
    assert len(deployments) == 3


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (("qwen", "--other", "reference:int3"), "'reference:int3' is not an engine and not a"),
        (("qwen", "--other", "vllm:tp0"), "0 ranks are outside 1..64"),
        (("gpt5",), "'gpt5' is not a folder, and not one of qwen"),
        (("--size", "huge", "qwen"), "unknown size 'huge'"),
        (("qwen", "--size", "tiny", "--save", "a.json"), "give --other once"),
        (("qwen", "--scheme", "distance-v1"), "distance-v1 has no artifacts"),
        (("qwen", "--size", "tiny", "--kv-cache", "int8"), "--kv-cache int8: choose from auto"),
        ((), "Missing argument 'model'"),
    ],
)
def test_invalid_options_are_refused_before_any_computation(
    args: tuple[str, ...], message: str
) -> None:
    result = run(*args)
    assert result.exit_code == 2, result.output
    assert message in " ".join(result.output.replace("│", " ").split())
    assert "nonces ..." not in result.output


def test_files_of_two_different_tasks_are_refused(tiny: Path, tmp_path: Path) -> None:
    paths = []
    with stub_node() as (_, url):
        for seq_len in (4, 8):
            paths.append(tmp_path / f"{seq_len}.json")
            options = ("--save", paths[-1], "--nonces", "16", "--seq-len", str(seq_len))
            assert run(tiny, "--other", url, *options).exit_code == 0
    result = run(tiny, "--other", paths[0], "--other", paths[1])
    assert result.exit_code == 2
    assert "the files of --other differ in seq_len" in result.output
    document = json.loads(paths[0].read_text())
    assert document["ran_on"]["emulated"] is False


def test_a_mixture_is_measured_by_the_scheme_that_can_clear_it(
    small_models: SmallModels, tmp_path: Path
) -> None:
    mixture, out = small_models.get("qwen3_moe"), tmp_path / "calibration.json"
    refused = run(mixture, *FEW, *NO_BANK, "--scheme", "artifact-v1")
    assert refused.exit_code == 2
    assert "no honest node is cleared by it" in refused.output
    made = run(mixture, *FEW, *NO_BANK, "--out", out)
    assert made.exit_code == 0, made.output
    assert CalibrationFile.read(out).scheme == "sketch-v2"
