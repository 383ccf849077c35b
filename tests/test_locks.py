"""What `make setup` installs: each file with its hash, nothing of the machine that locked it."""

import re
from pathlib import Path

import pytest

FOLDER = Path(__file__).parent.parent / "requirements"
# Torch has no hash: which build of a version an index serves differs.
TORCH = ("torch.lock", "matrix/0.26-torch.lock")
LOCKS = sorted(f"matrix/{lock.name}" for lock in (FOLDER / "matrix").iterdir())
MATRIX = [name for name in LOCKS if name not in TORCH]
HASHED = ("cpu.lock", "cpu-nodeps.lock", "tools.lock", "uv.lock", *MATRIX)
ENTRY = re.compile(r"[a-z0-9][a-z0-9._-]*==[a-z0-9.]+( \\\n    --hash=sha256:[0-9a-f]{64})+")


def entries(name: str) -> list[str]:
    """A lock's requirements, each with the lines that it goes on for."""
    text = re.sub(r"^#.*$", "", (FOLDER / name).read_text(), flags=re.MULTILINE)
    return [entry for entry in re.split(r"\n(?! )", text) if entry]


@pytest.mark.parametrize("name", HASHED)
def test_every_version_is_pinned_with_its_hashes(name: str) -> None:
    assert [entry for entry in entries(name) if not ENTRY.fullmatch(entry)] == []
    assert entries(name)


def test_torch_stands_alone() -> None:
    for name in TORCH:
        (torch,) = entries(name)
        assert re.fullmatch(r"torch==[0-9.]+", torch)
    assert not [entry for name in HASHED for entry in entries(name) if entry.startswith("torch==")]
