"""The table at the end of a demo; its figures are those of ``--json``."""

from __future__ import annotations

from typing import Any, Final

import typer

from cli.tables import print_table
from dpagent.notation import plain_bound, upwards
from dpagent.wording import counted

_WITH: Final = {"shuffler": " if nobody links fragments", "none": ", nobody trusted"}
"""On whom a figure besides the run's own rests."""


def print_summary(results: dict[str, Any]) -> None:
    """Print the results of :func:`simulation.report.results.as_json` as a table."""
    privacy, fragments = results["privacy"], results["fragments"]
    traffic, seconds = results["bytes_per_device_round"], results["seconds"]
    data, history = results["data"], results["baseline_accuracy_history"]
    baseline = _percent(results["baseline_accuracy"])
    if 0 < len(history) < results["rounds"]:
        baseline += f" (after {counted(len(history), 'round')}, when its time was over)"
    # A device charged for a round that was not closed has spent more than the closed rounds say.
    figures = [*privacy["epsilon_spent"][-1:], *(d["epsilon_spent"] for d in privacy["ledgers"])]
    target = privacy["epsilon_target"]
    spent = f"{upwards(max([0.0, *figures]), 4, of=target)} of {plain_bound(target)}"
    if privacy["statement"]["guarantee"] == "none":
        spent = "no bound: nothing is guaranteed"
    print_table(
        ["result", "value"],
        [
            [
                "accuracy",
                f"{_percent(results['accuracy'])} of {counted(data['test_records'], 'test record')}",
            ],
            ["accuracy without noise", baseline],
            ["always answering the commonest class", _percent(results["guessing_accuracy"])],
            [
                "data",
                f"{results['dataset']}, {counted(data['records_per_device'], 'record')} a device, "
                f"{' × '.join(map(str, data['shape']))}",
            ],
            ["split", data["split"]],
            ["classes", _some(data["classes"])],
            ["model", f"{results['model']['name']}, {counted(results['model']['parameters'], 'parameter')}"],
            ["method", f"{privacy['method']}, {privacy['noise']} noise"],
            ["devices × rounds", f"{results['devices']} × {results['rounds']}"],
            ["ε spent of target", spent],
            ["δ", plain_bound(privacy["delta"])],
            ["unit, adjacency", f"{privacy['unit']}, {privacy['adjacency']}"],
            ["trusted parties", privacy["trust"]],
            *(
                [f"ε of the {column['unit']}{_WITH[column['trust']]}", upwards(column["epsilon"], 4)]
                for column in privacy["columns"][1:]
                if column["unit"] != "coordinate"
            ),
            *_ways(results),
            [
                "ledgers verified",
                f"{sum(d['verified'] for d in privacy['ledgers'])} of {len(privacy['ledgers'])}",
            ],
            [
                "fragments charged / sent / counted",
                f"{fragments['charged']} / {fragments['sent']} / {fragments['counted']}",
            ],
            ["expired / lost", f"{fragments['expired']} / {fragments['lost']}"],
            ["duplicates / rejected", f"{fragments['duplicates']} / {fragments['rejected']}"],
            ["bytes a device and round, up / down", f"{traffic['up']:,} / {traffic['down']:,}"],
            [
                "seconds, total / median round",
                f"{seconds['total']:.1f} / {seconds['per_round_median'] or 0:.2f}",
            ],
            *_programs(results),
        ],
    )
    for sentence in results["minds"]:
        typer.echo(f"Note: {sentence}")
    typer.echo(f"Model: {results['model']['file']}")
    typer.echo(f"Records held out: {results['test_file']}")
    for command in results["predict"]:
        typer.echo(f"Try: {command}")


def _ways(results: dict[str, Any]) -> list[list[str]]:
    if results["virtual"]:
        return [["devices are", "virtual; one ledger stands for all"]]
    return [["fragments pass through", "broker and mixer" if results["mixer"] else "broker"]]


def _programs(results: dict[str, Any]) -> list[list[str]]:
    """What the programs of a fleet took; a virtual one has none."""
    if results["virtual"]:
        return []
    memory = results["peak_memory_mib"]
    shown = f"{_mib(memory['agent_max'])} / {_mib(memory['coordinator'])}"
    return [
        ["peak memory, agent / coordinator", shown],
        ["programs started again", str(results["restarts"])],
    ]


def _percent(value: float | None) -> str:
    return "not measured" if value is None else f"{value:.2%}"


def _mib(value: float | None) -> str:
    return "unknown" if value is None else f"{value:.1f} MiB"


def _some(names: list[str], most: int = 8) -> str:
    shown = ", ".join(names[:most])
    return f"{len(names)}: {shown}{', …' if len(names) > most else ''}"
