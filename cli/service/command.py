"""``dpagent service install|remove|status``: a program that systemd starts, watches and keeps in bounds."""

from __future__ import annotations

import grp
import os
import shutil
import stat
import subprocess
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Final

import typer

from cli.commands import Commands
from cli.configurations import find, kind_of, over
from cli.options.daemons import AnyConfig
from cli.output import write_json
from dpagent.errors import ConfigurationError, ExitCode, StorageError, UsageError
from dpagent.storage import real_path

if TYPE_CHECKING:
    from cli.service.unit import Service

app = Commands(
    help="Run agent, coordinator, its page or mixer as a service of systemd.", no_args_is_help=True
)

RootOption = Annotated[
    Path | None,
    typer.Option(
        help="Write below this directory, as into a package, and start nothing.", show_default=False
    ),
]
_UNITS: Final = Path("etc/systemd/system")
_SYSUSERS: Final = Path("etc/sysusers.d/dpagent.conf")
_RUNS_SYSTEMD: Final = Path("/run/systemd/system")
_KINDS: Final = ("agent", "coordinator", "mixer", "page")
_SHOWN: Final = ("ActiveState", "SubState", "StatusText", "MainPID", "NRestarts", "MemoryCurrent", "Result")


@app.command()
def install(
    config: AnyConfig = None,
    root: RootOption = None,
    page: Annotated[
        bool,
        typer.Option("--page", help="Of fleet.yaml: the page (`coordinator serve`) beside the coordinator."),
    ] = False,
) -> None:
    """Install a program as a service that starts with the machine, in a sandbox, and start it.

    It runs as the user `dpagent`, which is made, and writes below /var/lib/dpagent alone (the agent) or
    /var/lib/dpagent-coordinator: its configuration has to put its state there. The file of the password is
    given to that user's group. Run it again after a change of the configuration. Needs root.
    """
    from cli.service.unit import SYSUSERS

    _require_no_overrides()
    file = find(config, *(("coordinator",) if page else ("agent", "coordinator", "mixer"))).absolute()
    service = _page_of(file) if page else _service_of(file)
    secrets = _secrets_of_page(file) if page else _secrets(file)
    _require_sound(service, file, secrets)
    base = root or Path("/")
    if root is None:
        _require_root()
        _require_systemd()
    unit = base / _UNITS / f"{service.name}.service"
    _write(base / _SYSUSERS, SYSUSERS)
    _write(unit, service.unit(_program()))
    if root is not None:
        typer.echo(f"{unit} and {base / _SYSUSERS} are written; nothing is started.")
        return
    _run("systemd-sysusers", str(base / _SYSUSERS))
    for secret in secrets:
        _give(secret)
    _run("systemctl", "daemon-reload")
    _run("systemctl", "enable", f"{service.name}.service")
    _run("systemctl", "restart", f"{service.name}.service")
    typer.echo(
        f"{service.name} runs and starts with this machine. `dpagent service status` shows how it does, "
        f"`journalctl -u {service.name}` its log."
    )


@app.command()
def remove(root: RootOption = None) -> None:
    """Stop the services, and remove them. Ledger, keys, configuration and data stay where they are."""
    base = root or Path("/")
    units = [base / _UNITS / f"dpagent-{kind}.service" for kind in _KINDS]
    found = [unit for unit in units if unit.exists()]
    if not found:
        typer.echo("No service of dpagent is installed.")
        return
    if root is None:
        _require_root()
        _require_systemd()
        for unit in found:
            _run("systemctl", "disable", "--now", unit.name)
    for file in (*found, base / _SYSUSERS):
        _unlink(file)
    if root is None:
        _run("systemctl", "daemon-reload")
    names = ", ".join(unit.stem for unit in found)
    typer.echo(
        f"Removed: {names}. The state in /var/lib, with its ledger and keys, and the user dpagent stay."
    )


@app.command()
def status(
    json_file: Annotated[
        Path | None, typer.Option("--json", help="Write JSON to this file (`-`: standard output) instead.")
    ] = None,
) -> None:
    """Show what the services do. Exit code 10 if one that is installed does not run."""
    _require_systemd()
    states = list(_states())
    if json_file is not None:
        write_json(json_file, [{"service": state.name} | state.values for state in states])
    elif not states:
        typer.echo("No service of dpagent is installed: `dpagent service install --config agent.yaml`.")
    else:
        for state in states:
            typer.echo(state.line)
    if any(state.values.get("ActiveState") != "active" for state in states):
        raise typer.Exit(ExitCode.CHILD)


