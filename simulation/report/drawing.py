"""The common base of the pictures: colours, style, and conversion for an HTML page.

matplotlib is used through its ``Figure`` object, never through pyplot's global state. Its colours
come out as CSS variables, so that the pictures follow the reader's light or dark mode.
"""

from __future__ import annotations

import io
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Final

import matplotlib
from markupsafe import Markup
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

#: Name of the CSS variable: colour in light mode, and where the variable is unknown. The hues are
#: Okabe and Ito's (2008), distinct for colour-blind readers, darkened where white is behind them.
COLOURS: Final = {
    "ink": "#4c5560",
    "grid": "#dfe3e8",
    "stone": "#7a828c",
    "blue": "#0072b2",
    "orange": "#d55e00",
    "green": "#009e73",
    "purple": "#b0578d",
    "amber": "#b87f00",
    "sky": "#3d9fdc",
    "left": "#c3d9e8",
}
DEVICE_COLOURS: Final = ("blue", "orange", "green", "purple", "amber", "sky")
#: The same hues, lightened for a dark page.
DARK_COLOURS: Final = {
    "ink": "#c3cbd4",
    "grid": "#2d353e",
    "stone": "#8f99a4",
    "blue": "#58b4ea",
    "orange": "#f08a4b",
    "green": "#35c493",
    "purple": "#d796c1",
    "amber": "#dcab3c",
    "sky": "#9ad3f7",
    "left": "#2f4a5e",
}

_WIDTH_IN: Final = 9.6
_STYLE: Final[dict[Any, Any]] = {
    "svg.fonttype": "none",
    "path.simplify": False,
    "font.size": 9.0,
    "text.color": COLOURS["ink"],
    "axes.edgecolor": COLOURS["stone"],
    "axes.facecolor": "none",
    "axes.labelcolor": COLOURS["ink"],
    "axes.linewidth": 0.7,
    "axes.titlelocation": "left",
    "axes.titlesize": 9.5,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.axisbelow": True,
    "grid.color": COLOURS["grid"],
    "grid.linewidth": 0.7,
    "xtick.color": COLOURS["stone"],
    "ytick.color": COLOURS["stone"],
    "xtick.labelcolor": COLOURS["ink"],
    "ytick.labelcolor": COLOURS["ink"],
    "figure.facecolor": "none",
    "figure.constrained_layout.h_pad": 0.06,
    "figure.constrained_layout.w_pad": 0.06,
}


@dataclass(frozen=True, slots=True)
class Picture:
    """A picture and its text. ``svg`` is None where there is nothing to draw."""

    key: str
    title: str
    caption: str
    note: str = ""
    svg: Markup | None = None


def draw_picture(
    key: str, title: str, caption: str, note: str, height_in: float, draw: Callable[[Figure], None]
) -> Picture:
    """The picture that ``draw`` makes in an empty figure."""
    buffer = io.StringIO()
    with matplotlib.rc_context():
        # Not the reader's own style: the same record gives the same picture.
        matplotlib.rcdefaults()
        matplotlib.rcParams.update(_STYLE)
        figure = Figure(figsize=(_WIDTH_IN, height_in), layout="constrained")
        draw(figure)
        nothing = dict.fromkeys(("Date", "Creator", "Format", "Type"))
        figure.savefig(buffer, format="svg", metadata=nothing)
    return Picture(key, title, caption, note, _for_page(buffer.getvalue(), key, f"{title}. {caption}"))


def _for_page(svg: str, key: str, label: str) -> Markup:
    """matplotlib's SVG file as an element fit to stand in an HTML page beside others."""
    text = svg[svg.index("<svg") :]
    text = re.sub(r"<style.*?</style>", "", text, flags=re.DOTALL)
    # In a page, names are shared with the other pictures, and matplotlib's differ from run to run:
    # number those that are referred to, and drop the rest.
    used = re.findall(r'(?:href="#|url\(#)([^")]+)', text)
    number = {name: f"{key}-{place}" for place, name in enumerate(dict.fromkeys(used), start=1)}
    text = re.sub(r' id="([^"]*)"', lambda m: f' id="{number[m[1]]}"' if m[1] in number else "", text)
    text = re.sub(r'xlink:href="#([^"]+)"', lambda m: f'href="#{number[m[1]]}"', text)
    text = re.sub(r"url\(#([^)]+)\)", lambda m: f"url(#{number[m[1]]})", text)
    text = re.sub(r" font-family: [^;\"]*;", "", text)
    for name, colour in COLOURS.items():
        text = text.replace(colour, f"var(--{name}, {colour})")
    view_box = re.search(r'viewBox="[^"]*"', text)
    if view_box is None:
        raise ValueError("matplotlib wrote an SVG without a viewBox.")
    opening = Markup('<svg {} role="img" aria-label="{}">').format(Markup(view_box[0]), label)
    return opening + Markup(text[text.index(">") + 1 :])


def round_axis(axes: Axes, rounds: int) -> None:
    """Let x be the round, from 1, with ticks at multiples of 1, 2 or 5 times a power of ten."""
    axes.set_xlim(0.4, rounds + 0.6)
    axes.xaxis.set_major_locator(MaxNLocator(nbins=7, steps=[1, 2, 5, 10], integer=True, min_n_ticks=1))
    axes.set_xlabel("round")


def line(
    axes: Axes,
    rounds: Sequence[int],
    values: Sequence[float],
    colour: str,
    width: float,
    *,
    dashed: bool = False,
) -> None:
    """A value for each of the first of some rounds; the points are marked while there are few."""
    axes.plot(
        rounds[: len(values)],
        values,
        color=COLOURS[colour],
        linewidth=width,
        linestyle=(0, (4, 2)) if dashed else "-",
        marker="o" if len(values) <= 40 else "",
        markersize=1.75 * width,
        zorder=2 if dashed else 3,
    )
