"""``dpagent doctor``: what is wrong with a board or a coordinator, and what to do."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from cli.configurations import agent_settings, configuration, coordinator_settings, stated
from cli.findings import as_json, exit_code_of, lines_of, summary_of
from cli.options.daemons import AnyConfig
from cli.output import write_json

if TYPE_CHECKING:
    from dpagent.diagnosis import Finding


def doctor(
    config: AnyConfig = None,
    broker: Annotated[
        bool,
        typer.Option(
            "--broker/--no-broker", help="Whether to connect to the broker, as the program itself would."
        ),
    ] = True,
    json_file: Annotated[
        Path | None, typer.Option("--json", help="Write JSON to this file (`-`: standard output) instead.")
    ] = None,
) -> None:
    """Say what is wrong with a board or a coordinator: machine, files, data, broker, plan.

    It changes nothing, and works beside a running program. To the broker it is a connection like any other,
    which sends an empty message to see whether it may. What it says of the data is private. The exit code is
    that of the first problem, 0 without one.
    """
    found: list[Finding] = []
    for finding in _findings(config, asks_broker=broker):
        found.append(finding)
        if json_file is None:
            typer.echo(lines_of(finding))
    if json_file is None:
        typer.echo(f"\n{summary_of(found)}")
    else:
        write_json(json_file, as_json(found))
    raise typer.Exit(exit_code_of(found))


def _findings(config: Path | None, *, asks_broker: bool) -> Iterator[Finding]:
    from dpagent.diagnosis import fine, problem, problem_of
    from dpagent.errors import DpagentError

    try:
        found = configuration(config)
        read = fine("configuration", stated(found.file, found.overrides))
        match found.kind:
            case "agent":
                from agent.diagnosis import examine as examine_board

                board = agent_settings(found.file)
                yield read
                yield from examine_board(board, asks_broker=asks_broker)
            case "coordinator":
                from coordinator.diagnosis import examine as examine_coordinator

                coordinator = coordinator_settings(found.file)
                yield read
                yield from examine_coordinator(coordinator, asks_broker=asks_broker)
            case "mixer" | "job":
                yield problem(
                    "configuration", f"{found.file} is a {found.kind}'s",
                    "Give an agent.yaml or a fleet.yaml; `dpagent config check` checks this one.",
                )  # fmt: skip
    except DpagentError as error:
        yield problem_of("configuration", error)
