"""The manifest of a shared coordinator: its parts fit each other, and the program takes its configuration."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml
from commands import dpagent

MANIFEST = Path(__file__).parents[2] / "packaging" / "kubernetes" / "shared.yaml"
Object = dict[str, Any]


def objects() -> list[Object]:
    return list(yaml.safe_load_all(MANIFEST.read_text()))


def deployments() -> dict[str, Object]:
    return {each["metadata"]["name"]: each["spec"] for each in objects() if each["kind"] == "Deployment"}


def test_the_program_takes_the_configuration(tmp_path: Path) -> None:
    (configuration,) = (each for each in objects() if each["kind"] == "ConfigMap")
    (tmp_path / "fleet.yaml").write_text(configuration["data"]["fleet.yaml"])
    result = dpagent("config", "check", "--config", tmp_path / "fleet.yaml")
    assert result.returncode == 0, result.stderr


@pytest.mark.parametrize(
    ("name", "keys"),
    [("dpagent-coordinator", {"signing.key", "sealing.key"}), ("dpagent-worker", {"sealing.key"})],
)
def test_each_pod_has_its_keys_for_its_user_alone_and_meets_the_restricted_standard(
    name: str, keys: set[str]
) -> None:
    """A worker cannot sign: the other key is not even mounted."""
    pod = deployments()[name]["template"]["spec"]
    assert pod["securityContext"]["runAsNonRoot"] is True
    assert pod["automountServiceAccountToken"] is False
    (copying,) = pod["initContainers"]
    (container,) = pod["containers"]
    for each in (copying, container):
        assert each["securityContext"] == {
            "allowPrivilegeEscalation": False, "readOnlyRootFilesystem": True,
            "capabilities": {"drop": ["ALL"]},
        }  # fmt: skip
        mounted = {mount["name"] for mount in each["volumeMounts"]}
        assert mounted <= {volume["name"] for volume in pod["volumes"]}
    assert copying["command"][:3] == ["install", "-m", "0600"]
    assert {Path(part).name for part in copying["command"][5:]} == keys
    (given,) = (volume["secret"]["secretName"] for volume in pod["volumes"] if volume["name"] == "given")
    created = next(line for line in MANIFEST.read_text().splitlines() if f"generic {given} " in line)
    assert {part.partition("=")[2] for part in created.split() if part.startswith("--from-file")} == keys


def test_the_selectors_find_the_pods() -> None:
    for spec in deployments().values():
        labels = spec["template"]["metadata"]["labels"]
        assert spec["selector"]["matchLabels"] == labels
        (policy,) = (each["spec"] for each in objects() if each["kind"] == "NetworkPolicy")
        assert policy["podSelector"]["matchLabels"].items() <= labels.items()
    (budget,) = (each["spec"] for each in objects() if each["kind"] == "PodDisruptionBudget")
    coordinator = deployments()["dpagent-coordinator"]["template"]["metadata"]["labels"]
    assert budget["selector"]["matchLabels"] == coordinator
