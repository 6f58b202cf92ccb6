"""``dpagent service``: units that systemd takes, in a sandbox that it rates, of a configuration."""

from __future__ import annotations

import re
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml
from commands import Result, dpagent
from fleets import agent_values, fleet_values

from cli.service.unit import Service, hidden, packaged
from dpagent.errors import ExitCode
from dpagent.protocol.signing import Signer

KEY = Signer(bytes(range(32)), "testers").public_key
HIGHEST_EXPOSURE = 2.0
"""Of 10, as `systemd-analyze security` counts."""


@pytest.fixture
def analyze() -> Callable[..., str]:
    """Runs systemd-analyze, which needs no systemd to run."""
    if shutil.which("systemd-analyze") is None:
        pytest.skip("systemd-analyze is not installed")

    def run(*arguments: str | Path) -> str:
        ended = subprocess.run(
            ["systemd-analyze", *map(str, arguments)], capture_output=True, text=True, timeout=60, check=False
        )
        assert ended.returncode == 0, ended.stderr + ended.stdout
        return ended.stdout + ended.stderr

    return run


def written(file: Path, values: dict[str, Any]) -> Path:
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(yaml.safe_dump(values))
    return file


def agent_file(tmp_path: Path, **changes: Any) -> Path:
    changes = {"state_dir": "/var/lib/dpagent/state"} | changes
    return written(tmp_path / "agent.yaml", agent_values(None, KEY, **changes))


def fleet_file(tmp_path: Path, **changes: Any) -> Path:
    places = {
        "state_dir": "/var/lib/dpagent-coordinator/state",
        "keys_dir": "/var/lib/dpagent-coordinator/keys",
    }
    return written(tmp_path / "fleet.yaml", fleet_values(None, **(places | changes)))


def mixer_file(tmp_path: Path) -> Path:
    values = {"fleet": "testers", "coordinator_key": KEY, "keys_dir": "/var/lib/dpagent-mixer/keys"}
    return written(tmp_path / "mixer.yaml", values)


def installed(config: Path, root: Path) -> Result:
    return dpagent("service", "install", "--config", config, "--root", root)


@pytest.mark.parametrize(
    ("make", "name", "command"),
    [
        (agent_file, "dpagent-agent", "run"),
        (fleet_file, "dpagent-coordinator", "coordinator run --stay"),
        (mixer_file, "dpagent-mixer", "mixer run"),
    ],
)
def test_a_service_is_one_that_systemd_takes_and_rates_as_well_confined(
    tmp_path: Path, analyze: Callable[..., str], make: Callable[[Path], Path], name: str, command: str
) -> None:
    config, root = make(tmp_path), tmp_path / "root"
    result = installed(config, root)
    assert (result.returncode, result.stderr) == (0, "")
    unit = root / "etc/systemd/system" / f"{name}.service"
    assert str(unit) in result.stdout
    text = unit.read_text()
    assert re.search(rf"^ExecStart=\S+/dpagent {command} --config {config}$", text, re.MULTILINE)
    assert "u dpagent " in (root / "etc/sysusers.d/dpagent.conf").read_text()
    assert "error" not in analyze("verify", unit).lower()
    rated = analyze("security", "--offline=yes", "--no-pager", unit)
    (exposure,) = re.findall(r"Overall exposure level for \S+: ([0-9.]+)", rated)
    assert float(exposure) <= HIGHEST_EXPOSURE


