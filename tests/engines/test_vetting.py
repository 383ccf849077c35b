"""The table of versions, and the check of an unknown version's sources."""

import logging
import textwrap
from pathlib import Path
from types import SimpleNamespace

import pytest
import vllm

from proofserve.engines.vetting import features
from proofserve.engines.vetting.features import VETTED, Name, Pin, vetting_of
from proofserve.engines.vetting.start import Sources, moved, require_vetted, require_vetted_runner
from proofserve.engines.vllm.support import UnsupportedEngine

CHAT = "chat before proofs"
CORE = """
    from elsewhere import imported as known_as

    VALUE: int = 3
    first, (second, third) = VALUE, (1, 2)
    if VALUE:
        def in_if(): ...
    else:
        def in_else(): ...

    class Core(Base):
        field: int
        def __init__(self, size, *, keyword=1):
            self.attribute = size
            self.annotated: int = size
            self.one, self.other = size, keyword
            other.foreign = 1
            self.read_only.inner = 1
        async def step(self, first, /, second): ...
        @property
        def gauge(self): ...
"""


@pytest.fixture
def sources(tmp_path: Path) -> Sources:
    write(tmp_path, "engine/core.py", CORE)
    write(tmp_path, "engine/__init__.py", "flag = 1")
    return Sources(tmp_path)


def write(root: Path, name: str, text: str) -> None:
    path = root / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(textwrap.dedent(text))


@pytest.mark.parametrize(
    ("name", "has"),
    [
        ("", ("Core", "VALUE", "known_as", "first", "third", "in_if", "in_else")),
        ("Core", ("field", "step", "gauge", "attribute", "annotated", "one", "other")),
        ("Core.__init__", ("size", "keyword")),
        ("Core.step", ("first", "second")),
        ("Core.gauge", ()),
    ],
)
def test_names_that_the_sources_define(sources: Sources, name: str, has: tuple[str, ...]) -> None:
    assert sources.missing(Name("any.engine.core", name, has)) == ()


@pytest.mark.parametrize(
    ("name", "has", "missing"),
    [
        ("", ("imported", "Base", "gone"), ("imported", "Base", "gone")),
        ("Core", ("foreign", "read_only", "inner", "step"), ("foreign", "read_only", "inner")),
        ("Core.step", ("third",), ("third",)),
        ("Core.gone", (), None),
        ("Gone", (), None),
        ("VALUE", ("real",), ("real",)),
    ],
)
def test_names_that_they_do_not(
    sources: Sources, name: str, has: tuple[str, ...], missing: tuple[str, ...] | None
) -> None:
    assert sources.missing(Name("any.engine.core", name, has)) == missing


def test_a_package_is_a_module_too(sources: Sources) -> None:
    assert sources.missing(Name("any.engine", "flag", ())) == ()
    assert sources.missing(Name("any.nowhere", "", ())) is None


def lost(*pins: Pin, sources: Sources) -> list[str]:
    return moved(pins, sources)


def test_what_moved_is_named_with_the_feature_that_needs_it(sources: Sources) -> None:
    pins = (
        Pin(CHAT, "ours.watch", Name("any.engine.core", "Core", ("step", "gone"))),
        Pin(CHAT, "ours.wait", Name("any.engine.core", "Core.step", ("second",))),
        Pin(CHAT, "ours.ask", Name("any.engine.client", "Client")),
    )
    assert lost(*pins, sources=sources) == [
        "any.engine.core.Core without gone, needed by chat before proofs (ours.watch)",
        "no any.engine.client.Client, needed by chat before proofs (ours.ask)",
    ]


def test_the_older_spelling_holds_if_all_of_it_is_there(sources: Sources) -> None:
    core, step = Name("any.engine.core", "Core", ("step",)), Name("any.engine.core", "Core.step")
    gone = Name("any.engine.core", "Core.gone")
    new, kept = Name("any.new", "Core"), Name("any.engine.core", "Core")
    assert lost(Pin(CHAT, "f", new, older=(core, step)), sources=sources) == []
    assert lost(Pin(CHAT, "f", kept, older=(gone,)), sources=sources) == []
    said = ["no any.new.Core, needed by chat before proofs (f)"]
    assert lost(Pin(CHAT, "f", new, older=(core, gone)), sources=sources) == said
    assert lost(Pin(CHAT, "f", new), sources=sources) == said


@pytest.mark.parametrize("version", ["0.32.0", "0.32.1rc2+cpu", "0.29.1", "0.33.0.dev4+g12"])
def test_a_patch_version_belongs_to_its_minor_version(version: str) -> None:
    row = vetting_of(version)
    assert row is not None
    assert version.startswith(row.minor)
    assert "V1" in row.runners


@pytest.mark.parametrize("version", ["0.28.0", "0.34.0", "1.32.0", "0.3.2", "dev", ""])
def test_other_versions_have_no_row(version: str) -> None:
    assert vetting_of(version) is None


@pytest.fixture
def unknown(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(vllm, "__version__", "0.99.0")


def test_a_vetted_version_is_not_searched(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(vllm, "__version__", VETTED[0].minor + ".0")
    monkeypatch.setattr(vllm, "__file__", "/no/where/__init__.py")
    assert "was vetted" in require_vetted(False, features.ALL)


@pytest.mark.usefixtures("unknown")
def test_an_unknown_version_is_refused_with_the_two_ways_out() -> None:
    with pytest.raises(UnsupportedEngine, match=r"0\.99\.0.*vetted: 0\.26, .*--poc-unvetted"):
        require_vetted(False, features.ALL)


@pytest.mark.usefixtures("unknown")
def test_an_unknown_version_with_every_name_starts_with_a_warning(
    caplog: pytest.LogCaptureFixture,
) -> None:
    with caplog.at_level(logging.WARNING):
        found = require_vetted(True, features.ALL)
    assert "pins hold" in found
    assert "0.99.0 was not vetted" in caplog.text


@pytest.mark.usefixtures("unknown")
def test_an_unknown_version_without_a_name_is_refused_and_the_name_given(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write(tmp_path, "v1/engine/core.py", "class EngineCore: ...")
    monkeypatch.setattr(vllm, "__file__", str(tmp_path / "__init__.py"))
    with pytest.raises(UnsupportedEngine) as refusal:
        require_vetted(True, features.of_node(receipts=False))
    text = str(refusal.value)
    assert "EngineCore without _idle_state_callbacks, needed by chat before proofs" in text
    assert "receipts" not in text


def test_a_runner_that_was_not_vetted_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    first, second = (SimpleNamespace(use_v2_model_runner=v2) for v2 in (False, True))
    monkeypatch.setattr(vllm, "__version__", "0.29.0")
    require_vetted_runner(first)
    with pytest.raises(UnsupportedEngine, match="VLLM_USE_V2_MODEL_RUNNER=0"):
        require_vetted_runner(second)
    # Of a version without a row the pins alone decide.
    monkeypatch.setattr(vllm, "__version__", "0.99.0")
    require_vetted_runner(second)
