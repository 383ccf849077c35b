"""The installed vLLM under another version number, and with names that are gone."""

import importlib.util
import os
from pathlib import Path


def other_vllm(folder: Path, version: str, renamed: dict[str, tuple[str, str]]) -> dict[str, str]:
    """The environment in which ``import vllm`` gets the other one; its files are in ``folder``.

    ``renamed``: by a module's file, below the package, a text in it and what takes its place.
    Every other file is a link to the installed one.
    """
    found = importlib.util.find_spec("vllm")
    assert found is not None
    assert found.origin is not None
    installed = Path(found.origin).parent
    changed = {
        "_version.py": f"__version__ = {version!r}\n__version_tuple__ = (0, 99, 0)\n",
        **{file: _replaced(installed / file, *texts) for file, texts in renamed.items()},
    }
    _link(installed, folder / "vllm", changed)
    path = [str(folder), os.environ.get("PYTHONPATH", "")]
    return {"PYTHONPATH": os.pathsep.join(filter(None, path))}


def _replaced(file: Path, old: str, new: str) -> str:
    text = file.read_text()
    assert old in text
    return text.replace(old, new)


def _link(real: Path, copy: Path, changed: dict[str, str]) -> None:
    copy.mkdir(parents=True)
    for entry in real.iterdir():
        own = changed.get(entry.name)
        below = {
            name.partition("/")[2]: text
            for name, text in changed.items()
            if name.startswith(f"{entry.name}/")
        }
        if own is not None:
            (copy / entry.name).write_text(own)
        elif below:
            _link(entry, copy / entry.name, below)
        elif entry.name != "__pycache__":
            (copy / entry.name).symlink_to(entry)
