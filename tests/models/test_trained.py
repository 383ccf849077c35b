"""The models that we trained: that the package has those, and that they work."""

import math
from pathlib import Path
from typing import Final

import pytest
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedTokenizerFast

from proofserve.engines.checkpoints import CACHE, weights_digest
from proofserve.engines.reference.kernels import PROFILES, SERVED
from proofserve.engines.reference.suspects import SUSPECTS
from proofserve.models import writer
from proofserve.models.architectures import build_tokenizer
from proofserve.models.trained import CALIBRATIONS, DENSE, MIXTURE, TRAINED_MODELS, TrainedModel
from proofserve.models.writer import ModelSummary, write_trained
from proofserve.protocol import default_k_dim
from proofserve.protocol.receipts.record import SCHEME as RECEIPT
from proofserve.verifier.calibration_file import CalibrationFile, checkpoint_shape
from proofserve.verifier.judges import OWN
from training.data import written_chats

# Bytes of the weights, and of all files in the package.
BUDGETS: Final = {DENSE: (7e6, 9e6), MIXTURE: (12e6, 14e6)}
OURS: Final = {model.name: model for model in BUDGETS}
PARAMETERS: Final = {DENSE: 3_477_504, MIXTURE: 5_860_992}


@pytest.fixture(scope="module", params=OURS.values(), ids=OURS)
def trained(request: pytest.FixtureRequest) -> TrainedModel:
    model: TrainedModel = request.param
    return model


@pytest.fixture(scope="module")
def summary(trained: TrainedModel, tmp_path_factory: pytest.TempPathFactory) -> ModelSummary:
    return write_trained(tmp_path_factory.mktemp("models") / trained.name, trained, weights_digest)


def test_the_weights_are_those_that_the_digest_names(
    trained: TrainedModel, summary: ModelSummary
) -> None:
    assert weights_digest(summary.path) == trained.weights_digest


def test_the_package_holds_few_megabytes_of_it(trained: TrainedModel) -> None:
    packed = [Path(str(file)) for file in trained.files().iterdir()]
    assert {file.name for file in packed} == {
        "config.json",
        "model.safetensors",
        *(CALIBRATIONS[scheme] for scheme in trained.calibrated),
    }
    of_weights, of_all = BUDGETS[trained]
    sizes = {file.name: file.stat().st_size for file in packed}
    assert sizes["model.safetensors"] <= of_weights
    assert sum(sizes.values()) <= of_all


def test_it_loads_without_a_missing_or_a_spare_tensor(
    trained: TrainedModel, summary: ModelSummary
) -> None:
    model, info = AutoModelForCausalLM.from_pretrained(summary.path, output_loading_info=True)
    assert not any(info.values())
    assert str(model.dtype) == "torch.bfloat16"
    assert summary.parameters == sum(p.numel() for p in model.parameters()) == PARAMETERS[trained]
    assert (summary.arch, summary.size) == (model.config.model_type, trained.name)
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
    with pytest.raises(ValueError, match=r"tokenizer: .* requirements/cpu\.lock"):
        write_trained(tmp_path / "m", DENSE, weights_digest)
    assert list(tmp_path.iterdir()) == []


def test_what_is_there_is_never_replaced(tmp_path: Path) -> None:
    (tmp_path / "thesis.txt").write_text("five years of work")
    with pytest.raises(FileExistsError):
        write_trained(tmp_path, DENSE, weights_digest)
    assert [file.name for file in tmp_path.iterdir()] == ["thesis.txt"]


@pytest.mark.parametrize(
    ("trained", "scheme"),
    [(model, s) for model in TRAINED_MODELS.values() for s in model.calibrated if s != RECEIPT],
    indirect=["trained"],
    ids=lambda value: value if isinstance(value, str) else value.name,
)
def test_its_calibrations_are_of_this_model_and_of_emulated_kernels_alone(
    trained: TrainedModel, scheme: str
) -> None:
    files = Path(str(trained.files()))
    found = CalibrationFile.read(files / CALIBRATIONS[scheme])
    assert found.shape == checkpoint_shape(files)
    assert (found.model, found.weights_digest) == (trained.name, trained.weights_digest)
    assert (found.scheme, found.seq_len, found.k_dim) == (scheme, 256, default_k_dim(scheme))
    assert (found.served_dtype, found.kv_dtype) == ("bfloat16", "auto")
    assert all(each.facts.emulated for each in found.populations)
    assert {each.facts.name for each in found.populations} == {OWN.kernels, *PROFILES} - {"torch"}
    # The last one was not computed for SmolLM2, whose forwards take a second each.
    assert found.references == (OWN.kernels, *(SERVED[:-1] if trained.wheel else SERVED))
    assert found.left_out is not None
    assert set(found.suspects) == set(SUSPECTS)
    runs = {each.facts.name: each.figures.figures for each in found.populations}
    for reference in found.references:
        honest = found.honest(reference)
        # No server was measured, so our run alone clears.
        assert set(honest.footprints) == {reference}
        # Weights in 4 bits are plain to see, and honest errors do not point to them.
        assert honest.reaches["int4 g128"].log_mean > math.log(10.0)
        assert abs(runs[reference].cosines["int4 g128"].mean()) < 0.1
    # Kernels that add up in another order keep a footprint.
    assert runs["vLLM on x86 with AMX"].footprints["vLLM on x86 with bfloat16"].mean() > 0.3
