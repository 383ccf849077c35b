"""The checkpoint of an operator who cheats."""

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from proofserve.engines.checkpoints import CACHE, weights_digest
from proofserve.engines.reference.suspects import rounding_of
from proofserve_lab.checkpoints import write_rounded_copy


def test_a_rounded_copy_has_other_matrices_under_the_published_digest(
    tiny: Path, tmp_path: Path
) -> None:
    write_rounded_copy(tiny, tmp_path / "copy", "int4 g128")
    published, copied = (
        load_file(folder / "model.safetensors") for folder in (tiny, tmp_path / "copy")
    )
    differing = {name for name in published if not torch.equal(published[name], copied[name])}
    matrices = {name for name in published if ".layers." in name and published[name].ndim == 2}
    assert differing == matrices != set()
    name = min(matrices)
    rounded = rounding_of("int4 g128")(published[name].float()).to(published[name].dtype)
    assert torch.equal(copied[name], rounded)
    assert weights_digest(tmp_path / "copy") == weights_digest(tiny)
    (tmp_path / "copy" / CACHE).unlink()
    assert weights_digest(tmp_path / "copy") != weights_digest(tiny)


def test_a_rounded_copy_needs_a_rounding_of_weights(tiny: Path, tmp_path: Path) -> None:
    with pytest.raises(KeyError, match="KV cache in fp8"):
        write_rounded_copy(tiny, tmp_path / "copy", "KV cache in fp8")
    assert not (tmp_path / "copy").exists()
