"""``dpagent coordinator budgets …``: what each device was granted."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from cli.commands import Commands
from cli.configurations import FleetConfig, fleet_settings
from cli.members.devices import DeviceArgument, JsonOption
from cli.output import write_json
from cli.tables import print_table
from dpagent.json_values import finite
from dpagent.notation import upwards
from dpagent.wording import counted

if TYPE_CHECKING:
    from coordinator.devices import Devices
    from coordinator.registry import RegistryReader
    from coordinator.settings import FleetSettings

app = Commands(help="What each device of the fleet was granted.", no_args_is_help=True)


@app.command("list")
def list_budgets(config: FleetConfig = None, as_json: JsonOption = False) -> None:
    """List what each device was granted over all jobs, in each column. Columns are never added."""
    from coordinator.participation import total_values, totals

    with _opened(fleet_settings(config)) as (devices, reader):
        went_back = reader.went_back()
        found = [(each, totals(reader.spent(devices.lineage(each.id)))) for each in devices.all()]
    if as_json:
        values = [
            {"device": device.id, "state": device.state, "ledger_went_back": device.id in went_back,
             "granted": [total_values(total) for total in columns]}
            for device, columns in found
        ]  # fmt: skip
        typer.echo(json.dumps(finite(values), indent=2))
        return
    rows = [
        [
            device.id, device.state, f"{column.unit}, trusts {column.trust}", upwards(column.epsilon),
            f"{column.delta:g}", "went back" if device.id in went_back else "",
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

    with _opened(fleet_settings(config)) as (devices, reader):
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
        typer.echo(json.dumps(finite(values), indent=2))
        return
    typer.echo(f"Device {found.id}: {found.state}")
    for other in lineage[1:]:
        typer.echo(f"Took the place of {other}: their budgets are one.")
    if spent:
        print_table(
            ["job", "rounds", "column", "ε", "δ"],
            [
                [
                    each.job[:8], str(each.rounds), f"{total.unit}, trusts {total.trust}",
                    upwards(total.epsilon), f"{total.delta:g}",
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
    """Write everything for an auditor: what each board was granted, and the statements that it signed."""
    from coordinator.keys import load_signer
    from coordinator.participation import export as exported

    settings = fleet_settings(config)
    with _opened(settings) as (devices, reader):
        key = load_signer(settings.keys_dir, settings.fleet).public_key
        values = exported(reader, devices, fleet=settings.fleet, coordinator_key=key)
    write_json(target, values)


@contextlib.contextmanager
def _opened(settings: FleetSettings) -> Iterator[tuple[Devices, RegistryReader]]:
    from coordinator.devices import Devices
    from coordinator.registry import RegistryReader

    reader = RegistryReader(settings.members_place)
    try:
        with Devices(settings.members_place) as devices:
            yield devices, reader
    finally:
        reader.close()
