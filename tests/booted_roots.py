"""A clean Debian root in which systemd runs, in namespaces of its own; its network is this machine's.

It needs root, and control groups that it may write. Without `CAP_SYS_RESOURCE`, as in a container, systemd
lowers the limits that it may not raise.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
from pathlib import Path
from typing import Final

from brokers import wait_until
from clean_roots import PATIENCE_S, Root

OUTSIDE: Final = """
group=$1
while IFS=: read -r _ names path; do
    case $names in
        '') place=/sys/fs/cgroup ;;
        name=systemd) place=/sys/fs/cgroup/systemd ;;
        cpu | memory | pids) place=/sys/fs/cgroup/$names ;;
        *) continue ;;
    esac
    [ -e "$place/cgroup.procs" ] || continue
    mkdir "$place$path/$group"
    echo $$ >"$place$path/$group/cgroup.procs"
done </proc/self/cgroup
shift
exec unshare --cgroup --pid --fork --mount --uts --ipc --kill-child /bin/sh -euc "$@"
"""
"""Gives it a group of its own in each hierarchy, which it takes for the root."""
INSIDE: Final = """
root=$1
mount --make-rprivate /
mount --rbind "$root" "$root"
mount -t proc proc "$root/proc"
mount -t sysfs sysfs "$root/sys"
mount -t tmpfs tmpfs "$root/run"
mount -t tmpfs tmpfs "$root/tmp"
mount -t tmpfs -o mode=755 dev "$root/dev"
for device in null zero full random urandom tty; do
    touch "$root/dev/$device"
    mount --bind "/dev/$device" "$root/dev/$device"
done
mkdir "$root/dev/shm" "$root/dev/pts"
mount -t devpts -o newinstance,ptmxmode=666 devpts "$root/dev/pts"
ln -s pts/ptmx "$root/dev/ptmx"
ln -s /proc/self/fd "$root/dev/fd"
if [ -e /sys/fs/cgroup/cgroup.controllers ]; then
    mount -t cgroup2 cgroup2 "$root/sys/fs/cgroup"
    set --
else
    mount -t tmpfs -o mode=755 cgroup "$root/sys/fs/cgroup"
    for names in cpu memory pids; do
        mkdir "$root/sys/fs/cgroup/$names"
        mount -t cgroup -o $names cgroup "$root/sys/fs/cgroup/$names"
    done
    mkdir "$root/sys/fs/cgroup/systemd"
    mount -t cgroup -o none,name=systemd cgroup "$root/sys/fs/cgroup/systemd"
    set -- systemd.unified_cgroup_hierarchy=0 systemd.legacy_systemd_cgroup_controller=1
fi
cd "$root"
mkdir -p outside
pivot_root . outside
umount -l /outside
exec env -i container=test PATH=/usr/sbin:/usr/bin:/sbin:/bin /lib/systemd/systemd --system "$@"
"""


class BootedRoot(Root):
    """A root whose systemd is real. Use as a context manager, which ends it and all that it has started."""

    def __init__(self, path: Path) -> None:
        super().__init__(path)
        self._group = f"dpagent-{os.getpid()}"
        self._process: subprocess.Popen[bytes] | None = None

    def runs_systemd(self) -> None:
        """Boot it."""
        # It would take the console of this machine for its own.
        units = self.path / "etc/systemd/system"
        for unit in ("console-getty.service", "getty@.service", "getty.target"):
            (units / unit).symlink_to("/dev/null")
        self._process = subprocess.Popen(
            ["/bin/sh", "-euc", OUTSIDE, "sh", self._group, INSIDE, "sh", self.path], stdin=subprocess.DEVNULL
        )
        wait_until(self._is_up, "systemd")

    def give_up(self) -> None:
        """End it."""
        if self._process is None:
            return
        if (first := self._first) is not None:
            with contextlib.suppress(ProcessLookupError):
                os.kill(first, signal.SIGKILL)  # And with it all others of its namespace.
        self._process.kill()
        self._process.wait()
        wait_until(self._leaves_no_group, "the end of all that it has started")

    def ended(self, *command: str | Path, **variables: str) -> subprocess.CompletedProcess[str]:
        """As of :class:`Root`, beside its systemd where that runs."""
        if self._process is None:
            return super().ended(*command, **variables)
        settings = {"PATH": "/usr/sbin:/usr/bin:/sbin:/bin", "LC_ALL": "C.UTF-8", "HOME": "/root"} | variables
        return subprocess.run(
            ["nsenter", f"--target={self._first}", "--all", "/usr/bin/env", "-i",
             *(f"{name}={value}" for name, value in settings.items()), *command],
            stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=PATIENCE_S, check=False,
        )  # fmt: skip

    @property
    def pid(self) -> int | None:
        """Of its agent, as systemd knows it."""
        asked = ("systemctl", "show", "dpagent-agent", "--property=MainPID", "--value")
        return int(self.run(*asked)) or None

    @property
    def log(self) -> str:
        """Of its agent."""
        return self.run("journalctl", "--unit=dpagent-agent", "--no-pager")

    def _leaves_no_group(self) -> bool:
        """Remove its groups, those within others first. One whose processes are about to end stays."""
        groups = [*Path("/sys/fs/cgroup").glob(f"**/{self._group}")]
        for group in groups:
            for each in sorted((each for each in group.glob("**") if each.is_dir()), reverse=True):
                with contextlib.suppress(OSError):
                    each.rmdir()
        return not any(group.exists() for group in groups)

    @property
    def _first(self) -> int | None:
        """Its systemd, by this machine's number."""
        assert self._process is not None
        children = Path(f"/proc/{self._process.pid}/task/{self._process.pid}/children").read_text().split()
        return int(children[0]) if children else None

    def _is_up(self) -> bool:
        if self._first is None:
            return False
        return self.ended("systemctl", "is-system-running").stdout.strip() in ("running", "degraded")
