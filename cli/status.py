"""``dpagent status``: what a board's agent does, what is spent, and what is awaited; once, or live."""

from __future__ import annotations

import json
import math
import signal
import sys
import time
from collections.abc import Iterator
from dataclasses import asdict
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Annotated, Any, Final

import typer

from cli.configurations import agent_settings
from cli.notation import printable
from cli.options.daemons import AgentConfig
from cli.stop_event import StopEvent
from dpagent.errors import ExitCode
from dpagent.notation import delta_downwards, downwards, plain_bound, upwards
from dpagent.schema.json_values import json_values
from dpagent.wording import lasting

if TYPE_CHECKING:
    from pathlib import Path

    from agent.overview import Account, Overview

_LOOK_S: Final = 1.0
"""Between two looks of ``--watch``."""


def status(
    config: AgentConfig = None,
    watch: Annotated[
        bool,
        typer.Option("--watch", "-w", help="Go on until Ctrl-C; in a pipe, one line for each change."),
    ] = False,
    as_json: Annotated[
        bool, typer.Option("--json", help="Print JSON instead; with --watch, an object a line.")
    ] = False,
) -> None:
    """Show what this board's agent does: connection, round, budget, receipts, governor, temperature, model.

    It reads files beside the running agent, disturbs it in nothing, and asks no broker. Nothing that it shows
    depends on a record. Exit code 10 if no agent runs here.
    """
    if watch:
        _watch(config, as_json=as_json)
        return
    overview = _look(config)
    typer.echo(_as_json(overview, indent=2) if as_json else "\n".join(lines_of(overview)))
    if not overview.runs:
        raise typer.Exit(ExitCode.CHILD)


def _look(config: Path | None) -> Overview:
    from agent.overview import overview_of
    from agent.profile import open_profile
    from agent.sensors import Sensors
    from agent.settings import on_board

    settings = agent_settings(config)
    return overview_of(on_board(settings, open_profile(settings.profile).profile), Sensors())


def _watch(config: Path | None, *, as_json: bool) -> None:
    """Show what there is until Ctrl-C or SIGTERM, which end it as they are meant to."""
    stop = StopEvent()
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda *_: stop.set())
    if sys.stdout.isatty() and not as_json:
        from rich.console import Console
        from rich.live import Live
        from rich.text import Text

        with Live(console=Console(), auto_refresh=False) as live:
            while not stop.is_set():
                live.update(Text("\n".join(lines_of(_look(config)))), refresh=True)
                stop.wait(_LOOK_S)
        return
    before: Any = None
    while not stop.is_set():
        overview = _look(config)
        changing = line_of(overview)
        if changing != before:
            before = changing
            typer.echo(_as_json(overview) if as_json else f"{_moment(time.time())}  {changing}")
            sys.stdout.flush()
        stop.wait(_LOOK_S)


def line_of(overview: Overview) -> str:
    """What changes when something happens, and not by itself."""
    from agent.overview import awaited

    parts = [_agent(overview), _round(overview)] if overview.status else [_agent(overview)]
    parts += [f"awaits {awaited(overview)}"] if overview.runs else []
    parts += [_account(account) for account in overview.accounts]
    parts += [f"ledger: {overview.problem}"] if overview.problem else []
    return printable("; ".join(parts))


def lines_of(overview: Overview) -> Iterator[str]:
    """A line for each thing worth knowing."""
    for name, text in _rows(overview):
        yield f"{name:12} {printable(text)}"


def _rows(overview: Overview) -> Iterator[tuple[str, str]]:
    from agent.overview import awaited

    yield "agent", _agent(overview)
    if overview.round is not None or (overview.status is not None and overview.status.round is not None):
        yield "round", _round(overview)
    if (known := overview.round) is not None and known.fragments:
        each = ", ".join(f"{number:,} {state}" for state, number in sorted(known.fragments.items()))
        yield "fragments", each
    if overview.runs:
        yield "awaits", f"{awaited(overview)}{_until(overview)}"
    if (at := overview.last_receipt_at) is not None:
        yield "last receipt", _ago(at)
    else:
        yield "last receipt", "none yet"
    for account in overview.accounts:
        yield "budget", _account(account)
    if overview.problem is not None:
        yield "ledger", overview.problem
    yield "governor", _governor(overview)
    readings = overview.readings
    if readings.temperature_c is not None:
        most = overview.highest_temperature_c
        yield "temperature", f"{readings.temperature_c:.0f} °C" + (f", at most {most:g} °C" if most else "")
    if readings.available_mib is not None:
        own = "" if readings.agent_mib is None else f"; the agent takes {readings.agent_mib:,} MiB"
        yield "memory", f"{readings.available_mib:,} MiB are available{own}"
    if overview.model_at is None:
        yield "model", "none yet; it comes when a job is finished"
    else:
        yield "model", f"{overview.model}, of {_ago(overview.model_at)}"


