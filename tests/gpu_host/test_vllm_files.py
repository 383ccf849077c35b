"""What ``make gpu`` says of a vLLM that was unpacked by hand."""

from pathlib import Path

import pytest

from gpu import vllm_files


@pytest.fixture
def site(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder in PYTHONPATH with a package ``vllm`` of two files."""
    for name, text in (("whole.py", "import email"), ("needy.py", "import no_such_package")):
        (tmp_path / "vllm_here").mkdir(exist_ok=True)
        (tmp_path / "vllm_here" / name).write_text(text)
    info = tmp_path / "vllm-0.26.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: vllm\nVersion: 0.26.0\n")
    record = ["vllm_here/whole.py,sha256=x,12", "vllm_here/needy.py,,22", "made/later.pyc,,"]
    (info / "RECORD").write_text("\n".join(record))
    monkeypatch.syspath_prepend(tmp_path)
    return tmp_path


def test_a_whole_one_is_imported(site: Path) -> None:
    assert vllm_files.problem(site, ["vllm_here.whole"]) is None


def test_a_package_that_it_lacks_is_named(site: Path) -> None:
    found = vllm_files.problem(site, ["vllm_here.whole", "vllm_here.needy"])
    assert found == (f"vLLM in {site} cannot be imported: No module named 'no_such_package'")


def test_files_that_are_missing_or_cut_off_are_named(site: Path) -> None:
    (site / "vllm_here" / "whole.py").write_text("import")
    (site / "vllm_here" / "needy.py").unlink()
    found = str(vllm_files.problem(site, ["vllm_here.whole"]))
    assert f"{site}: missing or cut off: vllm_here/whole.py, vllm_here/needy.py." in found
