"""docs/api is what the code is, and its example payloads are what it says and what is read."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from described import FAULTS, check, check_callback, of_callback, validator
from jsonschema_rs import Draft202012Validator
from pydantic import TypeAdapter

from scripts import schemas
from scripts.schemas import EXAMPLES, FOLDER, READ, WRITTEN

MODELS = Path(schemas.__file__).parent.parent / "src" / "proofserve" / "models"


@pytest.fixture(scope="module")
def made() -> dict[str, dict[str, Any]]:
    return schemas.documents()


def test_the_files_are_made_from_this_code(made: dict[str, dict[str, Any]]) -> None:
    committed = {file.name: file.read_text() for file in FOLDER.glob("*.json")}
    assert committed.keys() == made.keys()
    changed = [name for name in made if schemas.text_of(made[name]) != committed[name]]
    assert changed == [], "run `make schemas`, and look at what changed for clients"


def payloads(name: str) -> list[Any]:
    found: list[Any] = json.loads((EXAMPLES / f"{name}.json").read_text())
    return found


@pytest.mark.parametrize("name", [*READ, *WRITTEN])
def test_each_schema_describes_its_examples(name: str, made: dict[str, dict[str, Any]]) -> None:
    schema = Draft202012Validator(made[f"{name}.schema.json"])
    if name == "calibration":
        found = [json.loads(file.read_text()) for file in MODELS.glob("*/*calibration.json")]
    else:
        found = payloads(name)
    assert found
    for payload in found:
        schema.validate(payload)
        TypeAdapter({**READ, **WRITTEN}[name]).validate_json(json.dumps(payload))
        shorter = [{f: payload[f] for f in payload if f != left_out} for left_out in payload]
        assert not all(map(schema.is_valid, shorter))


@pytest.mark.parametrize("name", ["node", "gateway", "receiver", "fleet"])
def test_each_page_describes_its_examples(name: str) -> None:
    answers = json.loads((EXAMPLES / f"{name}.json").read_text())
    assert answers
    for operation, answer in answers.items():
        method, path = operation.split()
        validator(name, path, method, 200).validate(answer)


def test_an_answer_that_is_not_described_is_a_fault(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What every other test relies on (``conftest.py``)."""
    file = tmp_path / "faults"
    monkeypatch.setenv(FAULTS, str(file))
    check("receiver", "/generated", "POST", 200, b'{"status": "stored"}')
    (generated, *_) = payloads("callback-generated")
    check_callback("generated", json.dumps(generated).encode())
    assert not file.exists()
    check("receiver", "/generated", "POST", 200, b'{"status": "lost"}')
    check("receiver", "/generated", "POST", 202, b"{}")
    check_callback("generated", json.dumps({**generated, "node_id": "3"}).encode())
    lost, other, wrong, *_ = (line for line in file.read_text().splitlines() if ": " in line)
    assert "lost" in lost
    assert "202" in other
    assert "a stored callback of generated" in file.read_text()
    assert wrong
    assert not of_callback("generated").is_valid({})


def test_servers_that_tests_start_are_watched() -> None:
    """By what every Python that a test starts imports first."""
    code = (
        "import proofserve.receiver.app, fastapi.routing as routing;"
        "print(routing.APIRoute.handle.__module__)"
    )
    argv = (sys.executable, "-c", code)
    done = subprocess.run(argv, capture_output=True, text=True, check=True)
    assert done.stdout == "described\n"