def test_the_page_has_a_service_beside_its_coordinators(tmp_path: Path, analyze: Callable[..., str]) -> None:
    for name in ("page.crt", "page.key"):
        (tmp_path / name).write_text("a file of TLS")
    (tmp_path / "page.key").chmod(0o600)
    config = fleet_file(tmp_path, page={"certificate": "page.crt", "key": "page.key"})
    root = tmp_path / "root"
    result = dpagent("service", "install", "--page", "--config", config, "--root", root)
    assert (result.returncode, result.stderr) == (0, "")
    unit = root / "etc/systemd/system/dpagent-page.service"
    text = unit.read_text()
    assert re.search(rf"^ExecStart=\S+/dpagent coordinator serve --config {config}$", text, re.MULTILINE)
    assert "\nStateDirectory=dpagent-coordinator\n" in text, "it reads the coordinator's database"
    assert re.search("^After=.* dpagent-coordinator.service$", text, re.MULTILINE)
    assert "PrivateUsers" not in text, "the kernel says who connects"
    assert "error" not in analyze("verify", unit).lower()
    rated = analyze("security", "--offline=yes", "--no-pager", unit)
    (exposure,) = re.findall(r"Overall exposure level for \S+: ([0-9.]+)", rated)
    assert float(exposure) <= HIGHEST_EXPOSURE
    assert installed(config, root).returncode == 0
    assert "dpagent-coordinator, dpagent-page" in dpagent("service", "remove", "--root", root).stdout
    board = dpagent("service", "install", "--page", "--config", agent_file(tmp_path), "--root", root)
    assert board.returncode == ExitCode.CONFIGURATION
    assert "fleet.yaml" in board.stderr


def test_a_package_has_services_without_a_fleet_that_are_as_well_confined(
    tmp_path: Path, analyze: Callable[..., str]
) -> None:
    program = tmp_path / "bin/dpagent"
    program.parent.mkdir()
    program.write_text("#!/bin/sh\n")
    program.chmod(0o755)
    files = packaged(program)
    units = {path: text for path, text in files.items() if path.suffix == ".service"}
    assert {path.stem for path in units} == {"dpagent-agent", "dpagent-coordinator", "dpagent-mixer"}
    for path, text in units.items():
        unit = tmp_path / path.name
        unit.write_text(text)
        assert "None" not in text
        assert "MemoryMax=60%" in text
        assert "\nOOMPolicy=continue\n" in text, "one large picture would end the agent, by systemd's default"
        assert re.search(r"^ConditionPathExists=/etc/dpagent/\w+\.yaml$", text, re.MULTILINE)
        assert "error" not in analyze("verify", unit).lower()
        rated = analyze("security", "--offline=yes", "--no-pager", unit)
        (exposure,) = re.findall(r"Overall exposure level for \S+: ([0-9.]+)", rated)
        assert float(exposure) <= HIGHEST_EXPOSURE
    assert sum("sysusers" in str(path) or "tmpfiles" in str(path) for path in files) == 2


def test_a_service_is_removed_and_nothing_else(tmp_path: Path) -> None:
    root = tmp_path / "root"
    assert "No service of dpagent is installed" in dpagent("service", "remove", "--root", root).stdout
    for config in (agent_file(tmp_path), mixer_file(tmp_path)):
        installed(config, root)
    state = root / "var/lib/dpagent/state"
    state.mkdir(parents=True)
    result = dpagent("service", "remove", "--root", root)
    assert result.returncode == 0
    assert "dpagent-agent, dpagent-mixer" in result.stdout
    assert [path for path in root.rglob("*") if path.is_file()] == []
    assert state.is_dir()


@pytest.mark.parametrize(
    ("make", "changes", "words"),
    [
        (agent_file, {"state_dir": "state"}, "is not below /var/lib/dpagent,"),
        (agent_file, {"state_dir": "/var/lib/dpagent"}, "/var/lib/dpagent.head is not below"),
        (agent_file, {"ledger": {"second_head": "/boot/head"}}, "/boot/head is not below"),
        (agent_file, {"budget": {"epsilon": -1.0}}, "budget.epsilon"),
        (fleet_file, {"keys_dir": "/var/lib/dpagent/keys"}, "is not below /var/lib/dpagent-coordinator"),
    ],
)
def test_a_configuration_that_the_service_could_not_use_is_refused_and_nothing_written(
    tmp_path: Path, make: Callable[..., Path], changes: dict[str, Any], words: str
) -> None:
    result = installed(make(tmp_path, **changes), tmp_path / "root")
    assert result.returncode == ExitCode.CONFIGURATION
    assert words in result.stderr
    assert not (tmp_path / "root").exists()


