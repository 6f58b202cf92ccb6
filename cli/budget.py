"""``dpagent budget …``: the ledger of a device. Here are the commands that read it."""

from __future__ import annotations

import json
import math
from dataclasses import asdict
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from cli import custody
from cli.commands import Commands
from cli.custody import StateDir, ledger_files
from cli.options.daemons import AgentConfig
from cli.output import write_json
from cli.tables import print_table
from dpagent.notation import delta_downwards, downwards, plain_bound, upwards
from dpagent.schema.json_values import json_values
from dpagent.wording import counted

if TYPE_CHECKING:
    from collections.abc import Mapping

    from agent.audit import VerifiedLedger
    from agent.charges import Charge
    from agent.columns import Scope

app = Commands(help="The ledger of a device: begin, read, verify, back up.", no_args_is_help=True)
app.command(name="init")(custody.init)
app.command(name="raise")(custody.increase)
app.command(name="backup")(custody.backup)
app.command(name="restored")(custody.restored)

_EXACT_NOISE = (
    "In jobs priced by Rényi divergence the noise is exactly discrete Gaussian; `statistical_distance` is "
    "its actual distance from that."
)
_EXPOSED = (
    "Rounds that guarantee nothing have been run on these records (`limits.allow_unproven`). The figures of "
    "all others bound what those alone add."
)
_ONE_LEDGER = "These records have no other ledger."


def _scope(account: str = "") -> dict[str, str]:
    """The scope of an account's figures, for JSON; by default, of an account that trusts nobody."""
    from agent.columns import scope_of

    unit, adjacency, trust = scope_of(account)
    return {"unit": str(unit), "adjacency": str(adjacency), "trust": str(trust)}


def _in_words(scope: Scope) -> str:
    unit, adjacency, trust = scope
    return f"Unit: {unit.meaning}. Adjacency: {adjacency}. Trusted: {trust.meaning}."


def summary_of(ledger: VerifiedLedger) -> dict[str, dict[str, Any]]:
    """Lifetime budget, reservations and spending by account: that of a dataset, or of its jobs that trust a
    party."""
    from agent.charges import Budget, BudgetChange, Charge, WriteOff
    from agent.columns import dataset_of
    from agent.priced_charges import ledger_statement

    datasets: dict[str, dict[str, Any]] = {}
    exact_noise: dict[str, bool] = {}
    mechanisms: dict[str, list[str]] = {}
    for entry in ledger.entries:
        record = entry.record
        known = datasets.setdefault(
            record.dataset,
            {"epsilon_spent": 0.0, "statistical_distance": 0.0, "charges": 0, "jobs": []},
        )
        match record:
            case Charge():
                # Of the sampler from the exact distribution; a millionth of δ covers it.
                known["statistical_distance"] += record.statistical_distance
                known["charges"] += 1
                exact_noise[record.dataset] = (
                    exact_noise.get(record.dataset, False) or record.loss_grid is None
                )
                mechanisms.setdefault(record.dataset, []).append(record.mechanism)
                if record.job not in known["jobs"]:
                    known["jobs"].append(record.job)
            case BudgetChange():
                known |= {"epsilon_budget": record.epsilon, "delta_budget": record.delta}
            case WriteOff():
                mechanisms.setdefault(record.dataset, []).append("unknown, written off")
    for name, known in datasets.items():
        reserved, written_off = ledger.accounts.reserved(name), ledger.accounts.written_off(name)
        known |= {
            "epsilon_spent": ledger.accounts.epsilon_spent(name),
            "epsilon_reserved": reserved.epsilon,
            "delta_reserved": reserved.delta,
            "epsilon_left": max(0.0, known["epsilon_budget"] - reserved.epsilon),
            "delta_left": max(0.0, known["delta_budget"] - reserved.delta),
            "epsilon_written_off": written_off.epsilon,
            "delta_written_off": written_off.delta,
        }
    for name, known in datasets.items():
        unbounded = [_without_trust(ledger, other) for other in datasets if dataset_of(other) == name]
        assumptions = (
            _ONE_LEDGER,
            *([_EXACT_NOISE] if exact_noise.get(name) else []),
            *filter(None, unbounded),
            *filter(None, [_besides(ledger, name)]),
        )
        reserved = ledger.accounts.reserved(name)
        if ledger.accounts.is_exposed(name):
            known["epsilon_left"] = 0.0  # No job with a guarantee is taken there any more.
            reserved, assumptions = Budget(math.inf, 1.0), (*assumptions, _EXPOSED)
        statement = ledger_statement(name, reserved, mechanisms.get(name, ()), *assumptions)
        known |= _scope(name) | {"statement": statement.as_dict()}
    return datasets


