"""The Debian package in a clean root: it installs, upgrades in the middle of a job, downgrades, and goes, and
ledger and keys stay through all of it.

Needs root, mmdebstrap and the package that `make deb` builds, and is skipped without. No systemd runs there:
a stand-in for ``systemctl`` starts what the unit of the package says, and stops it.
"""

from __future__ import annotations

import re
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml
from brokers import Broker, wait_until
from clean_roots import Root, make_root, package
from fleets import agent_values, digits, run_coordinator, write_fleet

from agent.audit import verify
from agent.heads import second_head_beside
from coordinator.keys import load_signer
from dpagent.learning.data.formats.npz import save_npz
from dpagent.protocol.signing import Signer

NEWER = "9.0.0"
ROUNDS = 6
JOB_S = 1_500.0

PACKAGE = package()

pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(3_600),
    pytest.mark.skipif(PACKAGE is None, reason="needs root, mmdebstrap, and a package: make deb"),
]


@pytest.fixture(scope="module")
def clean(tmp_path_factory: pytest.TempPathFactory) -> Path:
    assert PACKAGE is not None
    root = tmp_path_factory.mktemp("clean") / "root"
    make_root(PACKAGE, root)
    return root


@pytest.fixture(scope="module")
def newer(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same program under a later version."""
    assert PACKAGE is not None
    directory = tmp_path_factory.mktemp("newer")
    subprocess.run(["dpkg-deb", "--raw-extract", PACKAGE, directory / "tree"], check=True)
    control = directory / "tree/DEBIAN/control"
    control.write_text(re.sub(r"(?m)^Version: .*$", f"Version: {NEWER}", control.read_text()))
    (init,) = (directory / "tree/opt/dpagent").glob("lib/python3.*/site-packages/dpagent/__init__.py")
    init.write_text(re.sub(r"(?m)^__version__ = .*$", f'__version__ = "{NEWER}"', init.read_text()))
    for bytecode in (init.parent / "__pycache__").glob("__init__.*.pyc"):
        bytecode.unlink()  # It counts for what it is, whatever the file says.
    file = directory / f"dpagent_{NEWER}.deb"
    subprocess.run(
        ["dpkg-deb", "--build", "-Znone", directory / "tree", file], check=True, capture_output=True
    )
    return file


@pytest.fixture
def root(tmp_path: Path, clean: Path) -> Iterator[Root]:
    copy = tmp_path / "root"
    subprocess.run(["cp", "-a", clean, copy], check=True)
    made = Root(copy)
    yield made
    made.give_up()


def configure(root: Root, broker: Broker, key: str, fleet: str) -> None:
    """What an integrator does after the install."""
    save_npz(root.path / "srv/data.npz", digits(0, 50))
    values = agent_values(
        broker, key, fleet=fleet, state_dir="/var/lib/dpagent/state", data={"path": "/srv/data.npz"},
        budget={"epsilon": 40.0},
    )  # fmt: skip
    for name, value in values["mqtt"].items():
        if name.endswith("_file"):
            shutil.copy(value, root.path / "etc/dpagent" / name)
            values["mqtt"][name] = f"/etc/dpagent/{name}"
    (root.path / "etc/dpagent/agent.yaml").write_text(yaml.safe_dump(values))
    root.run("dpagent", "budget", "init", "--config", "/etc/dpagent/agent.yaml")


def charges(root: Root) -> int:
    state = root.path / "var/lib/dpagent/state"
    return verify(state, second_head_beside(state)).charges


def kept(root: Root) -> dict[str, bytes]:
    """Ledger, keys and configuration."""
    return {
        str(file.relative_to(root.path)): file.read_bytes()
        for place in ("etc/dpagent", "var/lib/dpagent", "var/lib/dpagent-coordinator")
        for file in (root.path / place).rglob("*")
        if file.is_file()
    }


def test_a_job_goes_on_through_an_upgrade_in_the_middle_of_it(
    tmp_path: Path, mosquitto: Broker, root: Root, newer: Path
) -> None:
    assert PACKAGE is not None
    root.install(PACKAGE)
    root.runs_systemd()
    timing = {"deadline_s": 600.0, "compute_slot_s": 2.0, "jitter_window_s": 0.5}
    file = write_fleet(tmp_path / "c", mosquitto, fleet="packaged", devices=1, rounds=ROUNDS, round=timing)
    configure(root, mosquitto, load_signer(tmp_path / "c" / "keys", "packaged").public_key, "packaged")
    with run_coordinator(file) as coordinator:
        root.run("systemctl", "start", "dpagent-agent.service")
        first = root.pid
        wait_until(lambda: root.log and charges(root) >= 2, "rounds", JOB_S)
        root.install(newer)
        assert coordinator.is_running()
        assert charges(root) < ROUNDS
        assert root.pid != first
        assert coordinator.wait(JOB_S) == 0, coordinator.said()[-2_000:] + root.log[-2_000:]
    assert charges(root) == ROUNDS
    assert NEWER in root.run("dpagent", "--version")
    root.run("systemctl", "stop", "dpagent-agent.service")


def test_ledger_keys_and_configuration_stay_through_downgrade_removal_and_purge(
    root: Root, newer: Path, mosquitto: Broker
) -> None:
    assert PACKAGE is not None
    root.install(newer)
    (root.path / "var/lib/dpagent-coordinator/keys").mkdir(parents=True)
    (root.path / "var/lib/dpagent-coordinator/keys/sign").write_text("secret")
    key = Signer(bytes(range(32)), "packaged").public_key
    configure(root, mosquitto, key, "packaged")
    before = kept(root)
    assert any("state" in name for name in before)
    root.install(PACKAGE)
    assert NEWER not in root.run("dpagent", "--version")
    assert kept(root) == before
    root.run("dpkg", "--remove", "dpagent")
    assert not (root.path / "opt/dpagent").exists()
    assert not (root.path / "usr/bin/dpagent").is_symlink()
    assert kept(root) == before
    assert "deletes the record" in root.run("dpkg", "--purge", "dpagent")
    assert kept(root) == before
    root.install(PACKAGE)
    root.run("dpagent", "budget", "show", "--state-dir", "/var/lib/dpagent/state")
    assert charges(root) == 0


def test_an_install_makes_the_user_and_the_services_and_starts_nothing(root: Root) -> None:
    assert PACKAGE is not None
    root.runs_systemd()
    root.install(PACKAGE)
    assert re.search(r"(?m)^dpagent:", (root.path / "etc/passwd").read_text())
    place = (root.path / "etc/dpagent").stat()
    assert place.st_mode & 0o777 == 0o750
    assert f"dpagent:x:{place.st_gid}:" in (root.path / "etc/group").read_text()
    assert (root.path / "run/asked").read_text().split() == ["daemon-reload"]
    unit = (root.path / "usr/lib/systemd/system/dpagent-agent.service").read_text()
    assert "ExecStart=/opt/dpagent/bin/dpagent run --config /etc/dpagent/agent.yaml\n" in unit
    bytecode = {file.parents[1].name for file in (root.path / "opt/dpagent").rglob("*.pyc")}
    assert {"agent", "typer"} <= bytecode  # On boards of 32 bits, numpy's is Debian's.
    assert not {"coordinator", "simulation"} & bytecode
    assert "architecture" in root.run("dpagent", "profiles", "detect")