def test_a_service_that_has_run_may_be_installed_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With DynamicUser=, systemd moves its directory to /var/lib/private, and leaves a link."""
    (tmp_path / "private" / "dpagent" / "state").mkdir(parents=True)
    link = tmp_path / "dpagent"
    link.symlink_to("private/dpagent")
    monkeypatch.setattr(Service, "state_dir", link)
    config = agent_file(tmp_path, state_dir=str(link / "state"))
    result = installed(config, tmp_path / "root")
    assert result.returncode == 0, result.stderr
    (link / "elsewhere").symlink_to(tmp_path)
    result = installed(agent_file(tmp_path, state_dir=str(link / "elsewhere" / "state")), tmp_path / "root")
    assert result.returncode == ExitCode.CONFIGURATION


def test_data_for_their_owner_alone_are_refused_and_those_of_a_group_are_read(tmp_path: Path) -> None:
    data = tmp_path / "data.npz"
    data.touch(mode=0o600)
    config, root = agent_file(tmp_path, data={"path": str(data)}), tmp_path / "root"
    refused = installed(config, root)
    assert refused.returncode == ExitCode.CONFIGURATION
    assert f"chgrp dpagent {data}" in refused.stderr
    data.chmod(0o644)
    assert installed(config, root).returncode == 0
    assert "SupplementaryGroups" not in (root / "etc/systemd/system/dpagent-agent.service").read_text()


def test_a_group_that_reads_the_data_is_the_services(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import grp
    import os

    group = next((each for each in grp.getgrall() if each.gr_gid and each.gr_name != "dpagent"), None)
    if group is None or os.geteuid() != 0:
        pytest.skip("only root gives files to other groups")
    data = tmp_path / "data.npz"
    data.touch()
    os.chown(data, -1, group.gr_gid)
    data.chmod(0o640)
    root = tmp_path / "root"
    assert installed(agent_file(tmp_path, data={"path": str(data)}), root).returncode == 0
    unit = (root / "etc/systemd/system/dpagent-agent.service").read_text()
    assert f"SupplementaryGroups={group.gr_name}\n" in unit


def test_what_lies_in_a_home_is_shown_to_the_service_and_no_more_of_it() -> None:
    service = Service(
        "agent",
        Path("/home/pi/fleet/agent.yaml"),
        "meadow",
        (Path("/home/pi/fleet/data"), Path("/srv/d")),
        (),
        512,
    )
    lines = service.unit(Path("/home/pi/my venv/bin/dpagent")).splitlines()
    shown = [line.partition("=")[2] for line in lines if line.startswith("BindReadOnlyPaths")]
    assert {"/home/pi/fleet/agent.yaml", "/home/pi/fleet/data", '"/home/pi/my venv"'} <= {*shown}
    assert not {"/home", "/home/pi", "/home/pi/fleet", "/srv/d"} & {*shown}
    assert "ProtectHome=tmpfs" in lines
    assert any(line.startswith('ExecStart="/home/pi/my venv/bin/dpagent" run') for line in lines)


def test_places_outside_homes_need_not_be_shown() -> None:
    assert hidden(
        [Path("/srv/a"), Path("/home/b/c"), Path("/home/b"), Path("/homes/d"), Path("/root/e")]
    ) == [
        Path("/home/b"),
        Path("/root/e"),
    ]


def test_without_systemd_or_root_a_sentence_says_what_to_do(tmp_path: Path) -> None:
    if Path("/run/systemd/system").is_dir():
        pytest.skip("systemd runs here: this would install a service")
    for words in (("install", "--config", agent_file(tmp_path)), ("status",)):
        refused = dpagent("service", *words)
        assert refused.returncode == ExitCode.USAGE
        assert "sudo" in refused.stderr or "systemd does not run here" in refused.stderr
