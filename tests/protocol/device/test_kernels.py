"""The kernels for CUDA devices, as far as a machine without one can test them."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from proofserve.settings.process import environment

ROOT = Path(__file__).parents[3]


def printed(script: str, *arguments: str, **variables: str) -> dict[str, Any]:
    """What a script of this folder prints, run in a process of its own."""
    path = f"{ROOT / 'src'}:{ROOT / 'tests'}:{ROOT}"
    ran = subprocess.run(
        [sys.executable, str(Path(__file__).parent / script), *arguments],
        env=environment({"PYTHONPATH": path, **variables}),
        capture_output=True,
        text=True,
        timeout=500,
        check=False,
    )
    assert ran.returncode == 0, ran.stderr
    read: dict[str, Any] = json.loads(ran.stdout.splitlines()[-1])
    return read


@pytest.fixture(scope="module")
def found() -> dict[str, Any]:
    return printed("interpreted.py", TRITON_INTERPRET="1")


def test_integers_are_the_same(found: dict[str, Any]) -> None:
    assert found["differing hashes"] == 0
    assert found["no rows"] == [0, 5]


def test_normals_are_within_the_protocols_tolerance(found: dict[str, Any]) -> None:
    assert 0 <= found["farthest normal"] <= 2e-6
    assert found["not rounded once"] == []


def test_rotations_are_within_the_protocols_tolerance(found: dict[str, Any]) -> None:
    assert found["farthest rotation"] <= 5e-6
    assert found["broken rows stay broken"]


def test_every_golden_case_holds_with_the_kernels(found: dict[str, Any]) -> None:
    """The script ends with an error at the first one that does not."""
    golden = found["golden"]
    assert golden["cases"] >= 70
    assert min(golden[kernel] for kernel in ("fill_normal", "hash_keys", "rotate")) >= 10


@pytest.fixture(scope="module")
def ptx() -> dict[str, str]:
    return printed("compiled.py", "90")


def test_compiled_normals_use_no_approximate_function(ptx: dict[str, str]) -> None:
    """The tolerance holds for libdevice's functions, not for the processor's short ones."""
    code = ptx["_fill_normal"]
    assert "approx" not in code
    assert "sqrt.rn" in code
    # Rounded to nearest even from the unsigned integer, once to bfloat16.
    assert "cvt.rn.f32.u32" in code
    assert "cvt.rn.bf16" in code


def test_compiled_operations_are_not_joined(ptx: dict[str, str]) -> None:
    """torch rounds after each of them."""
    assert "fma" not in ptx["_rotate"]
    assert "mul.rn.f32" in ptx["_rotate"]
    # 32 bits wide, and shifted without the sign.
    assert "mul.lo.s32" in ptx["_hash_keys"]
    assert "shr.u32" in ptx["_hash_keys"]