def _agent(overview: Overview) -> str:
    from agent.status import Link
    from dpagent.status_file import Presence

    status = overview.status
    if overview.is_other:
        from agent.status import OF_ANOTHER_VERSION, OTHER_VERSION_REMEDY

        if overview.runs:
            return f"{OF_ANOTHER_VERSION}. {OTHER_VERSION_REMEDY}"
        return "does not run; the last one was of another version"
    match overview.presence:
        case None:
            return (
                "none has run here since the machine was started: `dpagent run`, or `dpagent service status`"
            )
        case Presence.ENDED:
            assert status is not None
            return f"stopped {_moment(status.written_at)}"
        case Presence.KILLED:
            assert status is not None
            return (
                f"does not run: it was killed, or the machine lost power, after {_moment(status.written_at)}"
            )
    assert status is not None
    where = "" if overview.presence is Presence.RUNS else " (in another container, it seems)"
    match status.link:
        case Link.CONNECTED:
            return f"runs, connected to {status.broker}{where}"
        case Link.DISCONNECTED:
            return f"runs, not connected to {status.broker}{where}"
        case _:
            return f"runs, {status.link}{where}"


def _round(overview: Overview) -> str:
    known, announced = overview.round, None if overview.status is None else overview.status.round
    state = "" if known is None else known.state + (f": {known.reason}" if known.reason else "")
    if announced is None:
        return "none is known" if known is None else f"{known.round} of job {known.job[:8]}: {state}"
    if announced.doing == "finished":
        return f"job {announced.job[:8]} ({announced.method}) is finished"
    text = f"{announced.round} of {announced.rounds} of job {announced.job[:8]} ({announced.method})"
    parts = [str(announced.doing)] if overview.runs and announced.doing != "settled" else []
    return f"{text}: {', '.join([*parts, *([state] if state else [])]) or 'known'}"


def _until(overview: Overview) -> str:
    announced = None if overview.status is None else overview.status.round
    if announced is None or announced.until is None or overview.status is None or overview.status.held:
        return ""
    left_s = announced.until - time.time()
    return f", in {lasting(left_s)}" if left_s > 0 else ""


def _account(account: Account) -> str:
    budget = account.epsilon_budget
    if not math.isfinite(account.epsilon_reserved):
        return f"{account.name}: no guarantee: rounds without one have been run on these records"
    spent, reserved = (upwards(each, of=budget) for each in (account.epsilon_spent, account.epsilon_reserved))
    return (
        f"{account.name}: ε = {spent} spent and {reserved} reserved of {plain_bound(budget)}; "
        f"{downwards(account.epsilon_left)} and "
        f"δ = {delta_downwards(account.delta_left)} are left"
    )


def _governor(overview: Overview) -> str:
    status, window = overview.status, overview.window
    if not overview.has_governor:
        return "trains whenever there is a round: no `governor` is set"
    if overview.runs and status is None:
        text = "what it does is not known of an agent of another version"
    elif overview.runs and status is not None and status.held is not None:
        text = f"holds training back: {status.held}"
    elif overview.runs:
        text = "holds nothing back"
    else:
        text = "is not asked: no agent runs"
    if window is None:
        return text
    change = "" if window.changes_in_s is None else lasting(window.changes_in_s)
    if window.is_open:
        return f"{text}; its hours are now" + (f", for {change} more" if change else "")
    return f"{text}; its hours begin in {change}"


def values_of(overview: Overview) -> dict[str, Any]:
    """For scripts."""
    from agent.overview import awaited
    from agent.status import as_values

    return asdict(overview) | {
        "status": None if overview.status is None else as_values(overview.status),
        "runs": overview.runs,
        "awaits": awaited(overview),
        "accounts": [
            asdict(each) | {"epsilon_left": each.epsilon_left, "delta_left": each.delta_left}
            for each in overview.accounts
        ],
    }


def _as_json(overview: Overview, indent: int | None = None) -> str:
    return json.dumps(json_values(values_of(overview)), indent=indent, ensure_ascii=False, allow_nan=False)


def _ago(at: float) -> str:
    passed_s = time.time() - at
    return f"{lasting(passed_s)} ago ({_moment(at)})" if passed_s >= 0 else _moment(at)


def _moment(at: float) -> str:
    return f"{datetime.fromtimestamp(at, UTC):%Y-%m-%d %H:%M:%S} UTC"
