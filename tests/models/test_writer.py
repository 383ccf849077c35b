import stat
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, GenerationConfig

from proofserve.models import architectures, writer
from proofserve.models.writer import ModelSummary, write_model


def _contents(directory: Path) -> dict[str, bytes]:
    return {file.name: file.read_bytes() for file in directory.iterdir()}


def test_it_loads_without_a_missing_or_a_spare_tensor(tiny: ModelSummary) -> None:
    model, info = AutoModelForCausalLM.from_pretrained(tiny.path, output_loading_info=True)
    assert not any(info.values())
    assert type(model).__name__ == architectures.ARCHITECTURES[tiny.arch].class_name
    assert model.dtype == torch.bfloat16
    # With the numbers that a router adds to its scores, which torch calls a buffer.
    assert tiny.parameters == sum(each.numel() for each in model.state_dict().values())
    assert tiny.bytes == sum(len(content) for content in _contents(tiny.path).values())
    assert tiny.bytes > 2 * tiny.parameters


def test_it_answers_different_messages_differently(tiny: ModelSummary) -> None:
    model = AutoModelForCausalLM.from_pretrained(tiny.path)
    tokenizer = AutoTokenizer.from_pretrained(tiny.path)
    replies = []
    for content in ("Hello", "What is a river?"):
        prompt = tokenizer.apply_chat_template(
            [{"role": "user", "content": content}], add_generation_prompt=True, return_tensors="pt"
        )
        output = model.generate(**prompt, max_new_tokens=16, do_sample=False)
        replies.append(output[0, prompt["input_ids"].shape[1] :].tolist())
    assert replies[0] != replies[1]
    # A model that only repeats one token would be of no use to any test of chat.
    assert min(len(set(reply)) for reply in replies) > 3


def test_replies_end_at_either_end_mark(tiny: ModelSummary) -> None:
    generation = GenerationConfig.from_pretrained(tiny.path)
    assert generation.eos_token_id == [3, 4]
    assert (generation.bos_token_id, generation.pad_token_id) == (1, 0)


def test_the_weights_are_as_readable_as_the_rest(tiny: ModelSummary) -> None:
    assert len({stat.S_IMODE(file.stat().st_mode) for file in tiny.path.iterdir()}) == 1


def test_the_same_arguments_give_the_same_bytes(tiny: ModelSummary, tmp_path: Path) -> None:
    again = write_model(tmp_path / "again", tiny.arch, "tiny", seed=0)
    assert _contents(again.path) == _contents(tiny.path)
    assert (again.parameters, again.bytes) == (tiny.parameters, tiny.bytes)


def test_another_seed_gives_other_weights_and_nothing_else(
    tiny: ModelSummary, tmp_path: Path
) -> None:
    mine, other = (
        _contents(tiny.path),
        _contents(write_model(tmp_path / "m", tiny.arch, "tiny", 1).path),
    )
    assert mine.keys() == other.keys()
    assert [name for name in mine if mine[name] != other[name]] == ["model.safetensors"]


def test_the_model_loads_in_bfloat16(tiny: ModelSummary) -> None:
    assert AutoModelForCausalLM.from_pretrained(tiny.path).dtype == torch.bfloat16


def test_an_empty_directory_and_missing_parents_are_fine(tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    assert write_model(tmp_path / "empty", "llama", "tiny").path == tmp_path / "empty"
    assert write_model(tmp_path / "a" / "b", "llama", "tiny").path == tmp_path / "a" / "b"


@pytest.mark.parametrize("kind", ["full directory", "file", "dangling link"])
def test_what_is_there_is_never_replaced(tmp_path: Path, kind: str) -> None:
    target = tmp_path / "taken"
    if kind == "full directory":
        target.mkdir()
        (target / "thesis.txt").write_text("five years of work")
    elif kind == "file":
        target.write_text("five years of work")
    else:
        target.symlink_to(tmp_path / "nowhere")
    with pytest.raises(FileExistsError, match=r"taken exists and is not an empty directory"):
        write_model(target, "qwen3", "tiny")
    assert [path.name for path in tmp_path.iterdir()] == ["taken"]
    if kind == "full directory":
        assert _contents(target) == {"thesis.txt": b"five years of work"}


def test_a_failure_leaves_nothing_behind(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(context: int) -> None:
        raise OSError("disk full")

    monkeypatch.setattr(writer, "build_tokenizer", fail)
    with pytest.raises(OSError, match="disk full"):
        write_model(tmp_path / "m", "qwen3", "tiny")
    assert list(tmp_path.iterdir()) == []


def test_a_directory_filled_while_we_wrote_is_left_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    build = writer.build_tokenizer

    def interfere(context: int) -> object:
        (tmp_path / "m").mkdir()
        (tmp_path / "m" / "theirs").write_text("first")
        return build(context)

    monkeypatch.setattr(writer, "build_tokenizer", interfere)
    with pytest.raises(FileExistsError):
        write_model(tmp_path / "m", "qwen3", "tiny")
    assert [path.name for path in tmp_path.iterdir()] == ["m"]
    assert _contents(tmp_path / "m") == {"theirs": b"first"}


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("gpt2", "tiny"), "unknown architecture 'gpt2'; choose from qwen3, llama, gemma3"),
        (("qwen3", "huge"), "unknown size 'huge'; choose from tiny, small"),
    ],
)
def test_an_unknown_name_is_refused_with_the_known_names(
    tmp_path: Path, arguments: tuple[str, ...], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        write_model(tmp_path / "m", *arguments)
    assert list(tmp_path.iterdir()) == []
