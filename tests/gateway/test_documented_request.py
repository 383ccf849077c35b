"""The documented request, sent to a gateway in front of the model names of the start script."""

import json
import os
import re
import subprocess
from pathlib import Path
from typing import Any

import pytest

from gateway.scripted import Backend, answers
from gateway.serving import once, plan_for, post, serving

pytestmark = pytest.mark.anyio

ROOT = Path(__file__).parent.parent.parent
CURL = re.compile(r"curl [^\n]*:7000/v1/chat/completions .*?-d '(\{.*?\})'", re.DOTALL)
# The fields of requirement 004: "model", "messages", "stream", "max_tokens" and "temperature".
REQUIRED_MODEL = "gpt-oss-20b"


def documented(page: str) -> list[dict[str, Any]]:
    """The bodies of the chat requests in a document."""
    return [json.loads(body) for body in CURL.findall((ROOT / page).read_text())]


def served_names(folder: Path) -> list[str]:
    """The names under which the start script serves its default model."""
    stub = folder / "proofserve"
    stub.write_text("#!/usr/bin/env bash\nprintf '%s\\n' \"$@\"\n")
    stub.chmod(0o755)
    rest = {name: value for name, value in os.environ.items() if not name.startswith("VLLM_")}
    script = ROOT / "scripts" / "start_vllm_h100.sh"
    done = subprocess.run(
        [script],
        env={**rest, "PATH": f"{folder}:{os.environ['PATH']}"},
        capture_output=True,
        text=True,
        check=True,
    )
    given = done.stdout.splitlines()
    names = given[given.index("--served-model-name") + 1 :]
    return names[: next(at for at, each in enumerate(names) if each.startswith("--"))]


async def test_the_gateway_relays_the_documented_body_with_either_model_name(
    tmp_path: Path,
) -> None:
    (body,) = documented("docs/gateway.md")
    assert body["model"] == REQUIRED_MODEL
    names = served_names(tmp_path)
    assert names == ["openai/gpt-oss-20b", REQUIRED_MODEL]
    backend = Backend(answers)
    backend.models = names
    await backend.start()
    try:
        async with serving(plan_for(backend)) as server:
            for name in names:
                got = await once(server.port, post(json.dumps({**body, "model": name}).encode()))
                assert got.status == 200
                assert json.loads(backend.calls[-1].body)["messages"] == body["messages"]
            got = await once(server.port, post(json.dumps({**body, "model": "gpt"}).encode()))
            assert (got.status, got.code) == (404, "model_not_found")
    finally:
        await backend.die()
