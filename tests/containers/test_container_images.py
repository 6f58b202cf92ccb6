"""The images: who they run as, what they have and have not, and what they say of a directory of root's."""

from __future__ import annotations

import os
import re
from pathlib import Path

import pytest
import yaml
from container_store import IMAGES, UID, inspected, missing, podman
from fleets import agent_values, digits, fleet_values

from dpagent.errors import ExitCode
from dpagent.learning.data.formats.npz import save_npz
from dpagent.protocol.signing import Signer

DOCKERFILE = Path(__file__).parents[2] / "Dockerfile"
READ_ONLY = ("--read-only", "--read-only-tmpfs=false", "--cap-drop=all", "--security-opt=no-new-privileges")

pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(600),
    pytest.mark.skipif(bool(missing()), reason=missing() or ""),
]


def ran(*arguments: str | Path, image: str = IMAGES[0], check: bool = True) -> tuple[int, str]:
    """A container that ends by itself, on a root that nobody may write: its exit code, and what it said."""
    result = podman(
        "run", "--rm", *READ_ONLY, *arguments[:-1], image, *str(arguments[-1]).split(), check=check
    )
    return result.returncode, result.stdout + result.stderr


@pytest.mark.parametrize("image", IMAGES)
def test_an_image_is_nobodys_root_has_one_volume_and_says_how_it_does(image: str) -> None:
    found = inspected(image, "image")
    config = found["Config"]
    assert config["User"] == f"{UID}:{UID}"
    assert list(config["Volumes"]) == ["/var/lib/dpagent"]
    assert config["Entrypoint"] == ["dpagent"]
    assert config["StopSignal"] == "SIGTERM"
    assert "cli.health" in found["Healthcheck"]["Test"][-1]
    assert "dpagent 0" in ran("--version", image=image)[1]


@pytest.mark.parametrize("image", IMAGES)
def test_an_image_has_nothing_to_build_with_and_nothing_to_write_but_its_volume(image: str) -> None:
    script = (
        "id -u; grep -c ^dpagent: /etc/passwd; find / -xdev -perm -4000 -user root -writable; "
        "find /opt/dpagent '(' -name pip -o -name setuptools -o -name tests ')'; "
        "find / -xdev -writable -not -path '/proc/*' -not -path '/dev/*' -not -type l -not -path /tmp"
        " -not -path '/var/lib/dpagent*' -not -path /var/tmp -not -path /run/lock 2>/dev/null"
    )
    result = podman("run", "--rm", "--entrypoint", "sh", image, "-c", script, check=False)
    assert result.stdout.split() == [str(UID), "1"], result.stderr


def test_no_warning_is_printed_while_the_user_is_made() -> None:
    command = re.search(r"RUN (groupadd.*?) \\\n    && install", DOCKERFILE.read_text(), re.S)
    assert command is not None
    base = re.search(r"(?m)^ARG BASE=(.*)$", DOCKERFILE.read_text())
    assert base is not None
    result = podman("run", "--rm", base[1], "sh", "-ec", command[1].replace("\\\n", " "))
    assert result.stdout + result.stderr == ""


@pytest.fixture
def configured(tmp_path: Path) -> Path:
    """What is mounted at /etc/dpagent, for all to read."""
    save_npz(tmp_path / "data.npz", digits(0, 50))
    key = Signer(bytes(range(32)), "testers").public_key
    state = {"state_dir": "/var/lib/dpagent/state"}
    (tmp_path / "agent.yaml").write_text(yaml.safe_dump(agent_values(None, key, **state)))
    values = fleet_values(None, **state, keys_dir="/var/lib/dpagent/keys")
    (tmp_path / "fleet.yaml").write_text(yaml.safe_dump(values))
    for path in (*tmp_path.iterdir(), tmp_path):
        path.chmod(0o755)
    return tmp_path


@pytest.mark.parametrize(
    ("image", "command"),
    [
        (IMAGES[0], "budget init --config /etc/dpagent/agent.yaml"),
        (IMAGES[0], "doctor --no-broker --config /etc/dpagent/agent.yaml"),
        (IMAGES[1], "coordinator key --config /etc/dpagent/fleet.yaml"),
        (IMAGES[1], "coordinator run --config /etc/dpagent/fleet.yaml"),
    ],
)
@pytest.mark.parametrize("mode", [0o755, 0o700])
def test_a_directory_of_roots_is_named_with_the_user_to_give_it_to(
    tmp_path: Path, configured: Path, image: str, command: str, mode: int
) -> None:
    state = tmp_path / "state"
    state.mkdir(mode=mode)
    mounts = ("-v", f"{state}:/var/lib/dpagent", "-v", f"{configured}:/etc/dpagent:ro")
    code, said = ran(*mounts, command, image=image, check=False)
    assert code == ExitCode.STORAGE, said
    assert re.search(rf"chown (-R )?{UID}\b", said), said
    assert "Traceback" not in said
    os.chown(state, UID, UID)
    if "init" in command or "key" in command:
        code, said = ran(*mounts, command, image=image)
        assert code == 0, said
        assert list(state.iterdir())


def test_an_internal_error_finds_a_place_for_its_log() -> None:
    script = (
        "import cli.main\n"
        "def broken(): raise RuntimeError('on purpose')\n"
        "cli.main.app = broken\n"
        "cli.main.main()"
    )
    result = podman("run", "--rm", *READ_ONLY, "--entrypoint", "python", IMAGES[0], "-c", script, check=False)
    assert result.returncode == ExitCode.INTERNAL
    assert "/var/lib/dpagent/dpagent-error-" in result.stderr
    assert "Traceback" not in result.stderr
