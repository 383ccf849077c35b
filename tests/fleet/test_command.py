"""``proofserve fleet`` as operators run it: processes, signals, exit codes."""

import signal
import subprocess
import time
from pathlib import Path
from typing import Any

import httpx
import pytest
from typer.testing import CliRunner

from fleet.servers import ROUND, Serving, members
from proofserve.cli.main import app
from support.controllers import controller
from support.pace import PACE, until

pytestmark = pytest.mark.anyio

EVERYWHERE = "0.0.0.0"  # noqa: S104 - most of these servers do not start


async def call(method: str, url: str, body: Any = None) -> Any:
    async with httpx.AsyncClient(timeout=30.0, trust_env=False) as client:
        response = await client.request(method, url, json=body)
    assert response.is_success, response.text
    return response.json()


async def answers(url: str, members_: int = 2) -> bool:
    """With so many ready members."""
    try:
        found = await call("GET", f"{url}/api/v1/fleet/snapshot")
    except httpx.HTTPError:
        return False
    return bool(found["fleet"]["members"]["ready"] == members_)


async def test_a_controller_ends_with_0_and_a_killed_one_goes_on(tmp_path: Path) -> None:
    async with members(tmp_path, 2) as made:
        options = [each for member in made for each in ("--member", member.url)]
        url = Serving().url
        with controller(tmp_path, url, *options) as process:
            await until(lambda: answers(url), 60)
            await call("POST", f"{url}/api/v1/pow/init/generate", ROUND)
            await until(lambda: enough(url, 20))
            process.kill()
        before = [len(member.proved()) for member in made]
        with controller(tmp_path, url, *options) as process:
            await until(lambda: answers(url), 60)
            shown = CliRunner().invoke(app, ["fleet", "members", "--url", url])
            await call("POST", f"{url}/api/v1/pow/stop")
            status = await call("GET", f"{url}/api/v1/pow/status")
            process.send_signal(signal.SIGTERM)
            code = await until_ended(process)
    assert all(len(m.proved()) >= count for m, count in zip(made, before, strict=True))
    assert status["status"] == "STOPPED"
    assert len(status["lanes"]["processed"]) == 2
    assert code == 0
    assert shown.exit_code == 0
    assert "GENERATING" in shown.output
    assert made[0].url.removeprefix("http://") in shown.output


async def enough(url: str, count: int) -> bool:
    status = await call("GET", f"{url}/api/v1/pow/status")
    return bool(status["stats"]["total_processed"] >= count)


async def until_ended(process: "subprocess.Popen[bytes]") -> int:
    async def ended() -> bool:
        return process.poll() is not None

    await until(ended)
    return process.wait()


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        (["--host", EVERYWHERE], "has no key"),
        (["--host", EVERYWHERE, "--api-key", "k"], "FLEET_MEMBER_SECRET"),
        (["--host", EVERYWHERE, "--allow-anonymous"], "--public-url"),
        (["--member", "node:1"], "is not a URL"),
        (["--members-file", "absent.toml"], "cannot read absent.toml"),
        (["--database", "mysql://x/y"], "another kind"),
        (["--callback-allow", "everywhere"], "FLEET_CALLBACK_ALLOW"),
    ],
)
def test_a_controller_with_wrong_settings_does_not_start(options: list[str], reason: str) -> None:
    began = time.monotonic()
    result = CliRunner().invoke(app, ["fleet", "serve", "--port", "0", *options])
    assert result.exit_code == 2
    assert reason in result.output
    assert time.monotonic() - began < 60 * PACE


async def test_a_member_is_cordoned_by_its_name(tmp_path: Path) -> None:
    async with members(tmp_path, 1) as made:
        url = Serving().url
        with controller(tmp_path, url, "--member", made[0].url):
            await until(lambda: answers(url, 1), 60)
            run = CliRunner().invoke
            why = ["--reason", "a new driver", "--url", url]
            cordoned = run(app, ["fleet", "cordon", made[0].url, *why])
            unknown = run(app, ["fleet", "drain", "absent", *why])
            shown = run(app, ["fleet", "members", "--url", url], env={"COLUMNS": "60"})
            state = await call("GET", f"{url}/api/v1/fleet/members")
    assert cordoned.output.strip().endswith("cordoned (a new driver)")
    assert state["members"][0]["wish_reason"] == "a new driver"
    assert unknown.exit_code == 2
    assert "0 members are called 'absent'" in unknown.output
    name = made[0].url.removeprefix("http://")
    # Whole also on a narrow screen, to be copied into the next command.
    assert sum(line.startswith(f"{name} ") for line in shown.output.splitlines()) == 1
