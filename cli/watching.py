"""``dpagent coordinator status --watch``: what a coordinator does, live, or a line for each change."""

from __future__ import annotations

import json
import signal
import sys
import time
from collections.abc import Iterator
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any, Final

import typer

from cli.notation import percent, printable
from cli.stop_event import StopEvent
from dpagent.notation import upwards
from dpagent.wording import counted, lasting

if TYPE_CHECKING:
    from coordinator.settings import CoordinatorSettings

_LOOK_S: Final = 1.0
_IN_A_LINE: Final = frozenset({"coordinator", "database", "job", "round", "trouble"})
_TIMES: Final = frozenset({"at", "seen_at", "seen_s", "began_s", "received", "published", "health"})
"""What changes by itself, or too often to tell of."""


def watch(settings: CoordinatorSettings, job: str | None, *, as_json: bool) -> None:
    """Show what there is until Ctrl-C or SIGTERM, which end it as they are meant to.

    Args:
        settings: ``fleet.yaml``.
        job: that is shown; by default the one that goes on.
        as_json: whether each change is an object in a line.
    """
    from coordinator.page.view import View

    view = View(settings)
    stop = StopEvent()
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda *_: stop.set())
    if sys.stdout.isatty() and not as_json:
        from rich.console import Console
        from rich.live import Live
        from rich.text import Text

        with Live(console=Console(), auto_refresh=False) as live:
            while not stop.is_set():
                live.update(Text("\n".join(lines_of(view.state(), job))), refresh=True)
                stop.wait(_LOOK_S)
        return
    before: Any = None
    while not stop.is_set():
        state = view.state()
        now = _without_times(state)
        if now != before:
            before = now
            typer.echo(json.dumps(state, ensure_ascii=False) if as_json else _line(state, job))
            sys.stdout.flush()
        stop.wait(_LOOK_S)


def lines_of(state: dict[str, Any], job: str | None) -> Iterator[str]:
    """A line for each thing worth knowing.

    Args:
        state: of :meth:`coordinator.page.view.View.state`.
        job: that is shown; by default the one that goes on.
    """
    for name, text in _rows(state, job):
        yield f"{name:12} {printable(text)}"


def _line(state: dict[str, Any], job: str | None) -> str:
    parts = [text for name, text in _rows(state, job) if name in _IN_A_LINE]
    return f"{datetime.now(UTC):%Y-%m-%d %H:%M:%S} UTC  {printable(' '.join(parts))}"


def _rows(state: dict[str, Any], job: str | None) -> Iterator[tuple[str, str]]:
    yield "coordinator", state["coordinator"]["words"]
    if state["problem"]:
        yield "database", state["problem"]
    shown = next((each for each in state["jobs"] if each["name"] == (job or state["current"])), None)
    if shown is None:
        if not state["problem"]:
            yield "job", "There is no job yet. `dpagent coordinator job add FILE` adds one."
    else:
        yield "job", _job(shown)
        if shown["trouble"]:
            yield "trouble", shown["trouble"]
        current = state["open"]
        if current is not None and current["job"] == shown["name"]:
            yield "round", _round(current)
            if (who := current["participation"]) is not None and who["dead_end"]:
                yield "trouble", f"{who['dead_end']}."
            if found := current["counters"]["rejected"]:
                yield "rejected", ", ".join(f"{each['reason']} {each['count']:,}" for each in found)
        if state["workers"] is not None:
            yield "workers", _workers(state["workers"])
        others = [each["name"] for each in state["jobs"] if not each["is_over"] and each is not shown]
        if others:
            yield "queue", f"then {', '.join(others)}"
    for each in state["health"]:
        if each["verdict"] != "ok":
            yield each["check"], f"{each['text']}. {each['remedy']}"


def _job(shown: dict[str, Any]) -> str:
    text = (
        f"{shown['name']}: {shown['words']}, {shown['closed']} of {counted(shown['rounds'], 'round')} closed"
    )
    if shown["accuracy"] is not None:
        text += f", accuracy {percent(shown['accuracy'])}"
    if shown["epsilon_target"] is None:
        return f"{text}, no guarantee."
    return f"{text}, ε = {upwards(shown['epsilon_spent'])} of {upwards(shown['epsilon_target'])}."


def _round(current: dict[str, Any]) -> str:
    left_s = current["deadline"] - time.time()
    end = f"closes in {lasting(left_s)} at the latest" if left_s > 0 else "its deadline is over"
    who = f"{counted(current['least'], 'board')} or more in every block, of {current['devices']:,}"
    if current["participation"] is not None:
        who = current["participation"]["words"]
    return (
        f"{current['round']} of {current['rounds']} is open: {current['counted']:,} of "
        f"{counted(current['expected'], 'fragment')}; {who}; {end}."
    )


def _workers(workers: list[dict[str, Any]]) -> str:
    counting = [each for each in workers if each["counts"]]
    if not counting:
        return "none counts fragments: start `dpagent coordinator worker`, on any machine."
    names = ", ".join(f"{each['name']} ({counted(each['fragments'], 'fragment')})" for each in counting)
    return f"{counted(len(counting), 'worker')}: {names}."


def _without_times(values: Any) -> Any:
    if isinstance(values, dict):
        return {key: _without_times(value) for key, value in values.items() if key not in _TIMES}
    return [_without_times(each) for each in values] if isinstance(values, list) else values
