"""The manifests of Kubernetes: their schemas, what they refer to, and how safe their pods are."""

import re
from pathlib import Path
from typing import Any

import jsonschema
import kubernetes_validate
import pytest
import yaml

from deploy.manifests import (
    KUBERNETES,
    OVERLAYS,
    Manifest,
    built,
    container,
    of_kind,
    pod,
    references,
    workloads,
    written,
)
from deploy.test_units import SLACK_S, node_end_s
from proofserve.gateway import backends as roster
from proofserve.gateway.records import GatewayPlan
from proofserve.settings.fleet import FleetSettings
from proofserve.settings.gateway import GatewaySettings
from proofserve.wiring.fleet import _CLOSE_S

VERSION = "1.37"
DOCUMENT = (KUBERNETES.parents[1] / "docs" / "kubernetes.md").read_text()
KUSTOMIZATIONS = sorted(KUBERNETES.rglob("kustomization.yaml"))
# Of KEDA's published definitions (keda.sh/v1alpha1): what is needed, and what there is.
TEXTS = {"type": "object", "additionalProperties": {"type": "string"}}
TRIGGER: dict[str, Any] = {
    "required": ["type", "metadata"],
    "additionalProperties": False,
    "properties": {
        "type": {"const": "metrics-api"},
        "metadata": TEXTS,
        "name": {"type": "string"},
        "metricType": {"enum": ["AverageValue", "Value", "Utilization"]},
        "useCachedMetrics": {"type": "boolean"},
        "authenticationRef": {"required": ["name"]},
    },
}
COUNT = {"type": "integer", "minimum": 0}
# And of the Prometheus operator's (monitoring.coreos.com/v1).
ENDPOINT: dict[str, Any] = {
    "required": ["port"],
    "additionalProperties": False,
    "properties": {
        **{key: {"type": "string"} for key in ("port", "path", "interval", "scrapeTimeout")},
        "authorization": {"properties": {"credentials": {"required": ["name", "key"]}}},
    },
}
MONITORING: dict[str, Any] = {
    "PodMonitor": {
        "required": ["selector", "podMetricsEndpoints"],
        "additionalProperties": False,
        "properties": {
            "selector": {"required": ["matchLabels"]},
            "podMetricsEndpoints": {"items": ENDPOINT, "minItems": 1},
        },
    },
    "PrometheusRule": {
        "additionalProperties": False,
        "properties": {"groups": {"type": "array", "minItems": 1}},
    },
}
KEDA: dict[str, Any] = {
    "ScaledObject": {
        "required": ["scaleTargetRef", "triggers"],
        "additionalProperties": False,
        "properties": {
            "scaleTargetRef": {"required": ["name"]},
            "minReplicaCount": COUNT,
            "maxReplicaCount": COUNT,
            "idleReplicaCount": COUNT,
            "pollingInterval": COUNT,
            "cooldownPeriod": COUNT,
            "triggers": {"type": "array", "minItems": 1, "items": TRIGGER},
        },
    },
    "TriggerAuthentication": {
        "required": ["secretTargetRef"],
        "additionalProperties": False,
        "properties": {"secretTargetRef": {"items": {**TEXTS, "minProperties": 3}}},
    },
}


@pytest.fixture(scope="module", params=["written", *OVERLAYS])
def manifests(request: pytest.FixtureRequest) -> tuple[Manifest, ...]:
    return written() if request.param == "written" else built(request.param)


def test_every_object_fits_its_schema(manifests: tuple[Manifest, ...]) -> None:
    for each in manifests:
        if each["apiVersion"].startswith("keda.sh/"):
            jsonschema.validate(each["spec"], KEDA[each["kind"]])
        elif each["apiVersion"] == "monitoring.coreos.com/v1":
            jsonschema.validate(each["spec"], MONITORING[each["kind"]])
        else:
            kubernetes_validate.validate(each, VERSION, strict=True)


def test_a_wrong_field_does_not_fit() -> None:
    wrong = {**written()[0], "specs": {}}
    with pytest.raises(kubernetes_validate.ValidationError):
        kubernetes_validate.validate(wrong, VERSION, strict=True)


