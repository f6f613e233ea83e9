"""The Kubernetes manifests: valid, consistent with each other and with what the server really does."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import kubernetes_validate
import pytest
import yaml

from server.config import Config, load_config
from server.lifecycle import ENGINE_STOP_SECONDS, FAREWELL_SECONDS

FOLDER = Path(__file__).parents[2] / "deploy" / "kubernetes"
FILES = sorted(FOLDER.glob("*.yaml"))
KUBERNETES = "1.34"


def documents(path: Path) -> list[dict[str, Any]]:
    return [document for document in yaml.safe_load_all(path.read_text()) if document is not None]


def the_only(kind: str) -> dict[str, Any]:
    (found,) = [document for path in FILES for document in documents(path) if document["kind"] == kind]
    return found


@pytest.fixture(scope="module")
def pod() -> dict[str, Any]:
    spec: dict[str, Any] = the_only("Deployment")["spec"]["template"]["spec"]
    return spec


@pytest.fixture(scope="module")
def container(pod: dict[str, Any]) -> dict[str, Any]:
    (found,) = pod["containers"]
    return found


@pytest.fixture(scope="module")
def config(tmp_path_factory: pytest.TempPathFactory) -> Config:
    """What the server makes of the ConfigMap."""
    file = tmp_path_factory.mktemp("config") / "config.yaml"
    file.write_text(the_only("ConfigMap")["data"]["config.yaml"])
    return load_config(file)


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.name)
def test_every_manifest_is_valid(path: Path) -> None:
    """Strictly: an unknown field fails, and so does a kind that the schemas do not know."""
    for document in documents(path):
        kubernetes_validate.validate(document, KUBERNETES, strict=True)


def test_the_validation_is_not_blind() -> None:
    broken = the_only("Deployment")
    broken["spec"]["template"]["spec"]["containers"][0]["readynessProbe"] = {}
    with pytest.raises(kubernetes_validate.ValidationError):
        kubernetes_validate.validate(broken, KUBERNETES, strict=True)
    with pytest.raises(kubernetes_validate.SchemaNotFoundError):
        kubernetes_validate.validate({"apiVersion": "v1", "kind": "Unheard"}, KUBERNETES, strict=True)


def test_three_probes_ask_three_things(container: dict[str, Any], config: Config) -> None:
    startup, readiness, liveness = (container[f"{name}Probe"] for name in ("startup", "readiness", "liveness"))
    assert startup["httpGet"]["path"] == readiness["httpGet"]["path"] == "/ready"
    assert liveness["httpGet"]["path"] == "/health"
    ports = {port["name"]: port["containerPort"] for port in container["ports"]}
    for probe in (startup, readiness, liveness):
        assert ports[probe["httpGet"]["port"]] == config.server.admin_port
    assert startup["periodSeconds"] * startup["failureThreshold"] >= 240, "a first start may take minutes"
    assert liveness["periodSeconds"] * liveness["failureThreshold"] >= 30, "a slow moment is no reason to restart"


def test_live_answers_may_finish(pod: dict[str, Any], container: dict[str, Any], config: Config) -> None:
    sleep = container["lifecycle"]["preStop"]["sleep"]["seconds"]
    ending = max(15, ENGINE_STOP_SECONDS + FAREWELL_SECONDS)
    assert sleep >= 5
    assert pod["terminationGracePeriodSeconds"] >= sleep + config.server.drain_seconds + ending


def test_it_runs_with_no_more_rights_than_it_needs(pod: dict[str, Any], container: dict[str, Any]) -> None:
    assert pod["automountServiceAccountToken"] is False
    assert pod["securityContext"]["runAsNonRoot"] is True
    assert pod["securityContext"]["runAsUser"] == 10001
    assert pod["securityContext"]["seccompProfile"]["type"] == "RuntimeDefault"
    rights = container["securityContext"]
    assert rights["allowPrivilegeEscalation"] is False
    assert rights["readOnlyRootFilesystem"] is True
    assert rights["capabilities"]["drop"] == ["ALL"]
    writable = [mount["mountPath"] for mount in container["volumeMounts"] if not mount.get("readOnly")]
    assert writable == ["/tmp"]


def test_the_configuration_finds_what_is_mounted(
    container: dict[str, Any], pod: dict[str, Any], config: Config
) -> None:
    mounts = {mount["name"]: mount["mountPath"] for mount in container["volumeMounts"]}
    assert container["args"][-1] == f"{mounts['config']}/config.yaml"
    assert config.server.api_keys_file is not None
    assert config.server.api_keys_file.startswith(f"{mounts['keys']}/")
    volumes = {volume["name"]: volume for volume in pod["volumes"]}
    assert volumes.keys() == mounts.keys()
    assert volumes["config"]["configMap"]["name"] == the_only("ConfigMap")["metadata"]["name"]


def test_requests_reach_the_api_port_alone(container: dict[str, Any], config: Config) -> None:
    service = the_only("Service")["spec"]
    ports = {port["name"]: port["containerPort"] for port in container["ports"]}
    assert [ports[port["targetPort"]] for port in service["ports"]] == [config.server.port]
    assert config.server.host == "0.0.0.0"
    deployment = the_only("Deployment")["spec"]
    labels = deployment["template"]["metadata"]["labels"]
    assert service["selector"].items() <= labels.items()
    assert deployment["selector"]["matchLabels"].items() <= labels.items()


def test_model_and_cache_fit_into_the_memory_limit(container: dict[str, Any], config: Config) -> None:
    match = re.fullmatch(r"(\d+)Gi", container["resources"]["limits"]["memory"])
    assert match
    assert config.engine.kv_cache_memory is not None
    assert config.engine.kv_cache_memory + 2 * 2**30 <= int(match[1]) * 2**30


def test_a_rollout_never_goes_below_the_replicas() -> None:
    rolling = the_only("Deployment")["spec"]["strategy"]["rollingUpdate"]
    assert rolling == {"maxSurge": 1, "maxUnavailable": 0}
