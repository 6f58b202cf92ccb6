"""``dpagent methods list|show``: how a fleet can train, and what each way protects from whom."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from cli.commands import Commands
from cli.output import write_json
from cli.tables import render_table
from dpagent.errors import ParameterError, UsageError

if TYPE_CHECKING:
    from dpagent.privacy.methods import Method

app = Commands(help="The methods that a fleet can train with.", no_args_is_help=True)

JsonOption = Annotated[
    Path | None, typer.Option("--json", help="Write JSON to this file (`-`: standard output) instead.")
]


@app.command("list")
def list_methods(json_file: JsonOption = None) -> None:
    """List the methods: what each hides, and whom it trusts."""
    from dpagent.privacy.mechanisms.registry import mechanism_of
    from dpagent.privacy.methods import METHODS

    methods = list(METHODS.values())
    if json_file is not None:
        write_json(json_file, [_as_json(method) for method in methods])
        return
    rows = [
        [
            method.name, str(mechanism_of(method).unit), str(method.trust),
            ", ".join(method.mechanisms), ", ".join(method.caps), method.title,
        ]
        for method in methods
    ]  # fmt: skip
    header = ["method", "hides a", "trusts", "noise", "caps", "what it is"]
    typer.echo(render_table(header, rows, words=len(header)), nl=False)


@app.command()
def show(
    name: Annotated[str, typer.Argument(help="Its name, as `dpagent methods list` has it.")],
    json_file: JsonOption = None,
) -> None:
    """Show a method: its source, a round, the guarantee, and how to choose it."""
    from dpagent.privacy.methods import method_named

    try:
        method = method_named(name)
    except ParameterError as error:
        raise UsageError(str(error)) from error
    if json_file is not None:
        write_json(json_file, _as_json(method))
    else:
        typer.echo(_page(method))


def _page(method: Method) -> str:
    from dpagent.privacy.mechanisms.registry import mechanism_of

    lines = [f"{method.name}: {method.title}", "", _wrapped(method.source), "", _wrapped(method.summary), ""]
    clipped = "Whole updates" if method.trains_locally else "Records"
    for noise in method.mechanisms:
        mechanism = mechanism_of(method, noise)
        chosen = "" if noise == method.default_noise else f" (privacy.noise: {noise})"
        lines += [
            f"{noise} noise{chosen}: mechanism {mechanism.name}",
            f"  Hides the {mechanism.adjacency.meaning} of {mechanism.unit.meaning}.",
            f"  Trusted: {mechanism.trust.meaning}.",
            *([] if mechanism.norm is None else [f"  {clipped} are clipped in {mechanism.norm}."]),
        ]
    lines += [
        "",
        _wrapped(f"What the coordinator learns of one device: {method.learns}"),
        "",
        f"In fleet.yaml: privacy.method: {method.name}; caps: {', '.join(method.caps)}.",
        f"To try it: dpagent demo --method {method.name}",
        f"More: docs/methods/{method.name}.md",
    ]
    return "\n".join(lines)


def _wrapped(text: str) -> str:
    import textwrap

    return textwrap.fill(text, 80, break_on_hyphens=False)


def _as_json(method: Method) -> dict[str, Any]:
    from dpagent.privacy.mechanisms.registry import mechanism_of

    mechanisms = {noise: mechanism_of(method, noise) for noise in method.mechanisms}
    return {
        "name": method.name,
        "title": method.title,
        "source": method.source,
        "summary": method.summary,
        "learns": method.learns,
        "caps": list(method.caps),
        "noise": {
            noise: {
                "mechanism": mechanism.name,
                "unit": str(mechanism.unit),
                "adjacency": str(mechanism.adjacency),
                "trust": str(mechanism.trust),
                "norm": None if mechanism.norm is None else str(mechanism.norm),
            }
            for noise, mechanism in mechanisms.items()
        },
    }
