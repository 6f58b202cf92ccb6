"""The page of a sweep: its settings side by side, and what looking at them costs."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean
from typing import Any, Final

from matplotlib.figure import Figure
from matplotlib.ticker import PercentFormatter

from dpagent.notation import plain_bound, upwards
from dpagent.wording import counted
from simulation.comparison import scope_in_words
from simulation.report.drawing import COLOURS, DEVICE_COLOURS, Picture, draw_picture, line, round_axis
from simulation.report.notation import duration, percent, size
from simulation.report.rendering import render, write_page
from simulation.sweep.file import setting_in_words
from simulation.sweep.price import ScopePrice
from simulation.sweep.ranking import Ranked

_CURVES: Final = 6
_ROWS_SHOWN: Final = 30
_NO_BOUND: Final = "no bound"


@dataclass(frozen=True, slots=True)
class SweepReport:
    """All that a page shows.

    Attributes:
        name: of the sweep's file.
        records: ``public`` or ``private``.
        settings: the best first; at least one.
        runs: that are done.
        wanted: runs in all.
        prices: of the sweep, if the records are private.
        directory: of the sweep, as a command line names it.
    """

    name: str
    records: str
    settings: Sequence[Ranked]
    runs: int
    wanted: int
    prices: Sequence[ScopePrice]
    directory: str

    @property
    def best(self) -> Ranked:
        """The setting with the greatest mean accuracy."""
        return self.settings[0]

    @property
    def job_command(self) -> str:
        """What puts the best setting on a fleet."""
        return f"dpagent sweep job {self.directory} --output {Path(self.name).stem}-job.yaml --add"

    def _shown(self, results: dict[str, Any]) -> dict[str, Any]:
        """A run's results; of private records without remarks on them, for which no ε is paid."""
        return results if self.records == "public" else {**results, "minds": []}

    def as_json(self) -> dict[str, Any]:
        """For scripts."""
        return {
            "sweep": self.name,
            "records": self.records,
            "owed": self.records == "private",
            "price": [each.as_dict() for each in self.prices],
            "runs": {"done": self.runs, "wanted": self.wanted},
            "best": self.best.number,
            "settings": [
                {
                    "setting": each.number,
                    "varied": dict(each.varied),
                    "accuracy": each.accuracy,
                    "standard_error": each.error,
                    "accuracy_history": each.history,
                    "runs": [
                        {
                            "run": outcome.run.number,
                            "seed": outcome.run.request.seed,
                            "seconds": outcome.seconds,
                            "results": self._shown(outcome.results),
                        }
                        for outcome in each.outcomes
                    ],
                }
                for each in self.settings
            ],
            "put_on_a_fleet": self.job_command,
        }


def write_sweep_page(report: SweepReport, directory: Path) -> Path:
    """Write the page; see :func:`~simulation.report.rendering.write_page`."""
    return write_page(render_sweep(report), directory)


def render_sweep(report: SweepReport) -> str:
    """The page as text."""
    first = report.best.outcomes[0].results
    varied = [*report.best.varied]
    return render(
        "sweep.html.j2",
        report=report,
        best=setting_in_words(report.best.varied),
        accuracy=percent(report.best.accuracy),
        error="" if report.best.error is None else percent(report.best.error),
        near=_near(report),
        data=first["dataset"],
        devices=_devices(report),
        settings=counted(len(report.settings), "setting"),
        runs=counted(report.runs, "run"),
        seeds=counted(len(report.best.outcomes), "seed"),
        header=[*varied, "accuracy", "± error", "ε a run", "signal/noise", "bytes up", "time"],
        rows=[[str(each.number), *_row(each, varied)] for each in report.settings[:_ROWS_SHOWN]],
        left_out=max(len(report.settings) - _ROWS_SHOWN, 0),
        prices=[_price_row(each) for each in report.prices],
        majority=percent(first["guessing_accuracy"]),
        pictures=[_ranking_picture(report), *_value_pictures(report), _curves_picture(report)],
    )  # fmt: skip


def _near(report: SweepReport) -> int:
    """How many other settings are within two standard errors of the best."""
    best = report.best
    if best.error is None:
        return 0
    return sum(
        best.accuracy - each.accuracy <= 2 * math.hypot(best.error, each.error or 0.0)
        for each in report.settings[1:]
    )


def _devices(report: SweepReport) -> str:
    numbers = sorted({each.outcomes[0].results["devices"] for each in report.settings})
    shown = [counted(number, "virtual device") for number in numbers]
    return shown[0] if len(shown) == 1 else f"{numbers[0]:,} to {shown[-1]}"


def _row(setting: Ranked, varied: Sequence[str]) -> list[str]:
    results = setting.outcomes[0].results
    return [
        *(_shown(setting.varied[key]) for key in varied),
        percent(setting.accuracy),
        "–" if setting.error is None else percent(setting.error),
        upwards(max(results["privacy"]["epsilon_spent"], default=0.0)),
        f"{results['outlook']['signal_to_noise']:.2g}",
        size(results["bytes_per_device_round"]["up"]),
        duration(fmean(each.seconds for each in setting.outcomes)),
    ]


