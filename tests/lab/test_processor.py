from pathlib import Path

import pytest

from proofserve import host as processor
from proofserve.host import multiplies_bytes, quick_dtype
from proofserve_lab import facts
from proofserve_lab.facts import served_in


def test_the_dtype_is_one_that_the_processor_multiplies_quickly(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for number, (text, expected) in enumerate(
        (
            ("model name : EPYC\nflags : fpu avx2 fma\n", "float32"),
            # AVX-512 alone multiplies no bf16.
            ("flags : avx2 avx512f avx512bw avx512_vnni\n", "float32"),
            ("flags : avx2 avx512f avx512_bf16\n", "bfloat16"),
            ("flags : avx2 amx_tile amx_bf16\n", "bfloat16"),
            ("Features : fp asimd bf16 i8mm\n", "bfloat16"),
            ("Features : fp asimd\n", "float32"),
            ("no such line\n", "bfloat16"),
        )
    ):
        file = tmp_path / str(number)
        file.write_text(text)
        for vllm, dtype in (("0.32.0+cpu", expected), ("0.32.0", "bfloat16"), (None, "bfloat16")):
            monkeypatch.setattr(processor, "vllm_version", lambda found=vllm: found)
            assert quick_dtype(file) == dtype, (text, vllm)


def test_bytes_are_multiplied_by_vnni_alone(tmp_path: Path) -> None:
    file = tmp_path / "cpuinfo"
    for text, expected in (
        ("flags : avx2 fma\n", False),
        ("flags : avx2 avx_vnni\n", True),
        ("flags : avx512f avx512_vnni\n", True),
        ("Features : asimd i8mm\n", True),
    ):
        file.write_text(text)
        assert multiplies_bytes(file) is expected, text
    assert multiplies_bytes(tmp_path / "absent")


def test_a_system_that_does_not_say_is_served_as_usual(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(processor, "vllm_version", lambda: "0.32.0+cpu")
    assert quick_dtype(tmp_path / "absent") == "bfloat16"


def test_an_unusual_dtype_is_explained(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(facts, "quick_dtype", lambda: "bfloat16")
    assert served_in("float32") == "in float32"
    monkeypatch.setattr(facts, "quick_dtype", lambda: "float32")
    assert "emulates slowly: --dtype float32" in served_in("bfloat16")
    assert served_in("float32").endswith("this processor has no instructions for bfloat16")
