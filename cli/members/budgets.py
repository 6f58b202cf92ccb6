"""``dpagent coordinator budgets …``: what each device was granted."""

from __future__ import annotations

import contextlib
import json
import time
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Final

import typer

from cli.commands import Commands
from cli.configurations import coordinator_settings
from cli.members.devices import DeviceArgument, JsonOption
from cli.options.daemons import FleetConfig
from cli.output import write_json
from cli.tables import print_table
from dpagent.notation import plain_bound, upwards
from dpagent.schema.json_values import json_values
from dpagent.wording import counted

if TYPE_CHECKING:
    from coordinator.devices import Devices
    from coordinator.registry import RegistryReader
    from coordinator.settings import CoordinatorSettings

app = Commands(help="What each device of the fleet was granted.", no_args_is_help=True)

_MOST_PROBLEMS: Final = 5


@app.command("list")
def list_budgets(config: FleetConfig = None, as_json: JsonOption = False) -> None:
    """List what each device was granted over all jobs, in each column. Columns are never added."""
    from coordinator.participation import total_values, totals

    with _opened(coordinator_settings(config)) as (devices, reader):
        went_back = reader.went_back()
        found = [(each, totals(reader.spent(devices.lineage(each.id)))) for each in devices.all()]
    if as_json:
        values = [
            {"device": device.id, "state": device.state, "ledger_went_back": device.id in went_back,
             "granted": [total_values(total) for total in columns]}
            for device, columns in found
        ]  # fmt: skip
        typer.echo(json.dumps(json_values(values), indent=2))
        return
    rows = [
        [
            device.id, device.state, column.in_words, upwards(column.epsilon),
            plain_bound(column.delta), "went back" if device.id in went_back else "",
        ]
        for device, columns in found
        for column in columns
    ]  # fmt: skip
    if rows:
        print_table(["device", "state", "column", "ε", "δ", "ledger"], rows)
    idle = sum(not columns for _, columns in found)
    if idle:
        typer.echo(f"{counted(idle, 'device')} never granted anything.")


@app.command()
def show(device: DeviceArgument, config: FleetConfig = None, as_json: JsonOption = False) -> None:
    """Show what a device was granted, job by job, with those whose place it took."""
    from coordinator.participation import totals

    with _opened(coordinator_settings(config)) as (devices, reader):
        found = devices.named(device)
        lineage = devices.lineage(found.id)
        spent, entries = reader.spent(lineage), [each for one in lineage for each in reader.entries(one)]
        is_behind = found.id in reader.went_back()
    if as_json:
        values = {
            "device": found.id,
            "lineage": lineage,
            "ledger_went_back": is_behind,
            "jobs": [{"job": each.job, "rounds": each.rounds, **each.statement} for each in spent],
            "requests": [
                {"device": each.device, "job": each.job.hex(), "round": each.round, "at": each.at,
                 "wish": each.wish.name.lower(), "verdict": each.verdict.name.lower(),
                 "ledger_entries": each.statement.entries}
                for each in entries
            ],
        }  # fmt: skip
        typer.echo(json.dumps(json_values(values), indent=2))
        return
    typer.echo(f"Device {found.id}: {found.state}")
    for other in lineage[1:]:
        typer.echo(f"Took the place of {other}: their budgets are one.")
    if spent:
        print_table(
            ["job", "rounds", "column", "ε", "δ"],
            [
                [
                    each.job[:8], str(each.rounds), total.in_words,
                    upwards(total.epsilon), plain_bound(total.delta),
                ]
                for each in spent
                for total in totals([each])
            ],
        )  # fmt: skip
    for total in totals(spent):
        typer.echo(f"Granted in all: {total.sentence()}.")
    if not spent:
        typer.echo("Nothing was granted.")
    if is_behind:
        typer.echo(
            "Its ledger has fewer entries than a statement that it signed: its state is an older copy. It "
            "gets no tokens until it is past them again, or enrols again in its own place."
        )


