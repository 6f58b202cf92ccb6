"""The Debian package in a clean root: it installs, upgrades in the middle of a job, downgrades, and goes, and
ledger and keys stay through all of it.

Needs root, mmdebstrap and the package that `make deb` builds, and is skipped without. No systemd runs there:
a stand-in for ``systemctl`` starts what the unit of the package says, and stops it.
"""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import signal
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml
from brokers import Broker, wait_until
from fleets import agent_values, digits, run_coordinator, write_fleet

from agent.audit import verify
from agent.heads import second_head_beside
from coordinator.keys import load_signer
from dpagent.learning.data.formats.npz import save_npz
from dpagent.protocol.signing import Signer

HERE = Path(__file__).parents[2]
TOOLS = ("mmdebstrap", "dpkg-deb", "unshare", "chroot")
NEWER = "9.0.0"
ROUNDS = 6

PACKAGES = "python3,ca-certificates,systemd-standalone-sysusers,systemd-standalone-tmpfiles"
ENTER = """
mount --bind /proc "$1/proc"
mount --bind /dev "$1/dev"
root=$1
shift
exec chroot "$root" "$@"
"""
SYSTEMCTL = r"""#!/bin/sh
# A stand-in: starts and stops by the units of this root, and writes down what it was asked.
echo "$*" >>/run/asked
for word; do unit=$word; done
pid=$(cat "/run/$unit.pid" 2>/dev/null)
case "$*" in
*is-active*) [ -n "$pid" ] && kill -0 "$pid" 2>/dev/null ;;
stop*|*disable*)
    [ -n "$pid" ] || exit 0
    kill "$pid"
    while kill -0 "$pid" 2>/dev/null; do sleep 0.1; done
    rm "/run/$unit.pid" ;;
start*)
    command=$(sed -n 's/^ExecStart=//p' "/usr/lib/systemd/system/$unit")
    mkdir -p /var/lib/dpagent && cd /var/lib/dpagent
    setsid $command </dev/null >>/run/agent.log 2>&1 &
    echo $! >"/run/$unit.pid" ;;
esac
"""


def package() -> Path | None:
    """The newest package of this machine's architecture."""
    if os.geteuid() != 0 or any(shutil.which(tool) is None for tool in TOOLS):
        return None
    arch = subprocess.run(["dpkg", "--print-architecture"], capture_output=True, text=True, check=True).stdout
    found = sorted(
        (HERE / "dist").glob(f"dpagent_*+deb12_{arch.strip()}.deb"), key=lambda file: file.stat().st_mtime
    )
    return found[-1] if found else None


PACKAGE = package()

pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(900),
    pytest.mark.skipif(PACKAGE is None, reason="needs root, mmdebstrap, and a package: make deb"),
]


class Root:
    """A Debian 12 without anything of dpagent, or of pip."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def run(self, *command: str, check: bool = True) -> str:
        ended = subprocess.run(
            ["unshare", "--mount", "--propagation", "private", "/bin/sh", "-euc", ENTER, "sh", self.path,
             "/usr/bin/env", "-i", "PATH=/usr/sbin:/usr/bin:/sbin:/bin", "LC_ALL=C.UTF-8", *command],
            stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=300, check=False,
        )  # fmt: skip
        assert not check or ended.returncode == 0, f"{command}: {ended.stdout[-2000:]}{ended.stderr[-2000:]}"
        return ended.stdout + ended.stderr

    def install(self, file: Path) -> str:
        shutil.copy(file, self.path / "root" / file.name)
        return self.run("dpkg", "--install", f"/root/{file.name}")

    def runs_systemd(self) -> None:
        """From here on the scripts of the package find a systemd."""
        (self.path / "run/systemd/system").mkdir(parents=True)
        stand_in = self.path / "usr/bin/systemctl"
        stand_in.write_text(SYSTEMCTL)
        stand_in.chmod(0o755)

    @property
    def pid(self) -> int | None:
        file = self.path / "run/dpagent-agent.service.pid"
        return int(file.read_text()) if file.exists() else None

    @property
    def log(self) -> str:
        return (self.path / "run/agent.log").read_text()


@pytest.fixture(scope="module")
def clean(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("clean") / "root"
    subprocess.run(
        ["mmdebstrap", "--quiet", "--variant=minbase", f"--include={PACKAGES}", "bookworm", root],
        check=True, capture_output=True, timeout=600,
    )  # fmt: skip
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
    if made.pid is not None:
        with contextlib.suppress(ProcessLookupError):
            os.kill(made.pid, signal.SIGKILL)


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
    timing = {"deadline_s": 60.0, "compute_slot_s": 2.0, "jitter_window_s": 0.5}
    file = write_fleet(tmp_path / "c", mosquitto, fleet="packaged", devices=1, rounds=ROUNDS, round=timing)
    configure(root, mosquitto, load_signer(tmp_path / "c" / "keys", "packaged").public_key, "packaged")
    with run_coordinator(file) as coordinator:
        root.run("systemctl", "start", "dpagent-agent.service")
        first = root.pid
        wait_until(
            lambda: root.path.joinpath("run/agent.log").exists() and charges(root) >= 2, "rounds", 60.0
        )
        root.install(newer)
        assert coordinator.is_running()
        assert charges(root) < ROUNDS
        assert root.pid != first
        assert coordinator.wait(300.0) == 0, coordinator.said()[-2_000:] + root.log[-2_000:]
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
    assert {"agent", "numpy"} <= bytecode
    assert not {"coordinator", "simulation"} & bytecode
    assert "architecture" in root.run("dpagent", "profiles", "detect")
