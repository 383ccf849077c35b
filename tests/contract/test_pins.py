"""Every name of vLLM that the adapter relies on is where its pin says, in this version."""

import ast
import importlib
import inspect
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import vllm

from proofserve.engines.vetting import features
from proofserve.engines.vetting.features import Name, Pin, vetting_of
from proofserve.engines.vetting.start import Sources, moved

OURS = Path(features.__file__).parents[1]
PLUGIN = OURS.parent / "plugin"
PINS = features.ALL
# Public, and in every version.
PUBLIC = {("vllm", "logger")}


@pytest.fixture(scope="module")
def sources() -> Sources:
    return Sources(Path(vllm.__file__).parent)


def label(pin: Pin) -> str:
    return f"{pin.newest.module.removeprefix('vllm.')}.{pin.newest.name}"


def test_this_version_is_in_the_table() -> None:
    assert vetting_of(vllm.__version__)


@pytest.mark.parametrize("pin", PINS, ids=label)
def test_the_sources_have_the_name(pin: Pin, sources: Sources) -> None:
    assert moved([pin], sources) == []


@pytest.mark.parametrize("pin", PINS, ids=label)
def test_the_running_vllm_has_the_name_too(pin: Pin) -> None:
    assert any(all(map(runs, names)) for names in pin.spellings)


def runs(name: Name) -> bool:
    """Whether the name can be imported, and a function has its parameters."""
    try:
        found: Any = importlib.import_module(name.module)
        for part in filter(None, name.name.split(".")):
            found = getattr(found, part)
    except (ImportError, AttributeError):
        return False
    if inspect.isfunction(found):
        return set(name.has) <= set(inspect.signature(found).parameters)
    return True


def ours() -> Iterator[Path]:
    yield from OURS.rglob("*.py")
    yield from PLUGIN.rglob("*.py")


def imports_of_vllm(path: Path) -> Iterator[tuple[str, str]]:
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "vllm":
            yield from ((str(node.module), alias.name) for alias in node.names)


@pytest.mark.parametrize("path", sorted(ours()), ids=lambda path: path.name)
def test_every_import_of_vllm_is_pinned(path: Path) -> None:
    names = [name for pin in PINS for spelling in pin.spellings for name in spelling]
    pinned = {(name.module, name.name.partition(".")[0]) for name in names}
    assert set(imports_of_vllm(path)) <= pinned | PUBLIC


@pytest.mark.parametrize("pin", PINS, ids=label)
def test_a_pin_names_a_function_of_ours(pin: Pin) -> None:
    package = Sources(OURS.parent)
    for root in ("proofserve.engines.vllm", "proofserve.engines", "proofserve"):
        parts = pin.used_by.split(".")
        for cut in range(1, len(parts) + 1):
            module = ".".join([root, *parts[:cut]])
            if package.missing(Name(module, ".".join(parts[cut:]))) == ():
                return
    pytest.fail(f"{pin.used_by} is not a function of ours")