def _price_row(price: ScopePrice) -> dict[str, Any]:
    return {
        "scope": scope_in_words(price.scope),
        "all": upwards(price.epsilon) if math.isfinite(price.epsilon) else _NO_BOUND,
        "delta": plain_bound(price.delta),
        "best": [(law, upwards(epsilon)) for law, epsilon in price.best_alone.items()],
    }


def _shown(value: object) -> str:
    return (
        f"{value:g}" if isinstance(value, float) else f"{value:,}" if isinstance(value, int) else str(value)
    )


def _ranking_picture(report: SweepReport) -> Picture:
    shown = [each for each in report.settings if not math.isnan(each.accuracy)][:_ROWS_SHOWN]
    if not shown:
        return Picture("ranking", "Accuracy was not measured", "There were no test records.")
    title = f"{setting_in_words(shown[0].varied)}: {percent(shown[0].accuracy)}"
    caption = "Test accuracy of the final model: a dot is a run, a bar the mean of a setting."
    note = (
        "The best of many noisy results is partly luck: a new run of that setting tends to be a little worse."
    )

    def draw(figure: Figure) -> None:
        axes = figure.add_subplot()
        for row, setting in enumerate(shown):
            colour = COLOURS["blue" if row == 0 else "stone"]
            values = [each.accuracy for each in setting.outcomes]
            axes.plot([setting.accuracy] * 2, [row - 0.32, row + 0.32], color=colour, linewidth=2.2)
            axes.scatter(values, [row] * len(values), s=16, color=colour, alpha=0.75, linewidth=0, zorder=3)
        axes.set_yticks(range(len(shown)), labels=[setting_in_words(each.varied) for each in shown])
        axes.set_ylim(len(shown) - 0.5, -0.5)
        axes.xaxis.set_major_formatter(PercentFormatter(1.0, decimals=0))
        axes.set_xlabel("test accuracy")
        axes.grid(axis="x")
        axes.tick_params(axis="y", length=0)
        axes.spines["left"].set_visible(False)

    return draw_picture("ranking", title, caption, note, 1.0 + 0.24 * len(shown), draw)


def _value_pictures(report: SweepReport) -> list[Picture]:
    """One picture with a panel for each thing that was varied, if there are two or more."""
    keys = [key for key in report.best.varied if len({each.varied[key] for each in report.settings}) > 1]
    if len(keys) < 2:
        return []
    title = "What each value does, the others being what they are"
    caption = "Mean accuracy of each setting by one of its values; the line joins the best setting of each."
    note = "A line that is flat next to the spread of its dots says that the value matters little here."

    def draw(figure: Figure) -> None:
        panels = figure.subplots(1, len(keys), sharey=True, squeeze=False)[0]
        for axes, key in zip(panels, keys, strict=True):
            values = list(dict.fromkeys(each.varied[key] for each in sorted(report.settings, key=_number)))
            if all(isinstance(value, (int, float)) for value in values):
                values.sort()
            best = []
            for place, value in enumerate(values):
                found = [each.accuracy for each in report.settings if each.varied[key] == value]
                axes.scatter(
                    [place] * len(found), found, s=16, color=COLOURS["stone"], alpha=0.7, linewidth=0
                )
                best.append(max(found))
            axes.plot(range(len(values)), best, color=COLOURS["blue"], linewidth=1.8, zorder=3)
            axes.set_xticks(range(len(values)), labels=[_shown(value) for value in values])
            axes.set_xlim(-0.5, len(values) - 0.5)
            axes.set_xlabel(key)
            axes.grid(axis="y")
        panels[0].yaxis.set_major_formatter(PercentFormatter(1.0, decimals=0))
        panels[0].set_ylabel("test accuracy")

    return [draw_picture("values", title, caption, note, 2.6, draw)]


def _number(setting: Ranked) -> int:
    return setting.number


def _curves_picture(report: SweepReport) -> Picture:
    shown = [each for each in report.settings if each.history][:_CURVES]
    if not shown:
        return Picture("curves", "Accuracy was not measured", "There were no test records.")
    title = f"The {'best setting' if len(shown) == 1 else f'{len(shown)} best settings'}, round by round"
    caption = "Test accuracy after each round, mean over the seeds."

    def draw(figure: Figure) -> None:
        axes = figure.add_subplot()
        for setting, colour in zip(shown, itertools.cycle(DEVICE_COLOURS), strict=False):
            line(axes, range(1, len(setting.history) + 1), setting.history, colour, 1.8)
        handles = [
            (COLOURS[colour], setting_in_words(setting.varied))
            for setting, colour in zip(shown, itertools.cycle(DEVICE_COLOURS), strict=False)
        ]
        for colour, label in handles:
            axes.plot([], [], color=colour, linewidth=1.8, label=label)
        axes.legend(loc="best", fontsize=8.5, frameon=True, framealpha=0.85, edgecolor="none")
        round_axis(axes, max(len(each.history) for each in shown))
        axes.yaxis.set_major_formatter(PercentFormatter(1.0, decimals=0))
        axes.set_ylabel("test accuracy")
        axes.grid(axis="y")

    return draw_picture("curves", title, caption, "", 3.2, draw)
