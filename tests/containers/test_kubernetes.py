"""The manifest of the coordinator: valid, restricted, at one with the image, and run by podman as a pod."""

from __future__ import annotations

import re
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from brokers import Broker, wait_until
from commands import dpagent
from container_store import HERE, IMAGES, UID, Container, inspected, missing, podman
from fleets import fleet_values, run_agent, write_agent

from agent.audit import verify
from agent.heads import second_head_beside

MANIFEST = HERE / "packaging" / "kubernetes" / "coordinator.yaml"
DOCKERFILE = (HERE / "Dockerfile").read_text()
KUBERNETES = ("1.29", "1.34")
Object = dict[str, Any]


def objects() -> dict[str, Object]:
    """The objects of the manifest by their kinds."""
    return {each["kind"]: each for each in yaml.safe_load_all(MANIFEST.read_text())}


@pytest.fixture
def pod() -> Object:
    spec: Object = objects()["StatefulSet"]["spec"]["template"]["spec"]
    return spec


@pytest.fixture
def container(pod: Object) -> Object:
    (found,) = pod["containers"]
    return dict(found)


@pytest.mark.parametrize("version", KUBERNETES)
@pytest.mark.parametrize("kind", ["ConfigMap", "Service", "NetworkPolicy", "StatefulSet"])
def test_each_object_fits_the_schema_of_kubernetes(kind: str, version: str) -> None:
    validate = pytest.importorskip("kubernetes_validate", reason="make test-containers installs the schemas")
    validate.validate(objects()[kind], version, strict=True)


def test_the_pod_meets_the_restricted_standard_of_pods(pod: Object, container: Object) -> None:
    """https://kubernetes.io/docs/concepts/security/pod-security-standards/, and a root that nobody writes."""
    assert pod["securityContext"]["runAsNonRoot"] is True
    assert pod["securityContext"]["seccompProfile"] == {"type": "RuntimeDefault"}
    assert pod["automountServiceAccountToken"] is False
    assert not {"hostNetwork", "hostPID", "hostIPC", "initContainers"} & pod.keys()
    assert container["securityContext"] == {
        "allowPrivilegeEscalation": False, "readOnlyRootFilesystem": True, "capabilities": {"drop": ["ALL"]},
    }  # fmt: skip
    assert {"requests", "limits"} == container["resources"].keys()
    assert all(volume.keys() & {"configMap", "secret"} for volume in pod["volumes"])


def test_the_pod_runs_what_the_image_runs_as_the_user_that_owns_the_volume(
    pod: Object, container: Object
) -> None:
    assert f"USER {UID}:{UID}\n" in DOCKERFILE
    context = pod["securityContext"]
    assert {context[key] for key in ("runAsUser", "runAsGroup", "fsGroup")} == {UID}
    # With the other policy, keys are for the group after a start, and refused.
    assert context["fsGroupChangePolicy"] == "OnRootMismatch"
    command = re.search(r"AS coordinator\n.*?\nCMD (\[.*?\])", DOCKERFILE, re.S)
    assert command is not None
    assert container["args"] == yaml.safe_load(command[1])
    check = re.search(r"HEALTHCHECK .*?CMD (.*?) \|\| exit 1", DOCKERFILE, re.S)
    assert check is not None
    patience_s = int(re.search(r"WATCHDOG_USEC=(\d+)", DOCKERFILE)[1]) / 1e6  # type: ignore[index]
    for probe in ("startupProbe", "livenessProbe"):
        assert container[probe]["exec"]["command"] == check[1].split()
        assert container[probe]["timeoutSeconds"] > patience_s


def test_what_the_configuration_names_is_mounted(tmp_path: Path, pod: Object, container: Object) -> None:
    (tmp_path / "fleet.yaml").write_text(objects()["ConfigMap"]["data"]["fleet.yaml"])
    result = dpagent("config", "check", "--config", tmp_path / "fleet.yaml")
    assert result.returncode == 0, result.stderr
    mounts = {mount["name"]: Path(mount["mountPath"]) for mount in container["volumeMounts"]}
    settings = yaml.safe_load((tmp_path / "fleet.yaml").read_text())
    for key in ("state_dir", "keys_dir"):
        assert Path(settings[key]).parent == mounts["state"]
    for key in ("ca_file", "password_file"):
        file = Path(settings["mqtt"][key])
        assert file.parent == mounts["secret"]
        assert f"--from-file={file.name}" in MANIFEST.read_text()
    templates = objects()["StatefulSet"]["spec"]["volumeClaimTemplates"]
    assert {
        *(each["metadata"]["name"] for each in templates),
        *(volume["name"] for volume in pod["volumes"]),
    } == mounts.keys()
    port = int(settings["mqtt"]["url"].rpartition(":")[2])
    assert port in [rule["port"] for rule in objects()["NetworkPolicy"]["spec"]["egress"][0]["ports"]]