@pytest.mark.parametrize("file", KUSTOMIZATIONS, ids=lambda file: file.parent.name)
def test_a_kustomization_names_files_that_exist(file: Path) -> None:
    given = yaml.safe_load(file.read_text())
    named = [*given.get("resources", ()), *given.get("components", ())]
    named += [patch["path"] for patch in given.get("patches", ()) if "path" in patch]
    for each in named:
        target = file.parent / each
        assert target.is_file() or (target / "kustomization.yaml").is_file(), each
    # Every other file of the folder is used.
    assert {each.name for each in file.parent.glob("*.yaml")} - {file.name} <= set(named)


def test_pods_may_do_no_more_than_they_need(manifests: tuple[Manifest, ...]) -> None:
    """The rules that Kubernetes calls restricted, and a file system that is only read."""
    for name, workload in workloads(manifests).items():
        spec, own = pod(workload), container(workload)["securityContext"]
        assert spec["securityContext"]["runAsNonRoot"] is True, name
        assert spec["securityContext"]["runAsUser"] > 0
        assert spec["securityContext"]["seccompProfile"] == {"type": "RuntimeDefault"}
        assert own == {
            "allowPrivilegeEscalation": False,
            "readOnlyRootFilesystem": True,
            "capabilities": {"drop": ["ALL"]},
        }
        assert not {"hostNetwork", "hostPID", "hostIPC", "initContainers"} & spec.keys()
        assert all("hostPath" not in volume for volume in spec["volumes"])
        assert spec["automountServiceAccountToken"] is False
        # A service of another program could have the name of a setting: VLLM_PORT.
        assert spec["enableServiceLinks"] is False
        assert container(workload)["resources"].keys() == {"requests", "limits"}


def test_every_volume_is_there(manifests: tuple[Manifest, ...]) -> None:
    claims = of_kind(manifests, "PersistentVolumeClaim")
    for name, workload in workloads(manifests).items():
        volumes = [volume["name"] for volume in pod(workload)["volumes"]]
        templates = workload["spec"].get("volumeClaimTemplates", ())
        volumes += [each["metadata"]["name"] for each in templates]
        mounts = [mount["name"] for mount in container(workload)["volumeMounts"]]
        assert sorted(volumes) == sorted(mounts), name
        for volume in pod(workload)["volumes"]:
            if claim := volume.get("persistentVolumeClaim"):
                assert claim["claimName"] in claims


def test_every_account_map_and_secret_is_there(manifests: tuple[Manifest, ...]) -> None:
    accounts = of_kind(manifests, "ServiceAccount")
    assert all(each["automountServiceAccountToken"] is False for each in accounts.values())
    given = secrets_of_the_document()
    base = yaml.safe_load((KUBERNETES / "base" / "kustomization.yaml").read_text())
    (generated,) = base["configMapGenerator"]
    keys = {(generated["name"], each.split("=")[0]) for each in generated["literals"]}
    for name, workload in workloads(manifests).items():
        assert pod(workload)["serviceAccountName"] in accounts, name
        assert references(workload, "secretKeyRef") <= given, name
        assert references(workload, "configMapKeyRef") <= keys, name
        for volume in pod(workload)["volumes"]:
            if secret := volume.get("secret"):
                assert {(secret["secretName"], i["key"]) for i in secret["items"]} <= given


def test_the_document_makes_no_secret_that_nobody_reads() -> None:
    read = {
        pair for each in workloads(written()).values() for pair in references(each, "secretKeyRef")
    }
    read |= {("gateway", "clients.toml")}
    assert read == secrets_of_the_document()


def test_the_document_shows_how_to_set_each_optional_secret() -> None:
    sources = [
        (variable.get("valueFrom") or {}).get("secretKeyRef", {})
        for each in workloads(written()).values()
        for variable in container(each)["env"]
    ]
    optional = {(each["name"], each["key"]) for each in sources if each.get("optional")}
    shown = re.findall(r"patch secret ([\w-]+) -p '\{\"stringData\": \{\"([\w-]+)\"", DOCUMENT)
    assert set(shown) == optional == {("gateway", "shared-limits"), ("fleet", "validator-key")}


