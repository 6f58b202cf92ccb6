"""Units of systemd for daemons and the fleet's page: what each may do is what it needs, and nothing else.

The sandbox is systemd.exec(5)'s. A service writes below its own state directory alone, sees no home but the
places that its configuration names, and has no capability. `systemd-analyze security` rates it; a test keeps
the rating.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Final, Literal

from cli.configurations import ETC, FILES

USER: Final = "dpagent"
_HIDDEN: Final = (Path("/home"), Path("/root"), Path("/run/user"))
"""What ``ProtectHome`` hides."""
Program = Literal["agent", "coordinator", "mixer", "page"]
_DAEMONS: Final[dict[Program, tuple[str, str]]] = {
    "agent": ("run", "trains on this board's records"),
    "coordinator": ("coordinator run --stay", "runs a fleet's rounds"),
    "mixer": ("mixer run", "mixes a fleet's fragments"),
    "page": ("coordinator serve", "shows a fleet, and takes its operator's orders"),
}
"""The command of each, and what it does."""
_IN_MEMORY: Final = ("RuntimeDirectory=dpagent-agent", "RuntimeDirectoryMode=0700")
"""For the status that changes with each phase of a round (:mod:`agent.status`)."""
_OF_AN_AGENT: Final = ("OOMScoreAdjust=300", "LimitMEMLOCK=infinity")
"""It ends before the board's own programs, and what it has started before it (:mod:`agent.priority`); it
keeps its memory (:mod:`dpagent.resident_memory`)."""
_MEMORY_PERCENT: Final = 60
"""Of the machine's memory, that a service may take."""
_RESTARTS_NOT: Final = "2 3 4 5 9"
"""docs/exit-codes.md: errors that a restart would repeat."""

SYSUSERS: Final = f"""\
# From dpagent. A user of its own, so that files can be given to it.
u {USER} - "dpagent" /var/lib/dpagent
"""
TMPFILES: Final = f"""\
# From dpagent. Configuration and passwords, for root and for the services alone.
d /etc/dpagent 0750 root {USER} -
"""