def _without_trust(ledger: VerifiedLedger, account: str) -> str:
    """What figures that trust nobody leave out of an account's jobs; empty where they leave out nothing."""
    from agent.columns import dataset_of, scope_of
    from dpagent.privacy.statement import Trust

    *_, trust = scope_of(account)
    unbounded = ledger.accounts.jobs_without_bound(account)
    jobs = [counted(unbounded, "job")] if unbounded else []
    jobs += ["what a restore wrote off"] if ledger.accounts.written_off(account).epsilon else []
    if trust is Trust.NONE or not jobs:
        return ""
    return (
        f"Of {dataset_of(account)!r}, {' and '.join(jobs)} trusted the {trust}: without that trust nothing "
        "bounds what was told of the records."
    )


def _besides(ledger: VerifiedLedger, account: str) -> str:
    """What figures that trust a party leave out of the same records' jobs; empty where they leave out
    nothing."""
    from agent.columns import dataset_of

    jobs = ledger.accounts.jobs_besides(account)
    lost = ledger.accounts.written_off(dataset_of(account)).epsilon
    if account == dataset_of(account) or not (jobs or lost):
        return ""
    told = [counted(jobs, "job")] if jobs else []
    told += ["what a restore wrote off"] if lost else []
    return (
        f"The figure of {account!r} is of its own jobs. Of {dataset_of(account)!r}, {' and '.join(told)} "
        "trusted nobody, and what was told by that of the device as a whole is not in it."
    )


@app.command()
def show(
    state_dir: StateDir = None,
    config: AgentConfig = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON instead of a table.")] = False,
) -> None:
    """Show the spent and remaining budget of each dataset, and of its jobs that trust the coordinator, and
    declined plans.

    A job reserves its whole ε and δ with its first round; the rest remains for other jobs.
    """
    from agent.audit import audit, open_ledger
    from agent.rounds import declined_rounds, energy_of_jobs, noise_alone_rounds
    from dpagent.database_file import database_errors

    state_dir = ledger_files(state_dir, config).state_dir
    ledger = audit(state_dir)
    datasets = summary_of(ledger)
    connection, _ = open_ledger(state_dir)
    try:
        with database_errors(state_dir / "ledger.db"):
            declined, noise_alone, energy = [
                [asdict(entry) for entry in read(connection)]
                for read in (declined_rounds, noise_alone_rounds, energy_of_jobs)
            ]
    finally:
        connection.close()
    if as_json:
        typer.echo(
            json.dumps(
                json_values(
                    _scope()
                    | {"datasets": datasets, "declined": declined, "noise_alone": noise_alone}
                    | {"energy": energy}
                ),
                indent=2,
                ensure_ascii=False,
            )
        )
        return
    if not datasets:
        typer.echo("The ledger is empty: no budget is set and nothing is spent.")
    else:
        _print_accounts(ledger, datasets)
        distance = sum(row["statistical_distance"] for row in datasets.values())
        if distance:
            typer.echo(
                f"Total distance of the sampler from the exact distribution: {distance:.1e} (δ covers it)."
            )
    for lost in ledger.write_offs:
        typer.echo(
            f"Written off of {lost.dataset!r} when the ledger was restored, {lost.written_at}: "
            f"ε = {upwards(lost.epsilon, 4)}, δ = {plain_bound(lost.delta)}."
        )
    for row in declined:
        typer.echo(f"Declined round {row['round']} of job {row['job'][:8]}: {row['reason']}")
    for row in noise_alone:
        typer.echo(f"No record counts in round {row['round']} of job {row['job'][:8]}: {row['reason']}")
    for row in energy:
        typer.echo(
            f"Job {row['job'][:8]} took {row['joules']:.3g} J in {counted(row['rounds'], 'round')}, as "
            f"{row['source']} measures it."
        )


def _print_accounts(ledger: VerifiedLedger, datasets: Mapping[str, Mapping[str, Any]]) -> None:
    """A table for each trust: their figures are never added up."""
    from agent.columns import SCOPES, scope_of

    for scope in SCOPES.values():
        accounts = {name: row for name, row in datasets.items() if scope_of(name) == scope}
        if not accounts:
            continue
        typer.echo(_in_words(scope))
        print_table(
            ["dataset", "ε spent", "ε reserved", "ε budget", "ε left", "δ left", "charges", "jobs"],
            [
                [
                    name,
                    _bound(row["epsilon_spent"]),
                    _bound(row["epsilon_reserved"]),
                    plain_bound(row["epsilon_budget"]),
                    downwards(row["epsilon_left"], 4),
                    delta_downwards(row["delta_left"]),
                    str(row["charges"]),
                    str(len(row["jobs"])),
                ]
                for name, row in accounts.items()
            ],
        )
        for name, row in accounts.items():
            if row["statement"]["guarantee"] == "none":
                typer.echo(f"No guarantee for {name!r}. {_EXPOSED}")
        for tells in (_without_trust, _besides):
            for sentence in filter(None, (tells(ledger, name) for name in accounts)):
                typer.echo(sentence)


