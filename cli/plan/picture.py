"""The comparison as a picture: noise by round and ε by round, a line for each schedule.

Only this module imports matplotlib, from the ``demo`` extra, and uses its ``Figure`` object.
"""

from __future__ import annotations

import io
import itertools
import os
import textwrap
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Final

from cli.notation import factor
from cli.notation import figure as digits
from cli.plan.comparison import Candidate, Comparison
from cli.plan.page import setting, verdict
from dpagent import __version__
from dpagent.extras import extra_needed
from dpagent.notation import plain_bound, upwards
from dpagent.wording import counted

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

#: Distinct for colour-blind readers (Okabe and Ito, 2008), on white.
_COLOURS: Final = {"uniform": "#7a828c", "incrementing": "#0072b2", "linear": "#d55e00", "custom": "#b0578d"}
_INK: Final = "#30363d"
_PALE: Final = "#dfe3e8"
_SIZE_IN: Final = (10.0, 5.4)
_LINE_CHARACTERS: Final = 140
_LABEL_HEIGHT: Final = 0.14  # of a name and its figures, of the axis
_TICKS: Final = 5
_FEW_ROUNDS: Final = 40
_STYLE: Final[dict[Any, Any]] = {
    "svg.fonttype": "none",  # text stays text: it can be searched, and read aloud
    "svg.hashsalt": "dpagent",  # equal plans give equal files
    "font.size": 9.5,
    "text.color": _INK,
    "axes.labelcolor": _INK,
    "xtick.color": _INK,
    "ytick.color": _INK,
}


def draw(comparison: Comparison, suffix: str) -> bytes:
    """A file of the type that ``suffix`` names, ``.svg`` or ``.png``.

    Raises:
        ConfigurationError: matplotlib is not installed.
    """
    os.environ["MPLBACKEND"] = "agg"  # unused, but matplotlib refuses an invalid one
    with extra_needed("demo", "`--picture`"):
        import matplotlib
        from matplotlib.figure import Figure
    with matplotlib.rc_context():
        # Ignore the user's own style: the same plan gives the same picture.
        matplotlib.rcdefaults()
        matplotlib.rcParams.update(_STYLE)
        figure = Figure(figsize=_SIZE_IN)
        _words(figure, comparison)
        left, right = figure.subplots(1, 2)
        figure.subplots_adjust(left=0.05, right=0.885, top=0.74, bottom=0.245, wspace=0.48)
        _noise(left, comparison)
        _spending(right, comparison)
        buffer = io.BytesIO()
        kind = suffix.removeprefix(".")
        nothing: dict[str, Any] = {"Date": None} if kind == "svg" else {}
        figure.savefig(buffer, format=kind, dpi=150, metadata=nothing | {"Title": _title(comparison)})
    return buffer.getvalue()


def _title(comparison: Comparison) -> str:
    target = comparison.target
    rounds = counted(target.rounds, "round") + (" need" if target.rounds > 1 else " needs")
    return (
        f"How much noise {rounds} to cost each {comparison.statement.unit} at most "
        f"ε = {plain_bound(target.epsilon)} (δ = {plain_bound(target.delta)})"
    )


def _words(figure: Figure, comparison: Comparison) -> None:
    statement, target = comparison.statement, comparison.target
    scope = (
        f"Unit: {statement.unit.meaning}. Adjacency: {statement.adjacency}. "
        f"Trusted: {statement.trust.meaning}."
    )
    figure.text(0.02, 0.955, _title(comparison), fontsize=14, fontweight="bold", va="center")
    below = [*textwrap.wrap(scope, _LINE_CHARACTERS), *textwrap.wrap(setting(comparison), _LINE_CHARACTERS)]
    figure.text(0.02, 0.905, "\n".join(below), va="top", linespacing=1.4)
    notes = (
        f"{verdict(comparison)}\n"
        "σ: the noise’s standard deviation divided by the sensitivity of the sum.\n"
        f"ε: {'the models' if target.sums_updates else 'a device’s messages'} change an attacker’s odds "
        f"about a {statement.unit} at most "
        f"{factor(comparison.target.epsilon)}-fold (e^ε), apart from δ. dpagent {__version__}"
    )
    figure.text(0.02, 0.075, notes, fontsize=8.5, va="center", linespacing=1.5)