def test_the_objects_name_each_other(pod: Object) -> None:
    found = objects()
    labels = found["StatefulSet"]["spec"]["template"]["metadata"]["labels"]
    assert found["StatefulSet"]["spec"]["selector"]["matchLabels"] == labels
    assert found["Service"]["spec"]["selector"] == labels
    assert found["NetworkPolicy"]["spec"]["podSelector"]["matchLabels"] == labels
    assert found["StatefulSet"]["spec"]["serviceName"] == found["Service"]["metadata"]["name"]
    names = {volume.get("configMap", {}).get("name") for volume in pod["volumes"]} - {None}
    assert names == {found["ConfigMap"]["metadata"]["name"]}


@pytest.fixture
def played(tmp_path: Path, mosquitto: Broker, pod: Object) -> Iterator[Container]:
    """The pod of the StatefulSet with this broker, run by podman: volumes, probes, restrictions as they are.
    (A StatefulSet it does not know.)"""
    name = f"coordinator-{uuid.uuid4().hex[:8]}"
    found, values = objects(), fleet_values(mosquitto, fleet=name, devices=1, rounds=3)
    written = yaml.safe_load(found["ConfigMap"]["data"]["fleet.yaml"])
    values |= {key: written[key] for key in ("state_dir", "keys_dir")}
    values["mqtt"]["password_file"] = written["mqtt"]["password_file"]
    found["ConfigMap"]["metadata"]["name"] = name
    found["ConfigMap"]["data"]["fleet.yaml"] = yaml.safe_dump(values)
    (claim,) = found["StatefulSet"]["spec"]["volumeClaimTemplates"]
    pod["containers"][0]["image"] = f"{IMAGES[1]}:latest"
    pod["containers"][0]["imagePullPolicy"] = "Never"
    pod["volumes"][0]["configMap"]["name"] = name
    # A directory in place of the secret, which podman 4.3 mounts without decoding it.
    secret = tmp_path / "secret"
    secret.mkdir()
    (secret / "password").write_text(mosquitto.password_file.read_text())
    pod["volumes"][1] = {"name": "secret", "hostPath": {"path": str(secret), "type": "Directory"}}
    pod["volumes"].append({"name": "state", "persistentVolumeClaim": {"claimName": name}})
    file = tmp_path / "pod.yaml"
    volume = {"kind": "PersistentVolumeClaim", "spec": claim["spec"]}
    named = {"apiVersion": "v1", "metadata": {"name": name}}
    made = [volume | named, {"kind": "Pod", "spec": pod} | named]
    file.write_text(yaml.safe_dump_all([found["ConfigMap"], *made]))
    podman("kube", "play", "--network", "host", file)
    try:
        yield Container(f"{name}-coordinator")
    finally:
        podman("kube", "down", file, check=False)
        podman("volume", "rm", "--force", name, check=False)


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.skipif(bool(missing()), reason=missing() or "")
def test_the_pod_runs_a_job_and_stays(tmp_path: Path, mosquitto: Broker, played: Container) -> None:
    assert inspected(played.name)["HostConfig"]["ReadonlyRootfs"]
    played.wait_to_say("connected to")
    wait_until(played.is_healthy, "a healthy coordinator", 60.0)
    key = played.dpagent("coordinator", "key", "--config", "/etc/dpagent/fleet.yaml").stdout.strip()
    board = write_agent(
        tmp_path / "board", mosquitto, key, fleet=played.name.removesuffix("-coordinator"),
        budget={"epsilon": 10.0},
    )  # fmt: skip
    with run_agent(board):
        played.wait_to_say("staying until a stop", 300.0)
    state = board.with_name("state")
    assert verify(state, second_head_beside(state)).charges == 3
    assert played.is_healthy()
    assert played.stop() == 0
