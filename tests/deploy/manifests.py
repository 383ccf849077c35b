"""The manifests of Kubernetes as they are written, and as kustomize builds them."""

import re
import shutil
import subprocess
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import yaml

KUBERNETES = Path(__file__).parents[2] / "deploy" / "kubernetes"
OVERLAYS = ("one-card", "many-cards", "monitored")
# The files that kustomize reads, and those that are a part of an object.
NOT_WHOLE = ("kustomization.yaml", "sqlite.yaml")
# Names of settings files by kind, as kustomize adds a hash of the content to them.
_HASHED = re.compile(r"-[a-z0-9]{10}$")

Manifest = dict[str, Any]


@cache
def written() -> tuple[Manifest, ...]:
    """The objects of all files, before any overlay changes them."""
    files = [file for file in KUBERNETES.rglob("*.yaml") if file.name not in NOT_WHOLE]
    return tuple(each for file in sorted(files) for each in yaml.safe_load_all(file.read_text()))


@cache
def built(overlay: str) -> tuple[Manifest, ...]:
    """The objects of an overlay. Skips the test where no program can build it."""
    if kubectl := shutil.which("kubectl"):
        command = [kubectl, "kustomize"]
    elif kustomize := shutil.which("kustomize"):
        command = [kustomize, "build"]
    else:
        pytest.skip("neither kubectl nor kustomize is installed; one of them builds overlays")
    done = subprocess.run(
        [*command, str(KUBERNETES / "overlays" / overlay)],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return tuple(yaml.safe_load_all(done.stdout))


def of_kind(manifests: tuple[Manifest, ...], *kinds: str) -> dict[str, Manifest]:
    """The objects of ``kinds`` by name, without the hashes of kustomize."""
    chosen = [each for each in manifests if each["kind"] in kinds]
    return {_HASHED.sub("", each["metadata"]["name"]): each for each in chosen}


def workloads(manifests: tuple[Manifest, ...]) -> dict[str, Manifest]:
    return of_kind(manifests, "Deployment", "StatefulSet")


def pod(workload: Manifest) -> Manifest:
    """The specification of the pods."""
    found: Manifest = workload["spec"]["template"]["spec"]
    return found


def container(workload: Manifest) -> Manifest:
    """The one container of the pods."""
    (found,) = pod(workload)["containers"]
    assert isinstance(found, dict)
    return found


def references(workload: Manifest, kind: str) -> set[tuple[str, str]]:
    """Name and key of each value that the container takes from a map or Secret."""
    sources = (each.get("valueFrom") or {} for each in container(workload).get("env", ()))
    return {
        (_HASHED.sub("", each[kind]["name"]), each[kind]["key"])
        for each in sources
        if kind in each and not each[kind].get("optional")
    }


def probes(workload: Manifest) -> Iterator[tuple[str, Manifest]]:
    for name in ("startupProbe", "livenessProbe", "readinessProbe"):
        if name in container(workload):
            yield name, container(workload)[name]


def command(workload: Manifest, values: dict[str, str]) -> list[str]:
    """The words after ``proofserve``, with ``$(NAME)`` replaced by one of ``values``."""

    def value(found: re.Match[str]) -> str:
        return values[found[1]]

    return [re.sub(r"\$\((\w+)\)", value, word) for word in container(workload)["args"]]


def plain_values(workload: Manifest) -> dict[str, str]:
    """The variables that are written in the manifest itself."""
    env = container(workload)["env"]
    return {each["name"]: each["value"] for each in env if each.get("value") is not None}
