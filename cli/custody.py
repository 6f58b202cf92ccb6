"""``dpagent budget init|raise|backup|restored``: what the owner of a device does with its ledger."""

from __future__ import annotations

from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from cli.configurations import agent_settings
from cli.options.daemons import AgentConfig
from dpagent.notation import plain_bound, plain_bounds, upwards
from dpagent.wording import counted

if TYPE_CHECKING:
    from agent.heads import LedgerFiles

StateDir = Annotated[
    Path | None,
    typer.Option(
        help="The board's state directory, with ledger.db.", show_default="that of the configuration"
    ),
]


def ledger_files(state_dir: Path | None, config: Path | None) -> LedgerFiles:
    """The ledger that a command is about: in a directory, or that of a configuration.

    Raises:
        ConfigurationError: without a directory, if there is no configuration or something is wrong in it.
    """
    if state_dir is None:
        return agent_settings(config).ledger_files
    from agent.heads import LedgerFiles, second_head_beside

    return LedgerFiles(state_dir, second_head_beside(state_dir))


def init(config: AgentConfig = None) -> None:
    """Begin the ledger of new data, with the lifetime budget in agent.yaml. Nothing is spent yet.

    Exits with 5 where there is a ledger, or its second head: data that have been used have a ledger already.
    """
    from agent.custody import begin_ledger

    settings = agent_settings(config)
    files, budgets = settings.ledger_files, settings.lifetime_budgets
    begin_ledger(files, budgets)
    for name, budget in budgets.items():
        typer.echo(
            f"Began the ledger of {name!r} in {files.state_dir}, with a lifetime budget of "
            f"{plain_bounds(budget.epsilon, budget.delta)}. Its second head is {files.second_head}."
        )


def increase(config: AgentConfig = None) -> None:
    """Raise the lifetime budget to that in agent.yaml, or give one to a new `data.name`, or to jobs
    that trust the coordinator. Stop the agent first.

    The guarantee for the records is weaker by the difference. The ledger keeps an entry of it.
    """
    from agent.custody import raise_budget

    settings = agent_settings(config)
    budgets = settings.lifetime_budgets
    for name, before in raise_budget(settings.ledger_files, budgets).items():
        was = "none" if before is None else plain_bounds(before.epsilon, before.delta)
        typer.echo(
            f"The lifetime budget for {name!r} was {was} and is "
            f"{plain_bounds(budgets[name].epsilon, budgets[name].delta)}."
        )


def backup(
    file: Annotated[Path, typer.Argument(metavar="FILE", help="The copy; its head goes beside it.")],
    state_dir: StateDir = None,
    config: AgentConfig = None,
) -> None:
    """Copy the ledger, also while the agent runs. The copy is checked before it takes the place of FILE.

    A copy of the files themselves may catch them half-written. After you put a copy back, run
    `dpagent budget restored`.
    """
    from agent.custody import back_up

    ledger = back_up(ledger_files(state_dir, config).state_dir, file)
    typer.echo(f"Copied a ledger of {counted(len(ledger.entries), 'entry')} to {file}.")


def restored(
    config: AgentConfig = None,
    from_backup: Annotated[
        Path | None,
        typer.Option("--from", help="First put back this copy, which `dpagent budget backup` made."),
    ] = None,
    write_off_all: Annotated[
        bool,
        typer.Option(
            "--write-off-all",
            help="The second head is lost, or was put back too: write off all that is left of the budget. Set"
            " the largest that it ever was in agent.yaml first.",
        ),
    ] = False,
) -> None:
    """Go on after an older ledger was put back, or none: write off what may have been spent since.

    The second head knows that exactly. All jobs that have begun end. Stop the agent first.
    """
    from agent.custody import go_on_after_restore, put_back
    from agent.profile import load_profile
    from agent.settings import on_board

    settings = agent_settings(config)
    files, limits = settings.ledger_files, on_board(settings, load_profile(settings.profile)).limits
    if from_backup is not None:
        put_back(from_backup, files)
    lost = go_on_after_restore(
        files,
        settings.lifetime_budgets,
        write_off_all=write_off_all,
        allows_unproven=limits.allow_unproven,
        at=datetime.now(UTC),
    )
    for each in lost:
        typer.echo(
            f"Wrote off ε = {upwards(each.epsilon, 4)}, δ = {plain_bound(each.delta)} of {each.dataset!r}: "
            f"ε = {upwards(each.cumulative_epsilon, 4)}, δ = {plain_bound(each.cumulative_delta)} are "
            "reserved now."
        )
    if not lost:
        typer.echo(
            f"No entry is missing, by {files.second_head}: nothing is written off. If that file was put back "
            "too, use --write-off-all."
        )
