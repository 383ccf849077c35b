"""The commands, variables and probes of the manifests, against the program itself."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest
from typer.main import get_command

from benchmarks.fleet.fake_member import FakeMember
from deploy.manifests import (
    KUBERNETES,
    built,
    command,
    container,
    of_kind,
    plain_values,
    probes,
    workloads,
    written,
)
from fleet.servers import RunningFleet
from gateway.serving import serving
from proofserve.cli.main import app
from proofserve.cli.serve import GATEWAY_OPTIONS, NODE_OPTIONS
from proofserve.fleet.verification_records import AfterConviction
from proofserve.settings.fleet import FleetSettings
from proofserve.settings.gateway import GatewaySettings
from proofserve.settings.node import NodeSettings
from proofserve.wiring.fleet import _require_safe, policy_of
from proofserve.wiring.gateway import plan_of

pytestmark = pytest.mark.anyio

PARTS = workloads(written())
# Variables of the image's libraries, and those that command lines are made of.
OTHERS = {"HOME", "USER", "HF_HOME", "MODEL", "POD_NAME"}
VALUES = {"MODEL": "Qwen/Qwen3-0.6B", "POD_NAME": "members-0"}
CLIENTS = '[[client]]\nname = "web"\nkey = "a-key-of-a-client-for-tests"\n'


def given_options(part: str) -> dict[str, Any]:
    """The options of the command, parsed by the real command line."""
    words = command(PARTS[part], VALUES)
    found: Any = get_command(app)
    while hasattr(found, "resolve_command"):
        # Exits if there is no such command.
        _, found, words = found.resolve_command(found.context_class(found), words)
    made = found.make_context(found.name, words)
    # An unknown option of `serve` goes to vLLM; tests/deploy/test_commands.py has it checked there.
    sources = {each.name: made.get_parameter_source(each.name) for each in found.params}
    chosen = [name for name, source in sources.items() if source and source.name == "COMMANDLINE"]
    return {name: made.params[name] for name in chosen}


@pytest.fixture
def variables(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    """No variable of the machine that runs the test changes what the manifests say."""
    for kind in (NodeSettings, FleetSettings, GatewaySettings):
        for name in kind.model_fields:
            monkeypatch.delenv(f"{kind.model_config['env_prefix']}{name.upper()}", raising=False)
    return monkeypatch


@pytest.mark.parametrize("part", PARTS)
def test_every_variable_is_a_setting(part: str) -> None:
    known = set(OTHERS)
    for kind in (NodeSettings, FleetSettings, GatewaySettings):
        known |= {f"{kind.model_config['env_prefix']}{name.upper()}" for name in kind.model_fields}
    names = [each["name"] for each in container(PARTS[part])["env"]]
    assert set(names) <= known
    assert len(set(names)) == len(names)


@pytest.mark.parametrize("part", PARTS)
def test_every_command_line_parses(part: str, variables: pytest.MonkeyPatch) -> None:
    assert given_options(part)


def member_settings() -> dict[str, Any]:
    given = given_options("members")
    fields = {name: given[name] for name in given if name in NodeSettings.model_fields}
    return {**NODE_OPTIONS.chosen(fields).model_dump(include=set(fields))}


@asynccontextmanager
async def running_member(folder: Path) -> AsyncIterator[tuple[str, FakeMember]]:
    settings = {**member_settings(), "api_key": "a-key-of-operators", "fleet": None}
    member = FakeMember(folder, "members-0", **{**settings, "outbox": folder / "m.sqlite"})
    await member.start()
    try:
        yield member.url, member
    finally:
        await member.kill()


async def answers(url: str, part: str) -> dict[str, int]:
    """The status that each probe of a part gets; probes have no key."""
    (port,) = container(PARTS[part])["ports"]
    async with httpx.AsyncClient(base_url=url, trust_env=False) as http:
        found = {}
        for name, probe in probes(PARTS[part]):
            assert probe["httpGet"]["port"] == port["name"]
            found[name] = (await http.get(probe["httpGet"]["path"])).status_code
    return found


async def test_the_probes_of_a_member(tmp_path: Path, variables: pytest.MonkeyPatch) -> None:
    async with running_member(tmp_path) as (url, member):
        healthy = {"startupProbe": 200, "livenessProbe": 200, "readinessProbe": 200}
        assert await answers(url, "members") == healthy
        member.engine.gone = True
        failed = {"startupProbe": 200, "livenessProbe": 503, "readinessProbe": 503}
        assert await answers(url, "members") == failed
        member.engine.gone = False


async def test_the_probes_of_a_gateway(tmp_path: Path, variables: pytest.MonkeyPatch) -> None:
    keys = tmp_path / "clients.toml"
    keys.write_text(CLIENTS)
    given = {**given_options("gateway"), "client_keys_file": str(keys)}
    plan = plan_of(GATEWAY_OPTIONS.chosen(given))
    assert [each.url for each in plan.names] == ["http://chat:8000"]

    async def no_member(_host: str, _port: int) -> list[str]:
        raise OSError("no member is ready")

    async with serving(plan, resolve=no_member) as server:
        found = await answers(f"http://127.0.0.1:{server.port}", "gateway")
    # It is alive, and gets no chat as long as there is no member for it.
    assert found == {"startupProbe": 200, "livenessProbe": 200, "readinessProbe": 503}


@asynccontextmanager
async def running_controller(folder: Path) -> AsyncIterator[RunningFleet]:
    secrets = ("api_key", "viewer_key", "member_key", "member_secret", "join_key")
    given = {name: f"a-value-of-{name}" for name in secrets} | given_options("controller")
    _require_safe(FleetSettings(**given))
    fleet = RunningFleet(folder, [], **given)
    await fleet.start()
    try:
        yield fleet
    finally:
        await fleet.kill()
        await fleet.http.aclose()


async def test_the_probes_of_a_controller(tmp_path: Path, variables: pytest.MonkeyPatch) -> None:
    async with running_controller(tmp_path) as fleet:
        # Members join through the service, and so before any of them is known.
        assert set((await answers(fleet.url, "controller")).values()) == {200}


async def test_the_queue_is_shown_to_those_with_a_viewers_key(
    tmp_path: Path, variables: pytest.MonkeyPatch
) -> None:
    (trigger,) = of_kind(written(), "ScaledObject")["worker"]["spec"]["triggers"]
    path = "/" + trigger["metadata"]["url"].split("/", 3)[3]
    async with running_controller(tmp_path) as fleet:
        assert (await fleet.http.get(path)).status_code == 401
        headers = {"Authorization": "Bearer a-value-of-viewer_key"}
        shown = await fleet.http.get(path, headers=headers)
    assert shown.status_code == 200
    assert f"\n{trigger['metadata']['valueLocation']} 0.0\n" in shown.text


def test_the_controllers_have_a_policy_where_there_are_workers() -> None:
    controller = of_kind(built("many-cards"), "Deployment")["controller"]
    file = Path(plain_values(controller)["FLEET_POLICY"])
    (mount,) = [m for m in container(controller)["volumeMounts"] if m["name"] == "policy"]
    assert file.parent == Path(mount["mountPath"])
    policy = policy_of(KUBERNETES / "components" / "workers" / file.name)
    assert policy is not None
    assert policy.default is not None
    assert policy.default.conviction is AfterConviction.CORDON


def test_values_in_the_manifests_are_none_of_settings() -> None:
    """Settings are options where they are no secrets, so that the command lines are checked."""
    for part in PARTS.values():
        assert plain_values(part).keys() <= OTHERS