def _bound(epsilon: float) -> str:
    return upwards(epsilon, 4) if math.isfinite(epsilon) else "no bound"


@app.command()
def verify(
    state_dir: StateDir = None,
    second_head: Annotated[
        Path | None,
        typer.Option(
            help="The second head.",
            show_default="that of the configuration; with --state-dir, its name with .head added",
        ),
    ] = None,
    config: AgentConfig = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON instead of a sentence.")] = False,
) -> None:
    """Check the hash chain, the price of every charge, the number of entries, and that no entry is missing
    that the second head knows.

    Exits with 5 and names the first incorrect entry, or says how many are missing.
    """
    from agent.audit import verify as verify_ledger

    files = ledger_files(state_dir, config)
    # A configuration says where it is; beside a directory, it is only likely.
    if second_head is None and (state_dir is None or files.second_head.exists()):
        second_head = files.second_head
    if second_head is None:
        typer.echo(
            f"There is no second head at {files.second_head}: whether this is the newest copy of the ledger "
            "is not checked. `--second-head` names another place.",
            err=True,
        )
    result = verify_ledger(files.state_dir, second_head)
    if as_json:
        typer.echo(
            json.dumps(
                {"verified": True, "entries": result.entries, "charges": result.charges, "head": result.head}
            )
        )
    else:
        typer.echo(
            f"The ledger is correct: {counted(result.entries, 'entry')}, "
            f"{counted(result.charges, 'charge')}, head {result.head}."
        )


@app.command()
def export(
    state_dir: StateDir = None,
    json_file: Annotated[
        Path | None,
        typer.Option("--json", help="Write JSON to this file (`-`: standard output) instead of a table."),
    ] = None,
    config: AgentConfig = None,
) -> None:
    """Verify and export every charge, with all parameters needed to price it again."""
    from agent.audit import audit
    from agent.charges import Charge

    ledger = audit(ledger_files(state_dir, config).state_dir)
    charges = [
        _flat(entry.record) | {"entry": entry.number, "hash": entry.digest.hex()}
        for entry in ledger.entries
        if isinstance(entry.record, Charge)
    ]
    write_offs = [asdict(each) for each in ledger.write_offs]
    if json_file is not None:
        found = {"datasets": summary_of(ledger), "charges": charges, "write_offs": write_offs}
        write_json(json_file, _scope() | found)
        return
    if not charges:
        typer.echo("The ledger has no charges yet.")
        return
    print_table(
        [
            "entry",
            "dataset",
            "job",
            "round",
            "mechanism",
            "noise",
            "q",
            "granularity",
            "δ",
            "ε so far",
            "hash",
        ],
        [
            [
                str(charge["entry"]),
                charge["dataset"],
                charge["job"][:8],
                str(charge["round"]),
                charge["mechanism"],
                f"{charge['noise_multiplier']:.4f}",
                f"{charge['sampling_rate']:g}" if "sampling_rate" in charge else "",
                f"{charge['granularity']:.3g}" if "granularity" in charge else "",
                plain_bound(charge["delta"]),
                _bound(charge["cumulative_epsilon"]),
                charge["hash"][:12],
            ]
            for charge in charges
        ],
    )


@app.command()
def evidence(
    state_dir: StateDir = None,
    json_file: Annotated[
        Path | None,
        typer.Option("--json", help="Write the signed lists to this file (`-`: standard output), in hex."),
    ] = None,
    config: AgentConfig = None,
) -> None:
    """Show where the coordinator has signed different keys for the one-time tokens of one round.

    With a key of its own for one board, it could tell that board's fragments from others'. Both lists are
    kept as they were signed: whoever has the coordinator's public key can check them.
    """
    from agent.audit import evidence as kept_evidence

    conflicts = kept_evidence(ledger_files(state_dir, config).state_dir)
    if json_file is not None:
        found = [
            {
                "job": each.job.hex(),
                "round": each.number,
                "found_at": each.found_at,
                "lists": [each.one.hex(), each.other.hex()],
            }
            for each in conflicts
        ]
        write_json(json_file, {"conflicts": found})
        return
    if not conflicts:
        typer.echo("This board has seen one key for each round's tokens, as all boards should.")
    for each in conflicts:
        typer.echo(
            f"Job {each.job.hex()[:8]}: two keys are signed for round {each.number}, found at "
            f"{datetime.fromtimestamp(each.found_at, UTC):%Y-%m-%d %H:%M} UTC. `--json FILE` writes both."
        )


def _flat(charge: Charge) -> dict[str, Any]:
    """A charge for JSON: the mechanism's parameters next to the other keys."""
    fields = asdict(charge)
    parameters: dict[str, Any] = fields.pop("parameters", {})
    return fields | parameters
