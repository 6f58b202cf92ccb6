"""``dpagent diag``: packs what helps to find a fault into one file, without secrets or data."""

from __future__ import annotations

import io
import os
import sys
import tarfile
import time
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from cli.configurations import configuration
from cli.notation import printable
from cli.options.daemons import AgentConfig
from dpagent.errors import ConfigurationError, StorageError
from dpagent.wording import counted

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from cli.diag.contents import Part


def diag(
    file: Annotated[
        Path | None,
        typer.Argument(
            help="The file to write (`-`: standard output).",
            show_default="dpagent-diag-TIME.tar.gz in this directory",
        ),
    ] = None,
    config: AgentConfig = None,
    log: Annotated[
        Path | None,
        typer.Option(
            help="What `dpagent run` wrote to standard error (`-`: standard input).",
            show_default="the journal of the service",
        ),
    ] = None,
    broker: Annotated[
        bool,
        typer.Option("--broker/--no-broker", help="Whether to connect to the broker, as `dpagent doctor`."),
    ] = True,
) -> None:
    """Pack log, configuration, doctor's findings, status and ledger of a board into one file for support.

    Secrets are left out, and whatever may depend on a record: it says what is in the file, and what is not.
    """
    from cli.diag.contents import parts_of
    from cli.diag.journal import log_of

    now = time.time()
    target = file or Path(f"dpagent-diag-{datetime.fromtimestamp(now, UTC):%Y%m%dT%H%M%SZ}.tar.gz")
    to_output = str(target) == "-"
    if not to_output:
        _require_new(target)
    found = configuration(config)
    if found.kind != "agent":
        raise ConfigurationError(f"{found.file} is a {found.kind}'s; expected a board's agent.yaml.")
    parts = tuple(parts_of(found, log_of(log), asks_broker=broker))
    data = packed(parts, now)
    if to_output:
        sys.stdout.buffer.write(data)
        sys.stdout.flush()
    else:
        write_new(target, data)
    for line in (
        f"{'The pack' if to_output else target} has {counted(len(data), 'byte')}:",
        *_summary(parts),
    ):
        typer.echo(line, err=to_output)


def _summary(parts: Sequence[Part]) -> Iterator[str]:
    """What the owner should know before they send it."""
    for part in parts:
        yield f"  {part.name:19} {printable(' '.join(part.summary.split()))}"
    yield (
        "Left out: passwords, user names, arguments of commands, keys; records and what was found of them; "
        "room on the disk, memory, sensors, energy; when the agent was started. README.txt has the list."
    )
    yield "It names fleet, broker and paths. Look before you send it: tar -xzOf FILE | less"


def packed(parts: Sequence[Part], now: float) -> bytes:
    """A compressed archive, whose files belong to nobody.

    Args:
        parts: its files.
        now: their time (Unix).
    """
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w:gz") as archive:
        for part in parts:
            content = part.content.encode()
            entry = tarfile.TarInfo(f"dpagent-diag/{part.name}")
            entry.size, entry.mtime, entry.mode = len(content), int(now), 0o644
            archive.addfile(entry, io.BytesIO(content))
    return buffer.getvalue()


def write_new(target: Path, data: bytes) -> None:
    """Write a file that is not there, whole or not at all, for its owner alone.

    Raises:
        StorageError: it is there, or cannot be written.
    """
    from dpagent.storage import disk_errors

    _require_new(target)
    with disk_errors(target):
        descriptor = os.open(target, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        try:
            with os.fdopen(descriptor, "wb") as stream:
                stream.write(data)
                stream.flush()
                os.fsync(stream.fileno())
        except BaseException:
            target.unlink(missing_ok=True)
            raise


def _require_new(target: Path) -> None:
    if os.path.lexists(target):
        raise StorageError(f"{target} is there already, and is not written over. Give another name.")