@dataclass(frozen=True, slots=True)
class _State:
    name: str
    values: dict[str, str]

    @property
    def line(self) -> str:
        values = self.values
        parts = [f"{self.name}: {values.get('ActiveState', 'unknown')} ({values.get('SubState', '')})"]
        if text := values.get("StatusText"):
            parts.append(text)
        if values.get("MemoryCurrent", "").isdigit():
            parts.append(f"{int(values['MemoryCurrent']) >> 20} MiB")
        if values.get("NRestarts", "0") != "0":
            parts.append(f"restarted {values['NRestarts']} times")
        if values.get("Result", "success") != "success":
            parts.append(f"last end: {values['Result']}; journalctl -u {self.name}")
        return "; ".join(parts)


def _states() -> Iterator[_State]:
    for kind in _KINDS:
        name = f"dpagent-{kind}"
        if not (Path("/") / _UNITS / f"{name}.service").exists():
            continue
        shown = _run("systemctl", "show", f"--property={','.join(_SHOWN)}", f"{name}.service")
        values = dict(line.partition("=")[::2] for line in shown.splitlines() if "=" in line)
        yield _State(name, values)


def _service_of(config: Path) -> Service:
    """The service of a configuration, which is checked as the daemon would check it.

    Raises:
        ConfigurationError: It is none, or something in it is wrong.
    """
    from agent.board import Board
    from cli.service.unit import Service

    kind, memory = kind_of(config), Board.this().memory_mib
    if kind == "agent":
        from agent.profile import is_profile_path
        from agent.settings import load_agent_settings

        board = load_agent_settings(config)
        fleet, reads = board.fleet, [board.data.path]
        writes, mqtt = [board.state_dir, board.ledger_files.second_head, board.model_file], board.mqtt
        if board.enrolment is not None:  # It renews its certificate.
            writes += [path for path in (mqtt.cert_file, mqtt.key_file) if path is not None]
        if is_profile_path(board.profile):
            reads.append(Path(board.profile).parent)  # It may extend others there.
    elif kind == "coordinator":
        from coordinator.settings import FleetSettings, load_coordinator_settings

        coordinator = load_coordinator_settings(config)
        fleet, reads = coordinator.fleet, []
        if isinstance(coordinator, FleetSettings) and coordinator.test_data is not None:
            reads = [coordinator.test_data.path]
        writes, mqtt = [coordinator.state_dir, coordinator.keys_dir], coordinator.mqtt
    elif kind == "job":
        raise ConfigurationError(
            f"{config} is a job file; expected an agent.yaml, fleet.yaml or mixer.yaml. A job runs in its "
            "coordinator: `dpagent coordinator job add` adds it."
        )
    else:
        from mixer.settings import load_mixer_settings

        mixer = load_mixer_settings(config)
        fleet, reads, writes, mqtt = mixer.fleet, [], [mixer.keys_dir], mixer.mqtt
    files = (mqtt.ca_file, mqtt.password_file, mqtt.cert_file, mqtt.key_file)
    reads += [path for path in files if path is not None and path not in writes]
    service = Service(kind, config, fleet, tuple(reads), _groups_of(reads), max(256, memory * 6 // 10))
    _require_below(service, writes, config)
    return service


def _page_of(config: Path) -> Service:
    """The service of a fleet's page: beside its coordinator, as the same user, with the same directory.

    Raises:
        ConfigurationError: Something in the configuration is wrong.
    """
    from agent.board import Board
    from cli.service.unit import Service
    from coordinator.settings import load_coordinator_settings

    if (kind := kind_of(config)) != "coordinator":
        raise ConfigurationError(f"{config} is of {kind}; --page expects the fleet.yaml of a coordinator.")
    settings = load_coordinator_settings(config)
    page = settings.page
    reads = [path for path in (page.certificate, page.key) if path is not None]
    memory_mib = max(256, Board.this().memory_mib * 6 // 10)
    service = Service("page", config, settings.fleet, tuple(reads), _groups_of(reads), memory_mib)
    _require_below(service, [settings.state_dir, settings.keys_dir], config)
    return service


def _secrets_of_page(config: Path) -> list[Path]:
    """The key of its certificate, if it has one."""
    from coordinator.settings import load_coordinator_settings

    key = load_coordinator_settings(config).page.key
    return [] if key is None else [key]


def _require_below(service: Service, writes: Sequence[Path], config: Path) -> None:
    """Refuse places that a service may not write to.

    Raises:
        ConfigurationError: One is elsewhere.
    """
    # Once a service has run, systemd has its directory elsewhere, and a link there (DynamicUser=).
    place = real_path(service.state_dir)
    for path in writes:
        if not real_path(path).is_relative_to(place):
            raise ConfigurationError(
                f"{config}: {path} is not below {service.state_dir}, where alone the service may write. Set "
                "it (state_dir, keys_dir, model.file, mqtt.cert_file) to a place there. If there is a ledger "
                "or a key, stop its program and move the directory, with the second head beside it, there."
            )


def _require_no_overrides() -> None:
    """Refuse variables that the service would not have.

    Raises:
        UsageError: There are some.
    """
    if names := ", ".join(each.source for each in over()):
        raise UsageError(
            f"{names}: set here, and not where systemd starts the service. Write it into the file, and unset "
            "it here; or add it to the installed unit with `systemctl edit`."
        )


def _groups_of(paths: Sequence[Path]) -> tuple[str, ...]:
    """The groups that may read what others may not."""
    from cli.service.unit import USER

    names = set()
    for path in paths:
        try:
            state = path.stat()
        except OSError:
            continue  # The daemon says so, as it is started.
        if not state.st_mode & stat.S_IROTH and state.st_mode & stat.S_IRGRP and state.st_gid:
            try:
                names.add(grp.getgrgid(state.st_gid).gr_name)
            except KeyError:
                names.add(str(state.st_gid))
    return tuple(sorted(names - {USER}))


def _require_sound(service: Service, config: Path, secrets: Sequence[Path]) -> None:
    """Refuse what the service could not read.

    Raises:
        ConfigurationError: Only their owner may read its files.
    """
    for path in (config, *service.reads):
        if path in secrets or not path.exists():
            continue
        if not path.stat().st_mode & (stat.S_IROTH | stat.S_IRGRP):
            raise ConfigurationError(
                f"{path} is for its owner alone, and the service runs as the user dpagent. Let a group read "
                f"it: chgrp dpagent {path} && chmod g+r {path} (of a directory: chmod g+rX -R)."
            )


def _secrets(config: Path) -> list[Path]:
    """The files of the password and of the key, as far as there are some. The key that a board enrolled with
    is below its state, which is the service's own."""
    from dpagent.configuration import resolve
    from dpagent.yaml_file import load_yaml

    values = load_yaml(config, example="fleet: meadow")
    is_enrolled = kind_of(config) == "agent" and values.get("enrolment") is not None
    section = values.get("mqtt") or {}
    names = [section.get(key) for key in ("password_file", *([] if is_enrolled else ["key_file"]))]
    return [resolve(Path(str(name)), config) for name in names if name is not None]


def _give(secret: Path) -> None:
    """Let the service's group, and nobody else, read a file of root's."""
    from cli.service.unit import USER

    try:
        shutil.chown(secret, group=USER)
        secret.chmod(0o640)
    except (OSError, LookupError) as error:
        raise StorageError(f"{secret} cannot be given to the group {USER}: {error}.") from error
    typer.echo(f"{secret}: the group {USER} may read it, and nobody else but its owner.")


def _program() -> Path:
    """The ``dpagent`` command of this installation.

    Raises:
        UsageError: There is none.
    """
    program = Path(sys.executable).parent / "dpagent"
    if not program.exists():
        raise UsageError(f"There is no command {program}: install dpagent into this Python with pip.")
    return program


def _require_root() -> None:
    if os.geteuid() != 0:
        raise UsageError("A service is installed and removed by root: run this with sudo.")


def _require_systemd() -> None:
    if not _RUNS_SYSTEMD.is_dir():
        raise UsageError(
            "systemd does not run here. `--root DIR` writes the files of the service for another system."
        )


def _run(*command: str) -> str:
    """The output of a command of the system.

    Raises:
        StorageError: It fails.
    """
    try:
        return subprocess.run(command, check=True, capture_output=True, text=True, timeout=120).stdout
    except FileNotFoundError as error:
        raise StorageError(f"{command[0]} is not installed on this system.") from error
    except subprocess.SubprocessError as error:
        said = getattr(error, "stderr", "") or error
        raise StorageError(f"`{' '.join(command)}` failed: {str(said).strip()}") from error


def _write(file: Path, text: str) -> None:
    from dpagent.storage import disk_errors, write_atomically

    with disk_errors(file):
        file.parent.mkdir(parents=True, exist_ok=True)
    write_atomically(file, text.encode(), mode=0o644)


def _unlink(file: Path) -> None:
    from dpagent.storage import disk_errors

    with disk_errors(file):
        file.unlink(missing_ok=True)