def _noise(axes: Axes, comparison: Comparison) -> None:
    axes.set_title("noise multiplier σ in each round", loc="left", fontsize=10.5)
    lines = [(candidate, candidate.plan.noise_multipliers) for candidate in comparison.candidates]
    _draw_lines(axes, comparison, lines)
    top = 1.08 * max(max(values) for _, values in lines)
    axes.set_ylim(0, top)
    for (candidate, values), height in zip(lines, _apart([v[-1] / top for _, v in lines]), strict=True):
        first, last = digits(values[0], 3), digits(values[-1], 3)
        figures = first if first == last else f"{first} to {last}"
        _label(axes, f"{candidate.name}\n{figures}", candidate, at=height)


def _apart(heights: Sequence[float]) -> list[float]:
    """Heights of labels next to ends of lines, as fractions of the axis: moved until none touch."""
    order = sorted(range(len(heights)), key=lambda place: (heights[place], -place))
    placed = list(heights)
    for below, place in itertools.pairwise(order):
        placed[place] = max(placed[place], placed[below] + _LABEL_HEIGHT)
    # Move back down by the average shift, within the axis.
    moved = sum(placed) / len(placed) - sum(heights) / len(heights)
    moved = min(max(moved, max(placed) - 0.9), min(placed) - 0.05)
    return [height - moved for height in placed]


def _spending(axes: Axes, comparison: Comparison) -> None:
    axes.set_title("ε spent after each round", loc="left", fontsize=10.5)
    lines = [(candidate, candidate.plan.epsilon_by_round) for candidate in comparison.candidates]
    _draw_lines(axes, comparison, lines)
    target, rounds = comparison.target.epsilon, comparison.target.rounds
    top = 1.12 * target
    axes.set_ylim(0, top)
    axes.axhline(target, color=_INK, linewidth=0.8, linestyle=(0, (4, 3)))
    axes.annotate(
        f"target ε = {plain_bound(target)}", (0.02, target), xycoords=("axes fraction", "data"),
        xytext=(0, 4), textcoords="offset points",
    )  # fmt: skip
    if rounds < 2:
        return
    # All lines end at the target: half-way their labels tell them apart, in the lines' order.
    half = -(-rounds // 2)
    axes.axvline(half, color=_PALE, linewidth=1.2, zorder=1)
    heights = _apart([values[half - 1] / top for _, values in lines])
    for (candidate, values), height in zip(lines, heights, strict=True):
        axes.plot([half], [values[half - 1]], "o", color=_COLOURS[candidate.name], markersize=4.5, zorder=4)
        _label(axes, f"{candidate.name}\n{upwards(values[half - 1], 2)}", candidate, at=height)
    above = max(heights) + 0.6 * _LABEL_HEIGHT
    axes.text(1.03, above, f"at round {half:,}:", fontsize=9, transform=axes.transAxes)


def _draw_lines(
    axes: Axes, comparison: Comparison, lines: Sequence[tuple[Candidate, Sequence[float]]]
) -> None:
    rounds = comparison.target.rounds
    for candidate, values in lines:
        axes.plot(
            range(1, rounds + 1),
            values,
            color=_COLOURS[candidate.name],
            linewidth=2.6 if candidate.chosen else 1.4,
            marker="o" if rounds <= _FEW_ROUNDS else "",
            markersize=4 if candidate.chosen else 3,
            zorder=3 if candidate.chosen else 2,
            label=candidate.name,
        )
    axes.set_xlim(1 - 0.02 * rounds, 1.02 * rounds)
    gaps = rounds - 1 if rounds <= 2 * _TICKS else _TICKS
    axes.set_xticks(sorted({1 + round(place * (rounds - 1) / max(gaps, 1)) for place in range(gaps + 1)}))
    axes.set_xlabel("round")
    axes.grid(axis="y", color=_PALE, linewidth=0.7)
    axes.set_axisbelow(True)
    axes.spines[["top", "right"]].set_visible(False)
    axes.spines[["left", "bottom"]].set_color(_PALE)
    axes.tick_params(length=0)


def _label(axes: Axes, text: str, candidate: Candidate, *, at: float) -> None:
    """A label next to the axes, clear of the lines."""
    axes.text(
        1.03, at, text, transform=axes.transAxes, va="center", color=_COLOURS[candidate.name],
        linespacing=1.3, fontweight="bold" if candidate.chosen else "normal", fontsize=9,
    )  # fmt: skip