@app.command()
def export(
    target: Annotated[Path, typer.Argument(help="File to write, or - for standard output.")],
    config: FleetConfig = None,
) -> None:
    """Write everything for an auditor: what each board was granted, and the statements that it signed.

    The coordinator signs the whole. `budgets verify` checks it, on any machine.
    """
    from coordinator.budget_export import export as exported
    from coordinator.budget_export import without_tokens
    from coordinator.keys import find_signer

    settings = coordinator_settings(config)
    untold = without_tokens(settings.store_place)
    with _opened(settings) as (devices, reader):
        signer = find_signer(settings.keys_dir, settings.fleet)
        values = exported(
            reader, devices, fleet=settings.fleet, untold=untold, signer=signer, now=time.time()
        )
    write_json(target, values)


@app.command()
def verify(
    file: Annotated[Path, typer.Argument(metavar="FILE", help="What `budgets export` wrote.")],
    key: Annotated[
        str | None,
        typer.Option(
            "--key",
            help="The fleet's coordinator key, as `dpagent coordinator key` prints it.",
            show_default="that in the file",
        ),
    ] = None,
    as_json: JsonOption = False,
) -> None:
    """Check an export, on any machine, with the file and the coordinator's public key alone.

    Its signature, each board's signature of each statement, that all boards were shown the same keys, those
    that are in the file, and each figure, from the requests that were granted and the price of each round.
    Exits with 5 if anything does not fit.
    """
    from coordinator.budget_audit import audit, read_export
    from coordinator.participation import total_values
    from dpagent.errors import LedgerError, UsageError
    from dpagent.protocol.signing import decode_public_key

    if key is not None:
        try:
            decode_public_key(key)
        except ValueError as error:
            raise UsageError(f"--key {key!r}: {error}.") from error
    found = audit(read_export(file), str(file), key)
    if as_json:
        values = {
            "fleet": found.fleet, "coordinator_key": found.coordinator_key, "exported_at": found.exported_at,
            "statements": found.statements, "without_tokens": list(found.untold),
            "problems": list(found.problems),
            "devices": [
                {"device": each.device, "state": each.state, "rounds": each.rounds,
                 "granted": [total_values(total) for total in each.totals]}
                for each in found.granted
            ],
        }  # fmt: skip
        typer.echo(json.dumps(json_values(values), indent=2))
    else:
        print_table(
            ["device", "state", "rounds", "column", "ε", "δ"],
            [
                [each.device, each.state, str(each.rounds), *figures]
                for each in found.granted
                for figures in (
                    [
                        [
                            total.in_words,
                            upwards(total.epsilon),
                            plain_bound(total.delta),
                        ]
                        for total in each.totals
                    ]
                    or [["nothing", "", ""]]
                )
            ],
        )  # fmt: skip
    if found.problems:
        shown = " ".join(found.problems[:_MOST_PROBLEMS])
        more = len(found.problems) - _MOST_PROBLEMS
        raise LedgerError(
            f"{file}: {counted(len(found.problems), 'problem')}. {shown}"
            f"{f' And {more} more: --json lists all.' if more > 0 else ''}"
        )
    if as_json:
        return
    typer.echo(
        f"{counted(len(found.granted), 'device')}, {counted(found.statements, 'statement')}, each signed by "
        f"its device; all figures follow from them. Exported {found.exported_at}."
    )
    for each in found.untold:
        typer.echo(
            f"Not in these figures: job {each}. Its fragments carried no tokens, so only a board's own "
            "ledger says whether it took part."
        )
    whose = (
        "that the file names: compare it with what `dpagent coordinator key` prints"
        if key is None
        else "given"
    )
    typer.echo(
        f"Signed by the coordinator of fleet {found.fleet} with the key {found.coordinator_key}, {whose}."
    )


@contextlib.contextmanager
def _opened(settings: CoordinatorSettings) -> Iterator[tuple[Devices, RegistryReader]]:
    from coordinator.devices import Devices
    from coordinator.registry import RegistryReader

    reader = RegistryReader(settings.members_place)
    try:
        with Devices(settings.members_place) as devices:
            yield devices, reader
    finally:
        reader.close()
