"""``dpagent coordinator invite``: codes with which boards enrol."""

from __future__ import annotations

import json
import time
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Final, Literal

import typer

from cli.configurations import coordinator_settings
from cli.options.daemons import FleetConfig
from dpagent.errors import ConfigurationError, UsageError
from dpagent.wording import counted

if TYPE_CHECKING:
    from coordinator.settings import CoordinatorSettings
    from dpagent.protocol.enrolment import Invitation

MOST_CODES: Final = 10_000
HoursOption = Annotated[
    float, typer.Option("--hours", min=0.001, max=8760, help="How long the codes can be used.")
]
QrOption = Annotated[
    Literal["none", "text", "svg"],
    typer.Option("--qr", help="Codes as pictures: `text` for this terminal, `svg` as files (with --out)."),
]


def invite(
    config: FleetConfig = None,
    count: Annotated[int, typer.Option(min=1, max=MOST_CODES, help="Boards to invite.")] = 1,
    hours: HoursOption = 24,
    image: Annotated[
        Path | None,
        typer.Option(
            help="Write one file, with one code for all of them, for an image that is copied to them. "
            "Whoever has the image can enrol: keep --hours short."
        ),
    ] = None,
    out: Annotated[Path | None, typer.Option(help="Directory for a file of each code (mode 0600).")] = None,
    qr: QrOption = "none",
    note: Annotated[
        str, typer.Option(help="For `devices list`, such as a place; the board does not see it.")
    ] = "",
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Make one-time codes, a line each, with which boards enrol (`dpagent enrol CODE`).

    Nobody sees a code again: the fleet keeps a hash of each. A code names the enrolment endpoint
    (enrolment.address in fleet.yaml) and the fleet's certificate authority.
    """
    if image is not None and (out is not None or qr == "svg"):
        raise UsageError("--image writes one file; it does not go with --out and --qr svg.")
    if qr == "svg" and out is None:
        raise UsageError("--qr svg writes files: give a directory with --out.")
    settings = coordinator_settings(config)
    made = made_invitations(
        settings, 1 if image else count, hours=hours, uses=count if image else 1, note=note
    )
    codes = [invitation.code() for invitation in made]
    if image is not None:
        _write_image(image, codes[0], count, hours)
        typer.echo(f"Wrote {image}, for {counted(count, 'board')}: dpagent enrol --code-file {image.name} …")
        return
    for number, code in enumerate(codes, start=1):
        if out is not None:
            _write_code(out, number, code, as_svg=qr == "svg")
    if as_json:
        typer.echo(json.dumps({"codes": codes, "expires_at": time.time() + hours * 3600}, indent=2))
        return
    for code in codes:
        typer.echo(code)
        if qr == "text":
            typer.echo(_terminal_picture(code))


def made_invitations(
    settings: CoordinatorSettings,
    count: int,
    *,
    hours: float,
    uses: int = 1,
    replaces: str | None = None,
    note: str = "",
) -> list[Invitation]:
    """New invitations, on record.

    Raises:
        ConfigurationError: There is no authority, or no address to invite boards to.
    """
    from coordinator.authority import load_authorities
    from coordinator.devices import Devices
    from coordinator.enrolment_settings import split_address
    from coordinator.invitations import Invitations
    from dpagent.protocol.enrolment import Invitation, new_secret

    if settings.enrolment.address is None:
        raise ConfigurationError(
            "enrolment.address is not set in fleet.yaml; expected host[:port], by which boards reach "
            "`dpagent coordinator enrolment` on this machine."
        )
    authority = load_authorities(settings.members_dir, now=datetime.now(UTC)).anchor
    host, port = split_address(settings.enrolment.address)
    made = [Invitation(host, port, authority.fingerprint, new_secret()) for _ in range(count)]
    now = time.time()
    with Devices(settings.members_place) as devices, devices.transaction():
        table = Invitations(devices.database)
        for invitation in made:
            table.add(
                invitation.secret, made_at=now, expires_at=now + hours * 3600, uses=uses, replaces=replaces,
                note=note,
            )  # fmt: skip
    return made


def _write_image(file: Path, code: str, count: int, hours: float) -> None:
    from dpagent.storage import write_atomically

    ends = datetime.fromtimestamp(time.time() + hours * 3600, UTC)
    text = (
        f"# An invitation for {counted(count, 'board')}, until {ends:%Y-%m-%d %H:%M} UTC. Who reads it can "
        f"enrol.\n# On each board: dpagent enrol --code-file THIS_FILE --data … --epsilon …\n{code}\n"
    )
    write_atomically(file, text.encode(), mode=0o600)


def _write_code(directory: Path, number: int, code: str, *, as_svg: bool) -> None:
    from dpagent.storage import disk_errors, write_atomically

    with disk_errors(directory):
        directory.mkdir(parents=True, exist_ok=True, mode=0o700)
    write_atomically(directory / f"code-{number:04}.txt", f"{code}\n".encode(), mode=0o600)
    if as_svg:
        write_atomically(directory / f"code-{number:04}.svg", _svg(code), mode=0o600)


def _terminal_picture(code: str) -> str:
    import io

    from dpagent.extras import extra_needed

    with extra_needed("coordinator", "A QR code"):
        import segno
    text = io.StringIO()
    segno.make(code, error="m").terminal(text, compact=True)
    return text.getvalue()


def _svg(code: str) -> bytes:
    import io

    from dpagent.extras import extra_needed

    with extra_needed("coordinator", "A QR code"):
        import segno
    stream = io.BytesIO()
    segno.make(code, error="m").save(stream, kind="svg", scale=4)
    return stream.getvalue()
