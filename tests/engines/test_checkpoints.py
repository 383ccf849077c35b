"""The digest of a checkpoint's weights, and the tokens that proofs may use."""

import json
import os
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import save_file
from transformers import AutoTokenizer

from golden.make.sketch_v1 import digest_of
from proofserve.engines.checkpoints import CACHE, checkpoint_folder, model_facts, weights_digest
from proofserve.protocol.errors import ProtocolError

TENSORS = {
    "b.weight": torch.arange(12, dtype=torch.float32).view(3, 4),
    "a.weight": torch.arange(5, dtype=torch.float32).to(torch.bfloat16),
    "c": torch.tensor(7, dtype=torch.int64),
}
NAMES = {torch.float32: "F32", torch.bfloat16: "BF16", torch.int64: "I64"}


def expected() -> str:
    # numpy has no bfloat16; the digest is over the bytes alone.
    raw = {n: t.view(torch.int16) if t.dtype == torch.bfloat16 else t for n, t in TENSORS.items()}
    return digest_of({n: (NAMES[TENSORS[n].dtype], t.numpy()) for n, t in raw.items()})


def test_the_digest_is_that_of_the_specification_however_the_tensors_are_spread(
    tmp_path: Path,
) -> None:
    one, two = tmp_path / "one", tmp_path / "two"
    one.mkdir()
    two.mkdir()
    save_file(TENSORS, one / "model.safetensors", {"format": "pt"})
    for number, (name, made) in enumerate(TENSORS.items()):
        save_file({name: made}, two / f"model-{number}.safetensors")
    assert weights_digest(one) == weights_digest(two) == expected()


def test_any_changed_weight_name_shape_or_dtype_changes_the_digest(tmp_path: Path) -> None:
    found = {expected()}
    for changed in (
        {"b.weight": TENSORS["b.weight"] + 1e-6},
        {"b.weight": TENSORS["b.weight"].view(4, 3)},
        {"c": TENSORS["c"].to(torch.int32)},
        {"d": TENSORS["c"].clone()},
    ):
        folder = tmp_path / str(len(found))
        folder.mkdir()
        save_file(TENSORS | changed, folder / "model.safetensors")
        found.add(weights_digest(folder))
    assert len(found) == 5


def test_a_digest_is_kept_beside_the_weights_until_they_change(tmp_path: Path) -> None:
    file = tmp_path / "model.safetensors"
    save_file(TENSORS, file)
    first = weights_digest(tmp_path)
    kept = json.loads((tmp_path / CACHE).read_text())
    (tmp_path / CACHE).write_text(json.dumps(kept | {"weights_digest": "kept"}))
    assert weights_digest(tmp_path) == "kept"
    os.utime(file, ns=(1, 1))
    assert weights_digest(tmp_path) == first
    (tmp_path / CACHE).write_text("[not json")
    assert weights_digest(tmp_path) == first


@pytest.mark.parametrize("content", [b"", b"\x08\0\0\0\0\0\0\0not json", None])
def test_a_checkpoint_without_whole_weights_has_no_digest(
    tmp_path: Path, content: bytes | None
) -> None:
    if content is not None:
        (tmp_path / "model.safetensors").write_bytes(content)
    with pytest.raises(ProtocolError, match="weights_digest"):
        weights_digest(tmp_path)
    assert model_facts(tmp_path, 8).weights_digest is None


def test_a_file_that_ends_early_has_no_digest(tmp_path: Path) -> None:
    file = tmp_path / "model.safetensors"
    save_file(TENSORS, file)
    file.write_bytes(file.read_bytes()[:-3])
    with pytest.raises(ProtocolError, match="ends within"):
        weights_digest(tmp_path)


def test_proofs_use_the_ordinary_tokens_of_the_tokenizer(tiny: Path) -> None:
    facts = model_facts(tiny, 256)
    tokenizer = AutoTokenizer.from_pretrained(tiny)
    special = {*tokenizer.all_special_ids, *tokenizer.added_tokens_decoder}
    wanted = sorted(set(tokenizer.get_vocab().values()) - special)
    assert facts.tokens is not None
    assert facts.tokens.ids(np.arange(len(facts.tokens))).tolist() == wanted


def test_without_a_tokenizer_there_are_no_tokens(tiny: Path, tmp_path: Path) -> None:
    shutil.copy(tiny / "model.safetensors", tmp_path)
    facts = model_facts(tmp_path, 256)
    assert facts.tokens is None
    assert facts.weights_digest == weights_digest(tiny)


def test_a_model_is_a_folder_or_a_repository_in_the_cache(tiny: Path, tmp_path: Path) -> None:
    assert checkpoint_folder(str(tiny), None, None) == tiny
    for unknown in ("no-such/model", "not a name", "s3://bucket/model"):
        assert checkpoint_folder(unknown, None, str(tmp_path)) is None


def test_the_log_says_when_weights_are_hashed_and_why_there_are_no_sketches(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO")
    save_file(TENSORS, tmp_path / "model.safetensors")
    for hashed in (1, 1):
        model_facts(tmp_path, 8)
        assert caplog.text.count(f"hashing the weights in {tmp_path}") == hashed
    assert "sketches cannot be proved with this checkpoint: no tokenizer" in caplog.text
    caplog.clear()
    model_facts(None, 8)
    assert "sketches cannot be proved" in caplog.text