def secrets_of_the_document() -> set[tuple[str, str]]:
    """Name and key of each value of a Secret that docs/kubernetes.md has the operator create."""
    found = set()
    text = DOCUMENT.replace("\\\n", " ")
    for line in re.findall(r"create secret generic (.*)", text):
        name = line.split()[0]
        found |= {(name, key) for key in re.findall(r"--from-(?:literal|file)=([\w.-]+)=", line)}
    return found


def test_selectors_and_ports_meet_pods(manifests: tuple[Manifest, ...]) -> None:
    of_pods = [
        each["spec"]["template"]["metadata"]["labels"] for each in workloads(manifests).values()
    ]
    policies = of_kind(manifests, "NetworkPolicy").values()
    budgets = of_kind(manifests, "PodDisruptionBudget").values()
    services = of_kind(manifests, "Service").values()
    selectors = [each["spec"]["podSelector"]["matchLabels"] for each in policies]
    selectors += [each["spec"]["selector"]["matchLabels"] for each in budgets]
    selectors += [each["spec"]["selector"] for each in services]
    for selector in selectors:
        assert any(selector.items() <= labels.items() for labels in of_pods), selector
    for policy in policies:
        callers = [c for rule in policy["spec"].get("ingress", ()) for c in rule["from"]]
        named = [c["podSelector"].get("matchLabels", {}) for c in callers if "podSelector" in c]
        # An overlay may leave workers out.
        of_all = [
            e["spec"]["template"]["metadata"]["labels"] for e in workloads(written()).values()
        ]
        assert all(any(n.items() <= labels.items() for labels in of_all) for n in named), named
    closed = of_kind(manifests, "NetworkPolicy")["nobody"]["spec"]
    everyone = closed["podSelector"]["matchLabels"].items()
    assert "ingress" not in closed
    assert all(everyone <= labels.items() for labels in of_pods)
    budgeted = [each["spec"]["selector"]["matchLabels"] for each in budgets]
    assert all(any(b.items() <= labels.items() for b in budgeted) for labels in of_pods)


def test_addresses_lead_to_a_service_and_its_pods(manifests: tuple[Manifest, ...]) -> None:
    services, pods = of_kind(manifests, "Service"), workloads(manifests)
    urls = {
        url
        for each in pods.values()
        for url in re.findall(r"http://([^\s,]+)", str(container(each)["args"]))
    }
    hosts = {re.sub(r"[^\w.:$()-].*", "", url) for url in urls}
    scaled = of_kind(manifests, "ScaledObject").values()
    for each in scaled:
        (trigger,) = each["spec"]["triggers"]
        hosts.add(trigger["metadata"]["url"].split("/")[2])
        assert each["spec"]["scaleTargetRef"]["name"] in pods
        assert trigger["authenticationRef"]["name"] in of_kind(manifests, "TriggerAuthentication")
    assert {"controller:7100", "chat:8000", "$(POD_NAME).members:8000"} <= hosts
    for host in hosts:
        name, _, port = host.removeprefix("$(POD_NAME).").partition(":")
        service, _, namespace = name.partition(".")
        (offered,) = services[service]["spec"]["ports"]
        assert offered["port"] == int(port), host
        assert namespace in ("", *of_kind(manifests, "Namespace"))
        (workload,) = [
            each
            for each in pods.values()
            if services[service]["spec"]["selector"].items()
            <= each["spec"]["template"]["metadata"]["labels"].items()
        ]
        (opened,) = container(workload)["ports"]
        assert (opened["name"], opened["containerPort"]) == (offered["targetPort"], int(port))
        assert f"--port={port}" in container(workload)["args"]
    assert pods["members"]["spec"]["serviceName"] == "members"


def test_pods_have_time_to_end(manifests: tuple[Manifest, ...]) -> None:
    found = workloads(manifests)
    waits = {name: wait_before_end_s(each) for name, each in found.items() if name != "worker"}
    left = {name: pod(found[name])["terminationGracePeriodSeconds"] - waits[name] for name in waits}
    words = " ".join(container(found["members"])["args"]).replace("=", " ")
    assert left["members"] >= node_end_s(words) + 2 * SLACK_S
    assert (
        left["gateway"] >= GatewaySettings.model_fields["drain_timeout_seconds"].default + SLACK_S
    )
    flush = FleetSettings.model_fields["shutdown_flush_sec"].default
    assert left["controller"] >= flush + _CLOSE_S + SLACK_S
    # By then every gateway has looked the names up, and sends nothing new.
    interval = GatewayPlan(backends=()).lookup_interval
    assert waits["members"] >= interval + roster.TICK_S


