"""``scripts/setup.py`` against a folder of wheels: a few lines for a person, all else in a log."""

import hashlib
import json
import os
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
# No index: uv cannot be had, as on a machine whose index does not serve it.
OFFLINE = {"PIP_NO_INDEX": "1", "PIP_CONFIG_FILE": os.devnull}


def wheel(folder: Path, name: str) -> None:
    """A wheel of one empty module."""
    info = f"{name}-1.0.dist-info"
    with zipfile.ZipFile(folder / f"{name}-1.0-py3-none-any.whl", "w") as packed:
        packed.writestr(f"{name}.py", "")
        packed.writestr(f"{info}/METADATA", f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\n")
        packed.writestr(
            f"{info}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n"
        )
        packed.writestr(f"{info}/RECORD", "")


@pytest.fixture
def project(tmp_path: Path) -> Path:
    """A project that locks one package in each lock, and is a package itself."""
    shutil.copytree(ROOT / "scripts", tmp_path / "scripts")
    wheels = tmp_path / "wheels"
    wheels.mkdir()
    (tmp_path / "requirements").mkdir()
    for lock in ("cpu", "torch", "cpu-nodeps"):
        name = f"from_{lock.replace('-', '_')}"
        wheel(wheels, name)
        packed = next(wheels.glob(f"{name}-*")).read_bytes()
        digest = "" if lock == "torch" else f" --hash=sha256:{hashlib.sha256(packed).hexdigest()}"
        (tmp_path / "requirements" / f"{lock}.lock").write_text(f"{name}==1.0{digest}\n")
    (tmp_path / "requirements" / "uv.lock").write_text("uv==99.0 --hash=sha256:" + "0" * 64 + "\n")
    return tmp_path


def setup(project: Path) -> "subprocess.CompletedProcess[str]":
    return subprocess.run(
        [sys.executable, "scripts/setup.py", "env"],
        cwd=project,
        env={**os.environ, **OFFLINE, "PIP_FIND_LINKS": str(project / "wheels")},
        capture_output=True,
        text=True,
        check=False,
    )


def test_without_uv_pip_installs_every_lock_and_says_little(project: Path) -> None:
    # The project itself needs a build backend, which is not here: the last step fails.
    (project / "pyproject.toml").write_text("[project]\nname = 'it'\nversion = '1'\n")
    done = setup(project)
    assert "is not available here: pip installs" in done.stdout
    assert len(done.stdout.splitlines()) <= 8
    installed = {p.stem for p in project.glob("env/lib/python*/site-packages/from_*.py")}
    assert installed == {"from_cpu", "from_torch", "from_cpu_nodeps"}
    assert "Successfully installed from_cpu-1.0" in (project / "env" / "setup.log").read_text()


@pytest.mark.parametrize("kind", ["--symlinks", pytest.param("--copies", marks=pytest.mark.slow)])
def test_an_environment_of_an_earlier_setup_is_kept(kind: str, project: Path) -> None:
    made = [sys.executable, "-m", "venv", "--without-pip", kind, "env"]
    subprocess.run(made, cwd=project, check=True)
    (project / "env" / "kept").touch()
    (project / "requirements" / "torch.lock").write_text("no-such-package==1.0\n")
    assert "Installing torch failed" in setup(project).stderr
    assert (project / "env" / "kept").exists()


def test_a_failed_step_names_itself_and_the_log(project: Path) -> None:
    (project / "requirements" / "cpu.lock").write_text("no-such-package==1.0\n")
    done = setup(project)
    assert done.returncode == 1
    assert done.stdout.rstrip().replace(".", "").endswith("requirements  failed")
    assert "no-such-package" in done.stderr
    assert f"Installing requirements failed. See {project / 'env' / 'setup.log'}" in done.stderr


def test_uv_takes_the_indexes_that_pip_has() -> None:
    shown = (
        "global.index-url='https://index.example/simple'\n"
        "global.extra-index-url='https://a.example https://b.example'\n"
        ":env:.find-links='/one /two'\nglobal.cert='/ca.pem'\nglobal.timeout='180'\n"
    )
    code = "import json, sys, setup; print(json.dumps(setup.uv_variables(sys.argv[1])))"
    done = subprocess.run(
        [sys.executable, "-c", code, shown],
        cwd=ROOT / "scripts",
        capture_output=True,
        text=True,
        check=True,
    )
    assert json.loads(done.stdout) == {
        "UV_DEFAULT_INDEX": "https://index.example/simple",
        "UV_INDEX": "https://a.example https://b.example",
        "UV_FIND_LINKS": "/one,/two",
        "SSL_CERT_FILE": "/ca.pem",
        "UV_INDEX_STRATEGY": "unsafe-best-match",
    }
