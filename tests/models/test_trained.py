"""The trained model in the package: that it is the one that was trained, and that it works."""

from pathlib import Path

import pytest
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedTokenizerFast

from proofserve.engines.checkpoints.digest import CACHE, weights_digest
from proofserve.engines.reference.kernels import PROFILES
from proofserve.engines.reference.suspects import SUSPECTS
from proofserve.lab.calibrate.calibration_file import checkpoint_shape, read
from proofserve.models import trained, writer
from proofserve.models.tokenizer import build_tokenizer
from proofserve.models.trained import OtherTokensError
from proofserve.models.writer import DirectoryInUseError, ModelSummary, write_trained
from proofserve.protocol import ARTIFACT, SKETCH
from training.chats import written_chats

BUDGET = 9_000_000


@pytest.fixture(scope="module")
def summary(tmp_path_factory: pytest.TempPathFactory) -> ModelSummary:
    return write_trained(tmp_path_factory.mktemp("models") / "trained")


def test_the_weights_are_those_that_the_digest_names(summary: ModelSummary) -> None:
    assert weights_digest(summary.path) == trained.WEIGHTS_DIGEST


def test_the_package_holds_at_most_9_megabytes_of_it() -> None:
    packed = [Path(str(file)) for file in trained.files().iterdir()]
    assert {file.name for file in packed} == {
        "config.json",
        "model.safetensors",
        "artifact_calibration.json",
        "calibration.json",
        "chat_calibration.json",
    }
    assert sum(file.stat().st_size for file in packed) <= BUDGET


def test_it_loads_without_a_missing_or_a_spare_tensor(summary: ModelSummary) -> None:
    model, info = AutoModelForCausalLM.from_pretrained(summary.path, output_loading_info=True)
    assert not any(info.values())
    assert str(model.dtype) == "torch.bfloat16"
    assert summary.parameters == sum(p.numel() for p in model.parameters())
    assert 2e6 <= summary.parameters <= 4e6
    # The digest is kept beside the files when it is first computed.
    written = [file for file in summary.path.iterdir() if file.name != CACHE]
    assert summary.bytes == sum(file.stat().st_size for file in written)


@pytest.mark.parametrize("question", ["What is a nonce?", "Hello!", "What does a validator do?"])
def test_it_answers_what_it_learned_by_heart(summary: ModelSummary, question: str) -> None:
    model = AutoModelForCausalLM.from_pretrained(summary.path)
    tokenizer = AutoTokenizer.from_pretrained(summary.path)
    prompt = tokenizer.apply_chat_template(
        [{"role": "user", "content": question}], add_generation_prompt=True, return_tensors="pt"
    )
    output = model.generate(**prompt, max_new_tokens=80, do_sample=False)
    answer = tokenizer.decode(
        output[0, prompt["input_ids"].shape[1] :], skip_special_tokens=True
    ).strip()
    (expected,) = [chat.answer for chat in written_chats() if chat.question == question]
    assert answer == expected


def test_a_tokenizer_with_other_tokens_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def other(context: int) -> PreTrainedTokenizerFast:
        tokenizer = build_tokenizer(context)
        tokenizer.add_tokens(["another"])
        return tokenizer

    monkeypatch.setattr(writer, "build_tokenizer", other)
    with pytest.raises(OtherTokensError, match=r"tokenizer: .* requirements/cpu\.lock"):
        write_trained(tmp_path / "m")
    assert list(tmp_path.iterdir()) == []


def test_what_is_there_is_never_replaced(tmp_path: Path) -> None:
    (tmp_path / "thesis.txt").write_text("five years of work")
    with pytest.raises(DirectoryInUseError):
        write_trained(tmp_path)
    assert [file.name for file in tmp_path.iterdir()] == ["thesis.txt"]


@pytest.mark.parametrize(
    ("name", "scheme", "k_dim"),
    [("calibration.json", SKETCH, 64), ("artifact_calibration.json", ARTIFACT, 12)],
)
def test_its_calibrations_are_of_this_model_and_of_emulated_kernels_alone(
    summary: ModelSummary, name: str, scheme: str, k_dim: int
) -> None:
    found = read(Path(str(trained.files().joinpath(name))))
    assert found.shape == checkpoint_shape(summary.path)
    assert (found.model, found.weights_digest) == ("trained", trained.WEIGHTS_DIGEST)
    assert (found.scheme, found.seq_len, found.k_dim) == (scheme, 256, k_dim)
    assert (found.served_dtype, found.kv_dtype) == ("bfloat16", "auto")
    assert all(each.facts.emulated for each in found.populations)
    # Our own run is no population: it has no spread beside itself.
    assert set(found.honest.names) == {*PROFILES} - {"torch"}
    assert found.left_out is not None
    assert set(found.suspects) == set(SUSPECTS)
    # Weights in 4 bits are plain to see, and honest errors do not lean to them.
    assert found.honest.expected["int4 g128"].mean > 0.8
    assert max(member.leans["int4 g128"].mean for member in found.honest.members) < 0.1