def wait_before_end_s(workload: Manifest) -> float:
    command, seconds = container(workload)["lifecycle"]["preStop"]["exec"]["command"]
    assert command == "sleep"
    return float(seconds)


def test_only_the_overlay_without_postgresql_has_one_controller() -> None:
    one, many, monitored = (workloads(built(overlay)) for overlay in OVERLAYS)
    assert monitored == many
    assert one["controller"]["spec"]["replicas"] == 1
    assert one["controller"]["spec"]["strategy"] == {"type": "Recreate"}
    assert ("fleet", "database") not in references(one["controller"], "secretKeyRef")
    assert many["controller"]["spec"]["replicas"] == 2
    assert ("fleet", "database") in references(many["controller"], "secretKeyRef")
    for found in (one, many):
        assert container(found["members"])["resources"]["limits"]["nvidia.com/gpu"] == 1


def test_the_monitors_scrape_every_page_of_metrics() -> None:
    monitors, pods = of_kind(built("monitored"), "PodMonitor"), workloads(built("monitored"))
    assert monitors.keys() == pods.keys() - {"worker"}
    for name, monitor in monitors.items():
        labels = pods[name]["spec"]["template"]["metadata"]["labels"]
        assert monitor["spec"]["selector"]["matchLabels"].items() <= labels.items()
        (endpoint,) = monitor["spec"]["podMetricsEndpoints"]
        (port,) = container(pods[name])["ports"]
        assert endpoint["port"] == port["name"]
    (page,) = monitors["controller"]["spec"]["podMetricsEndpoints"]
    key = page["authorization"]["credentials"]
    assert (key["name"], key["key"]) in references(pods["controller"], "secretKeyRef")


def test_the_rules_are_prometheus_own_and_the_dashboard_is_grafanas() -> None:
    (rules,) = of_kind(built("monitored"), "PrometheusRule").values()
    deploy = KUBERNETES.parent
    assert rules["spec"] == yaml.safe_load((deploy / "prometheus" / "rules.yml").read_text())
    board = of_kind(built("monitored"), "ConfigMap")["dashboard"]
    assert board["metadata"]["labels"] == {"grafana_dashboard": "1"}
    assert board["data"]["proofserve.json"] == (deploy / "grafana" / "proofserve.json").read_text()


def test_two_models_are_two_fleets_behind_the_same_gateways() -> None:
    halves = (built("two-models/first"), built("two-models/second"))
    for half in halves:
        test_every_object_fits_its_schema(half)
        test_every_account_map_and_secret_is_there(half)
    assert sorted(map(str, built("two-models"))) == sorted(map(str, (*halves[0], *halves[1])))
    first, second = (
        {(each["kind"], _bare(each)): each for each in half if each["kind"] != "Namespace"}
        for half in halves
    )
    assert first.keys() - second.keys() == {pair for pair in first if pair[1] == "gateway"}
    maps = [half["ConfigMap", "settings"]["data"]["MODEL"] for half in (first, second)]
    assert len(set(maps)) == 2
    spaces = [half["Service", "chat"]["metadata"]["namespace"] for half in (first, second)]
    backends = container(first["Deployment", "gateway"])["args"][1].partition("=")[2]
    assert backends == f"dns:http://chat:8000,dns:http://chat.{spaces[1]}:8000"
    callers = second["NetworkPolicy", "members"]["spec"]["ingress"][0]["from"]
    assert {
        "namespaceSelector": {"matchLabels": {"kubernetes.io/metadata.name": spaces[0]}},
        "podSelector": first["NetworkPolicy", "gateway"]["spec"]["podSelector"],
    } in callers
    for half, space in zip((first, second), spaces, strict=True):
        (trigger,) = half["ScaledObject", "worker"]["spec"]["triggers"]
        assert trigger["metadata"]["url"].startswith(f"http://controller.{space}:7100/")


def _bare(manifest: Manifest) -> str:
    """Its name without the hash of kustomize."""
    return next(iter(of_kind((manifest,), manifest["kind"])))
