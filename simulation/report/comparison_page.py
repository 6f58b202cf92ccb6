"""The page that puts the runs of several methods side by side."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Final

from matplotlib.figure import Figure
from matplotlib.ticker import PercentFormatter

from dpagent.notation import plain_bound, upwards
from dpagent.privacy.methods import method_named
from dpagent.wording import counted
from simulation.comparison import bounds_of, scope_in_words, scopes_of
from simulation.record import RunRecord
from simulation.report.drawing import COLOURS, Picture, draw_picture, line, round_axis
from simulation.report.notation import percent, size
from simulation.report.rendering import name_of, render, write_page
from simulation.report.trust_picture import trust_picture

_COLOURS: Final = ("blue", "orange", "green", "purple", "amber", "sky")
_NO_BOUND: Final = "no bound"


def write_comparison(records: Mapping[str, RunRecord], pages: Mapping[str, Path], directory: Path) -> Path:
    """Write the page; see :func:`~simulation.report.rendering.write_page`.

    Args:
        records: the runs by method, at least one.
        pages: their own reports.
        directory: of the page.
    """
    return write_page(render_comparison(records, pages, directory), directory)


def render_comparison(records: Mapping[str, RunRecord], pages: Mapping[str, Path], directory: Path) -> str:
    """The page as text."""
    first = next(iter(records.values()))
    return render(
        "comparison.html.j2",
        methods=list(records),
        rows=comparison_rows(list(records.values())),
        pages={method: name_of(page, directory) for method, page in pages.items()},
        data=first.settings.data.name,
        devices=counted(first.settings.devices, "device"),
        alarms=[
            f"{method}: {sentence}" for method, record in records.items() for sentence in record.cautions
        ],
        picture=_accuracy_picture(records),
        trust=[_trust_picture(method, record) for method, record in records.items()],
    )


def comparison_rows(records: Sequence[RunRecord]) -> list[list[str]]:
    """The table of page and terminal: a name, then a cell for each run."""

    def row(name: str, *cells: str) -> list[str]:
        return [name, *cells]

    scopes = scopes_of(records)
    bounds = zip(*(bounds_of(each, scopes) for each in records), strict=True)
    return [
        row("accuracy", *(percent(each.accuracy) for each in records)),
        row("without noise", *(percent(each.baseline_accuracy) for each in records)),
        *(
            row(scope_in_words(scope), *(_NO_BOUND if each is None else upwards(each) for each in found))
            for scope, found in zip(scopes, bounds, strict=True)
        ),
        row("δ", *(plain_bound(each.settings.delta) for each in records)),
        row("bytes up, a device and round", *(size(each.bytes_up) for each in records)),
        row("bytes down", *(size(each.bytes_down) for each in records)),
        row("rounds", *(f"{len(each.epsilon_spent):,}" for each in records)),
        row("model", *(each.model for each in records)),
        row("parameters", *(f"{each.parameters:,}" for each in records)),
    ]


def _trust_picture(method: str, record: RunRecord) -> Picture:
    mechanism, is_mixed = record.settings.mechanism, record.settings.mixer
    return trust_picture(
        method_named(method), mechanism, f"trust-{method}",
        is_mixed=is_mixed, has_device_noise=record.settings.device_noise is not None,
    )  # fmt: skip


def label_heights(values: Sequence[float], least: float) -> list[float]:
    """The values, those too near the next lower one moved up: labels of lines that end together."""
    places = list(values)
    for lower, upper in itertools.pairwise(sorted(range(len(places)), key=places.__getitem__)):
        places[upper] = max(places[upper], places[lower] + least)
    return places


def _accuracy_picture(records: Mapping[str, RunRecord]) -> Picture:
    measured = {method: record for method, record in records.items() if record.accuracy_history}
    if not measured:
        return Picture("comparison", "Accuracy was not measured", "There were no test data.")
    best = max(measured, key=lambda method: measured[method].accuracy)
    title = f"{best} ends highest, at {percent(records[best].accuracy)}"
    caption = "Test accuracy after each round, on the same test records."
    note = (
        "One run each, with each method's own settings: another run would differ by a point or two. ε of "
        "different methods may bound different things; the table says what."
    )

    def draw(figure: Figure) -> None:
        axes = figure.add_subplot()
        histories = [record.accuracy_history for record in measured.values()]
        spread = max(map(max, histories)) - min(map(min, histories))
        heights = label_heights([history[-1] for history in histories], spread / 14)
        for (method, record), height, colour in zip(
            measured.items(), heights, itertools.cycle(_COLOURS), strict=False
        ):
            line(axes, record.numbers, record.accuracy_history, colour, 2)
            axes.annotate(
                f"{method} {percent(record.accuracy)}", (record.last_round, height), xytext=(9, 0),
                textcoords="offset points", va="center", color=COLOURS[colour], fontweight="bold",
                annotation_clip=False,
            )  # fmt: skip
        round_axis(axes, max(max(record.settings.rounds for record in records.values()), 1))
        axes.yaxis.set_major_formatter(PercentFormatter(1.0, decimals=0))
        axes.set_ylabel("test accuracy")
        axes.grid(axis="y")

    return draw_picture("comparison", title, caption, note, 3.2, draw)