@dataclass(frozen=True, slots=True)
class Service:
    """A daemon as a service.

    Attributes:
        kind: which program.
        config: the path of its configuration.
        fleet: the name of its fleet; ``None`` if its configuration is still to be written, as in a package.
        reads: further paths that it reads.
        groups: of the system, whose files it reads.
        memory_mib: that it may take; ``None`` for a share of a machine that is not known yet.
    """

    kind: Program
    config: Path
    fleet: str | None
    reads: tuple[Path, ...]
    groups: tuple[str, ...]
    memory_mib: int | None

    @property
    def name(self) -> str:
        """Of its unit, without ``.service``."""
        return f"dpagent-{self.kind}"

    @property
    def state_dir(self) -> Path:
        """The directory that it may write to."""
        return Path("/var/lib") / self._state_name

    @property
    def _state_name(self) -> str:
        """Of its directory in /var/lib: the page has the coordinator's, whose database it reads."""
        match self.kind:
            case "agent":
                return "dpagent"
            case "page":
                return "dpagent-coordinator"
            case _:
                return self.name

    def unit(self, program: Path) -> str:
        """The text of its unit.

        Args:
            program: the ``dpagent`` command.
        """
        command, does = _DAEMONS[self.kind]
        fleet = "" if self.fleet is None else f" of fleet {self.fleet}"
        shown = hidden([self.config, *self.reads, *_own_places(program)])
        lines = [
            "# From `dpagent service install` or the package; changes belong into a drop-in: systemctl edit",
            "[Unit]",
            f"Description=dpagent {self.kind}{fleet}: {does}",
            *([f"ConditionPathExists={_quoted(self.config)}"] if self.fleet is None else []),
            "Wants=network-online.target",
            "After=network-online.target time-sync.target"
            + (" dpagent-coordinator.service" if self.kind == "page" else ""),
            "StartLimitIntervalSec=0",
            "",
            "[Service]",
            "Type=notify",
            "NotifyAccess=main",
            f"ExecStart={_quoted(program)} {command} --config {_quoted(self.config)}",
            "Environment=PYTHONUNBUFFERED=1 PYTHONDONTWRITEBYTECODE=1",
            "# Records may have to be decoded first.",
            "TimeoutStartSec=infinity",
            "TimeoutStopSec=60",
            "# The loop of the daemon feeds it: pricing a plan may take a small board a minute.",
            "WatchdogSec=300",
            "Restart=on-failure",
            "RestartSec=30",
            f"RestartPreventExitStatus={_RESTARTS_NOT}",
            "",
            "# What it may take.",
            f"MemoryMax={f'{_MEMORY_PERCENT}%' if self.memory_mib is None else f'{self.memory_mib}M'}",
            "# A process that ends for want of memory ends alone: the program goes on, and says so.",
            "OOMPolicy=continue",
            "TasksMax=64",
            "LimitNOFILE=4096",
            "CPUWeight=20",
            "IOWeight=20",
            *(_OF_AN_AGENT if self.kind == "agent" else []),
            "",
            "# Where it may write: below its state directory, and nowhere else.",
            f"User={USER}",
            "DynamicUser=yes",
            *([f"SupplementaryGroups={' '.join(self.groups)}"] if self.groups else []),
            f"StateDirectory={self._state_name}",
            "StateDirectoryMode=0700",
            *(_IN_MEMORY if self.kind == "agent" else []),
            f"WorkingDirectory={self.state_dir}",
            "UMask=0077",
            "ProtectSystem=strict",
            "ProtectHome=tmpfs",
            *(f"BindReadOnlyPaths={_quoted(path)}" for path in shown),
            "PrivateTmp=yes",
            "RemoveIPC=yes",
            "",
            "# What it may do: nothing that needs a privilege.",
            "NoNewPrivileges=yes",
            "CapabilityBoundingSet=",
            "AmbientCapabilities=",
            "PrivateDevices=yes",
            "DevicePolicy=closed",
            # The page asks the kernel which user is at the other end of a local connection.
            *(["PrivateUsers=yes"] if self.kind != "page" else []),
            "ProtectProc=invisible",
            "ProtectClock=yes",
            "ProtectHostname=yes",
            "ProtectControlGroups=yes",
            "ProtectKernelLogs=yes",
            "ProtectKernelModules=yes",
            "ProtectKernelTunables=yes",
            "RestrictNamespaces=yes",
            "RestrictRealtime=yes",
            "RestrictSUIDSGID=yes",
            "LockPersonality=yes",
            "KeyringMode=private",
            "MemoryDenyWriteExecute=yes",
            "RestrictAddressFamilies=AF_INET AF_INET6 AF_UNIX",
            "SystemCallArchitectures=native",
            "SystemCallFilter=@system-service",
            f"SystemCallFilter=~@privileged @chown @keyring{'' if self.kind == 'agent' else ' @memlock'}",
            "SystemCallErrorNumber=EPERM",
            "",
            "[Install]",
            "WantedBy=multi-user.target",
        ]
        return "\n".join(lines) + "\n"


def packaged(program: Path) -> dict[Path, str]:
    """What a package has for systemd, path below the root to text: services of /etc/dpagent, and their user.

    ``dpagent service install`` writes a service for one configuration over it, which sees fewer places.
    """
    services = [
        Service(kind, ETC / FILES[kind], None, (), (), None) for kind in ("agent", "coordinator", "mixer")
    ]
    return {
        Path("usr/lib/sysusers.d/dpagent.conf"): SYSUSERS,
        Path("usr/lib/tmpfiles.d/dpagent.conf"): TMPFILES,
    } | {
        Path("usr/lib/systemd/system") / f"{service.name}.service": service.unit(program)
        for service in services
    }


def hidden(paths: Iterable[Path]) -> list[Path]:
    """Those of the paths that a service without a home would not see, each once, none below another."""
    there = sorted({path for path in paths if any(path.is_relative_to(place) for place in _HIDDEN)})
    return [path for path in there if not any(other in path.parents for other in there)]


def _own_places(program: Path) -> list[Path]:
    """Where this program, its packages and its Python are."""
    import cli

    assert cli.__file__ is not None
    code = Path(cli.__file__).resolve().parent.parent
    return [program.parent.parent, Path(sys.prefix), Path(sys.base_prefix).resolve(), code]


def _quoted(path: Path) -> str:
    """A path in a unit: % begins a specifier there, and a blank ends a word."""
    text = str(path).replace("%", "%%")
    return '"' + text.replace("\\", "\\\\").replace('"', '\\"') + '"' if " " in text else text
