"""A clean Debian root, of this machine's architecture or an emulated one, for the Debian package.

No systemd runs there: a stand-in for ``systemctl`` starts what the units of the root say, as their user, and
stops it. :mod:`booted_roots` has one that runs.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import re
import shutil
import signal
import subprocess
from pathlib import Path
from typing import Final

HERE: Final = Path(__file__).parents[1]
TOOLS: Final = ("mmdebstrap", "dpkg-deb", "unshare", "chroot")
PACKAGES: Final = "python3,ca-certificates,faketime"
STANDALONE: Final = "systemd-standalone-sysusers,systemd-standalone-tmpfiles"
SYSTEMD: Final = "systemd,systemd-sysv"
SUITES: Final = {"12": "bookworm", "13": "trixie"}
MIRROR: Final = [os.environ["MIRROR"]] if "MIRROR" in os.environ else []
"""As of the scripts that build: a line of sources.list."""
PATIENCE_S: Final = 1_800.0
"""For a command: an emulator takes a while to start Python."""

ENTER: Final = """
mount --bind /proc "$1/proc"
mount --bind /dev "$1/dev"
root=$1
shift
exec chroot "$root" "$@"
"""
SYSTEMCTL: Final = r"""#!/bin/sh
# A stand-in: starts and stops by the units of this root, and writes down what it was asked.
echo "$*" >>/run/asked
for word; do unit=$word; done
pid=$(cat "/run/$unit.pid" 2>/dev/null)
runs() { [ -n "$pid" ] && kill -0 "$pid" 2>/dev/null; }
stop() {
    runs || return 0
    kill "$pid"
    while kill -0 "$pid" 2>/dev/null; do sleep 0.1; done
    rm "/run/$unit.pid"
}
start() {
    file=/etc/systemd/system/$unit
    [ -e "$file" ] || file=/usr/lib/systemd/system/$unit
    command=$(sed -n 's/^ExecStart=//p' "$file")
    mkdir -p /var/lib/dpagent && cd /var/lib/dpagent && chown -R dpagent: .
    setsid setpriv --reuid dpagent --regid dpagent --init-groups $command </dev/null >>/run/agent.log 2>&1 &
    echo $! >"/run/$unit.pid"
}
case "$*" in
*is-active*) runs ;;
stop*|*disable*) stop ;;
start*) start ;;
restart*) stop; start ;;
show*) if runs; then echo ActiveState=active; else echo ActiveState=inactive; fi ;;
esac
"""


def architecture() -> str:
    """That the tests are for: ``PACKAGE_ARCHITECTURE``, or this machine's."""
    return os.environ.get("PACKAGE_ARCHITECTURE") or _own_architecture()


def is_emulated() -> bool:
    """Whether QEMU runs the programs of the root."""
    return architecture() != _own_architecture()


def _own_architecture() -> str:
    command = ["dpkg", "--print-architecture"]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()


def package() -> Path | None:
    """The newest package of that architecture, if tests can install it here."""
    if os.geteuid() != 0 or any(shutil.which(tool) is None for tool in TOOLS):
        return None
    found = sorted(
        (HERE / "dist").glob(f"dpagent_*+deb*_{architecture()}.deb"), key=lambda file: file.stat().st_mtime
    )
    return found[-1] if found else None


def make_root(package: Path, root: Path, *, has_systemd: bool = False) -> None:
    """A root of the Debian that a package is for, without anything of it: a copy of the one that is kept."""
    release = re.search(r"\+deb(\d+)_(\w+)\.deb$", package.name)
    assert release is not None, package
    # Debian's packages that it depends on, so that `dpkg` alone can install it.
    field = subprocess.run(
        ["dpkg-deb", "--field", package, "Depends"], capture_output=True, text=True, check=True
    ).stdout
    named = [name for name in re.findall(r"[a-z][a-z0-9.+-]+", field) if name.startswith("python3-")]
    name = f"{'systemd' if has_systemd else 'clean'}-{SUITES[release[1]]}-{release[2]}"
    kept, systemd = HERE / "build" / name, SYSTEMD if has_systemd else STANDALONE
    kept.parent.mkdir(exist_ok=True)
    with kept.with_suffix(".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        _keep(kept, release[2], SUITES[release[1]], ",".join([PACKAGES, systemd, *named]))
        subprocess.run(["cp", "-a", kept, root], check=True)


def _keep(kept: Path, architecture: str, suite: str, included: str) -> None:
    """Make the root that is copied, if there is none with these packages: an emulator takes minutes."""
    note = kept.with_suffix(".packages")
    if kept.exists() and note.exists() and note.read_text() == included:
        return
    shutil.rmtree(kept, ignore_errors=True)
    made = kept.with_suffix(".new")
    shutil.rmtree(made, ignore_errors=True)
    subprocess.run(
        ["mmdebstrap", "--quiet", "--variant=minbase", f"--arch={architecture}", f"--include={included}",
         suite, made, *MIRROR],
        check=True, capture_output=True, timeout=1_800,
    )  # fmt: skip
    made.rename(kept)
    note.write_text(included)


class Root:
    """A Debian without pip, and at first without anything of dpagent."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def run(self, *command: str | Path, check: bool = True) -> str:
        """What a command says in the root, on both channels."""
        ended = self.ended(*command)
        assert not check or ended.returncode == 0, f"{command}: {ended.stdout[-2000:]}{ended.stderr[-2000:]}"
        return ended.stdout + ended.stderr

    def ended(self, *command: str | Path, **variables: str) -> subprocess.CompletedProcess[str]:
        """A command in the root, as root, with nothing of this environment."""
        settings = {"PATH": "/usr/sbin:/usr/bin:/sbin:/bin", "LC_ALL": "C.UTF-8", "HOME": "/root"}
        if "QEMU_CPU" in os.environ:
            settings["QEMU_CPU"] = os.environ["QEMU_CPU"]
        named = [f"{name}={value}" for name, value in (settings | variables).items()]
        return subprocess.run(
            ["unshare", "--mount", "--propagation", "private", "/bin/sh", "-euc", ENTER, "sh", self.path,
             "/usr/bin/env", "-i", *named, *command],
            stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=PATIENCE_S, check=False,
        )  # fmt: skip

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
        """Of its agent."""
        file = self.path / "run/dpagent-agent.service.pid"
        return int(file.read_text()) if file.exists() else None

    @property
    def log(self) -> str:
        """Of its agent."""
        file = self.path / "run/agent.log"
        return file.read_text() if file.exists() else ""

    def give_up(self) -> None:
        """End its agent, however it does."""
        if self.pid is not None:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.pid, signal.SIGKILL)
