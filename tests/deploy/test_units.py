"""The systemd units and the compose file: what their own linters say, and what must agree."""

import configparser
import os
import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml

from proofserve.plugin.endpoint import ROUND_END_S
from proofserve.settings.gateway import GatewaySettings
from proofserve.settings.node import NodeSettings

ROOT = Path(__file__).parents[2]
DEPLOY = ROOT / "deploy"
UNITS = sorted((DEPLOY / "systemd").glob("*.service"))
# What balancers need to notice, and an engine to end, seconds.
SLACK_S = 10


class Unit(configparser.ConfigParser):
    """A unit file; systemd's names keep their case."""

    def __init__(self, path: Path) -> None:
        super().__init__(interpolation=None)
        self.read_string(path.read_text())

    def optionxform(self, optionstr: str) -> str:
        return optionstr


@pytest.mark.parametrize("path", UNITS, ids=lambda path: path.name)
def test_a_unit_passes_systemds_own_check(path: Path) -> None:
    if shutil.which("systemd-analyze") is None:
        pytest.skip("systemd-analyze is not installed; it comes with systemd")
    done = subprocess.run(
        ["systemd-analyze", "verify", str(path)], capture_output=True, text=True, check=False
    )
    # It takes directives that it does not know, and only speaks of them.
    assert (done.returncode, path.name in done.stderr) == (0, False), done.stderr


@pytest.mark.parametrize("path", UNITS, ids=lambda path: path.name)
def test_a_unit_restarts_the_server_and_lets_it_end(path: Path) -> None:
    service = Unit(path)["Service"]
    assert service["KillMode"] == "mixed"
    assert service["Restart"] == "on-failure"
    assert Unit(path)["Install"]["WantedBy"] == "multi-user.target"


def node_end_s(command: str) -> float:
    """The longest orderly end of a node: its round, its chat and its callbacks."""
    (chat,) = re.findall(r"--shutdown-timeout (\d+)", command)
    flush: float = NodeSettings.model_fields["shutdown_flush_sec"].default
    return ROUND_END_S + int(chat) + flush


def test_the_units_give_time_enough() -> None:
    node, gateway = (Unit(path)["Service"] for path in reversed(UNITS))
    assert float(node["TimeoutStopSec"]) >= node_end_s(node["ExecStart"]) + SLACK_S
    drain: float = GatewaySettings.model_fields["drain_timeout_seconds"].default
    assert float(gateway["TimeoutStopSec"]) >= drain + SLACK_S


@pytest.fixture(scope="module")
def services() -> Any:
    return yaml.safe_load((DEPLOY / "compose.yml").read_text())["services"]


def test_the_services_give_time_enough(services: Any) -> None:
    seconds = float(services["node"]["stop_grace_period"].removesuffix("s"))
    assert seconds >= node_end_s(services["node"]["command"]) + SLACK_S
    drain: float = GatewaySettings.model_fields["drain_timeout_seconds"].default
    assert float(services["gateway"]["stop_grace_period"].removesuffix("s")) >= drain + SLACK_S


def test_every_service_comes_from_somewhere_and_starts_again(services: Any) -> None:
    assert set(services) == {"node", "gateway", "prometheus", "grafana"}
    for name, service in services.items():
        assert {"image", "build"} & set(service), name
        assert service["restart"] == "unless-stopped", name


def test_what_compose_mounts_and_scrapes_is_there(services: Any) -> None:
    kept = yaml.safe_load((DEPLOY / "compose.yml").read_text())["volumes"]
    mounts = [m.split(":")[0] for s in services.values() for m in s.get("volumes", ())]
    assert mounts
    for mount in mounts:
        assert (DEPLOY / mount).exists() if mount.startswith(".") else mount in kept, mount
    jobs = yaml.safe_load((DEPLOY / "prometheus" / "prometheus.yml").read_text())["scrape_configs"]
    targets = [t for job in jobs for config in job["static_configs"] for t in config["targets"]]
    assert [target.split(":")[0] for target in targets] == ["node", "gateway"]


def test_compose_keeps_files_where_every_user_of_the_image_may_write(services: Any) -> None:
    mounts = [mount.split(":")[1] for mount in services["node"]["volumes"]]
    assert services["node"]["environment"]["HF_HOME"] in mounts
    image = (DEPLOY / "Dockerfile").read_text()
    (folders,) = re.findall(r"^RUN mkdir --mode 1777 (.*)$", image, re.MULTILINE)
    assert sorted(folders.split()) == sorted(mounts)


def test_other_machines_reach_only_chat_and_grafana_has_a_password_of_its_own(
    services: Any,
) -> None:
    opened = [
        name
        for name, service in services.items()
        if any(not port.startswith("127.0.0.1:") for port in service.get("ports", ()))
    ]
    assert opened == ["gateway"]
    password = services["grafana"]["environment"]["GF_SECURITY_ADMIN_PASSWORD"]
    # Without a value compose refuses to start.
    assert password.startswith("${GRAFANA_PASSWORD:?")


def test_compose_itself_takes_the_file() -> None:
    docker = shutil.which("docker")
    plugin = docker and subprocess.run(
        [docker, "compose", "version"], capture_output=True, check=False
    )
    if not docker or not plugin or plugin.returncode != 0:
        pytest.skip("docker compose is not installed")
    secrets = {"POC_API_KEY": "a-key-for-tests", "GRAFANA_PASSWORD": "a-password-for-tests"}
    done = subprocess.run(
        [docker, "compose", "-f", str(DEPLOY / "compose.yml"), "config", "--quiet"],
        env={**os.environ, **secrets},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
