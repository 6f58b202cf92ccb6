"""Figures as pictures: SVG files in ``docs/methods/``, which the benchmark writes that measures them."""

from __future__ import annotations

import io
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from benchmarks.programs import ROOT
from dpagent.storage import write_atomically

METHODS: Final = ROOT / "docs" / "methods"

# Distinct for colour-blind readers (Okabe and Ito, 2008), on white.
_COLOURS: Final = ("#7a828c", "#0072b2", "#d55e00", "#009e73", "#b0578d", "#e69f00")
_MARKERS: Final = ("o", "s", "^", "D", "v", "P")
_INK: Final = "#30363d"
_PALE: Final = "#dfe3e8"
_PANEL_IN: Final = (3.2, 2.6)
_HEAD_IN: Final = 0.9
_STYLE: Final[dict[Any, Any]] = {
    "svg.fonttype": "none",  # text stays text: it can be searched, and read aloud
    "svg.hashsalt": "dpagent",  # equal figures give equal files
    "font.size": 9,
    "text.color": _INK,
    "axes.labelcolor": _INK,
    "axes.edgecolor": _PALE,
    "xtick.color": _INK,
    "ytick.color": _INK,
}


@dataclass(frozen=True, slots=True)
class Point:
    """A measured point, with its standard error."""

    x: float
    y: float
    error: float


@dataclass(frozen=True, slots=True)
class Panel:
    """A panel of a picture.

    Attributes:
        title: above it.
        lines: by name; names mean the same in all panels.
        level: of a line that points are compared with, and its name.
        logarithmic: whether the horizontal axis is.
    """

    title: str
    lines: Mapping[str, Sequence[Point]]
    level: tuple[str, float] | None = None
    logarithmic: bool = True


def draw(file: Path, title: str, rows: Sequence[Sequence[Panel]], *, x: str, y: str) -> None:
    """Write a picture of panels in rows, each with lines and error bars.

    Args:
        file: an SVG file.
        title: of the picture.
        rows: of panels, all of one length.
        x: what the horizontal axes show, with the unit.
        y: what the vertical axes show, with the unit.

    Raises:
        StorageError: it cannot be written.
    """
    import matplotlib
    from matplotlib.figure import Figure
    from matplotlib.ticker import NullLocator, ScalarFormatter

    names = list(dict.fromkeys(name for row in rows for panel in row for name in panel.lines))
    width, height = _PANEL_IN
    with matplotlib.rc_context():
        matplotlib.rcdefaults()
        matplotlib.rcParams.update(_STYLE)
        figure = Figure(figsize=(width * len(rows[0]), _HEAD_IN + height * len(rows)), layout="constrained")
        figure.suptitle(title, fontsize=11, fontweight="bold", x=0.01, ha="left")
        axes = figure.subplots(len(rows), len(rows[0]), squeeze=False)
        for row, panels in zip(axes, rows, strict=True):
            for place, (axis, panel) in enumerate(zip(row, panels, strict=True)):
                axis.set_title(panel.title, fontsize=9, loc="left")
                axis.grid(color=_PALE, linewidth=0.6)
                axis.set_axisbelow(True)
                axis.spines[["top", "right"]].set_visible(False)
                if panel.level is not None:
                    name, level = panel.level
                    axis.axhline(level, color=_INK, linewidth=0.8, linestyle=":", label=name)
                for name, points in panel.lines.items():
                    number = names.index(name)
                    axis.errorbar(
                        [point.x for point in points], [point.y for point in points],
                        [point.error for point in points], label=name, color=_COLOURS[number],
                        marker=_MARKERS[number], markersize=4, linewidth=1.2, capsize=2,
                    )  # fmt: skip
                if panel.logarithmic:
                    axis.set_xscale("log")
                places = sorted({point.x for points in panel.lines.values() for point in points})
                axis.set_xticks(places)
                axis.xaxis.set_major_formatter(ScalarFormatter())
                axis.xaxis.set_minor_locator(NullLocator())
                axis.set_xlabel(x)
                if place == 0:
                    axis.set_ylabel(y)
        by_name = {
            label: handle
            for axis in axes.flat
            for handle, label in zip(*axis.get_legend_handles_labels(), strict=True)
        }
        # Of the longest names, four fit below three panels.
        columns = min(len(by_name), 4 * len(rows[0]) // 3)
        figure.legend(
            list(by_name.values()), list(by_name), loc="outside lower left", ncols=columns, frameon=False
        )
        drawn = io.BytesIO()
        figure.savefig(drawn, format="svg", metadata={"Date": None, "Creator": None})
    write_atomically(file, drawn.getvalue())
