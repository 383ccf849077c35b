from pathlib import Path

import pytest
from click.testing import Result
from typer.testing import CliRunner

from proofserve.cli import model
from proofserve.cli.main import app
from proofserve.cli.model import SmallModel, checkpoint, checkpoint_named


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(model, "cache_folder", lambda: tmp_path / "cache")
    return tmp_path / "cache"


def test_a_checkpoint_is_written_once(cache: Path) -> None:
    folder = checkpoint(SmallModel("qwen3", "tiny", 3))
    assert folder.parent == cache
    assert (folder / "model.safetensors").is_file()
    marker = folder / "seen"
    marker.touch()
    assert checkpoint(SmallModel("qwen", "tiny", 3)) == folder
    assert marker.exists()


def test_another_recipe_is_another_checkpoint(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    before = checkpoint(SmallModel())
    monkeypatch.setattr(model, "_recipe", lambda: "changed")
    assert checkpoint(SmallModel()) != before
    assert len(list(cache.iterdir())) == 2


@pytest.mark.usefixtures("cache")
@pytest.mark.parametrize("error", [FileExistsError("in use"), OSError(39, "not empty")])
def test_a_checkpoint_that_another_process_wrote_first_is_used(
    error: Exception, monkeypatch: pytest.MonkeyPatch
) -> None:
    def overtaken(folder: Path, *_: object) -> None:
        folder.mkdir(parents=True)
        raise error

    monkeypatch.setattr("proofserve.models.writer.write_model", overtaken)
    assert checkpoint(SmallModel()).is_dir()


@pytest.mark.usefixtures("cache")
def test_a_full_disk_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object) -> None:
        raise OSError(28, "no space left")

    monkeypatch.setattr("proofserve.models.writer.write_model", full)
    with pytest.raises(OSError, match="no space left"):
        checkpoint(SmallModel())


@pytest.mark.usefixtures("cache")
def test_an_unknown_model_is_refused() -> None:
    with pytest.raises(ValueError, match="gpt5"):
        checkpoint(SmallModel("gpt5"))


@pytest.mark.parametrize(("said", "name"), [("qwen", "tiny-qwen3"), ("llama", "tiny-llama")])
def test_a_family_can_be_named_by_its_short_name(said: str, name: str) -> None:
    assert SmallModel(said).name == name


def new(*args: str | Path) -> Result:
    return CliRunner().invoke(app, ["model", "new", *map(str, args)])


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("trained", "qwen3 trained, 3.5M parameters"),
        ("trained_moe", "qwen3_moe trained_moe, 5.9M parameters"),
    ],
)
def test_a_trained_model_is_written(tmp_path: Path, name: str, said: str) -> None:
    done = new(tmp_path / "m", "--arch", name)
    assert done.exit_code == 0, done.output
    assert said in " ".join(done.output.split())
    assert (tmp_path / "m" / "tokenizer.json").is_file()


@pytest.mark.parametrize("option", [("--size", "tiny"), ("--seed", "0")])
@pytest.mark.parametrize("name", ["trained", "smollm2"])
def test_a_trained_model_has_no_size_and_no_seed(
    tmp_path: Path, name: str, option: tuple[str, str]
) -> None:
    done = new(tmp_path / "m", "--arch", name, *option)
    assert done.exit_code == 2
    assert f"{name} has one size and no seed" in done.output
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("name", ["trained", "trained_moe"])
def test_a_trained_model_is_known_by_name_whatever_the_size(cache: Path, name: str) -> None:
    found = checkpoint_named(name, "small")
    assert (found.name, found.folder.parent) == (name, cache)
    marker = found.folder / "seen"
    marker.touch()
    assert checkpoint(SmallModel(name, seed=3)) == found.folder
    assert marker.exists()


def test_a_fetched_model_stays_in_the_cache_whatever_the_recipe(
    cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def written(folder: Path, *_: object) -> None:
        folder.mkdir(parents=True)

    monkeypatch.setattr("proofserve.models.writer.write_trained", written)
    before = checkpoint_named("smollm2", "tiny")
    monkeypatch.setattr(model, "_recipe", lambda: "changed")
    assert checkpoint_named("smollm2", "tiny") == before
    assert list(cache.iterdir()) == [before.folder]
