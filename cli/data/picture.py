"""Some records of each class as a picture, for the owner of the data: it shows private records.

A row a class. Images are shown as they are, series as lines, records of a table as a histogram of each
column. matplotlib is used through its ``Figure`` object and imported here only; it comes with the ``demo``
extra.
"""

from __future__ import annotations

import io
import os
from typing import TYPE_CHECKING, Any, Final

import numpy as np
from numpy.typing import NDArray

from dpagent.errors import DataError
from dpagent.extras import extra_needed
from dpagent.learning.data.dataset import Dataset, to_float32
from dpagent.wording import counted

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

_INK: Final = "#30363d"
_PALE: Final = "#dfe3e8"
#: Distinct for colour-blind readers (Okabe and Ito, 2008), on white.
_COLOURS: Final = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9", "#7a828c", "#000000")
_MOST_CLASSES: Final = 20
_EACH: Final = {1: 2_000, 2: 4, 3: 10}
_MOST_CHANNELS: Final = 8
_BINS: Final = 24
_TRIES: Final = 5
_STYLE: Final[dict[Any, Any]] = {
    "svg.fonttype": "none",
    "svg.hashsalt": "dpagent",
    "font.size": 8.5,
    "text.color": _INK,
    "axes.labelcolor": _INK,
    "xtick.color": _INK,
    "ytick.color": _INK,
}


def draw(dataset: Dataset, suffix: str) -> bytes:
    """A file of the type that ``suffix`` names, ``.svg`` or ``.png``. Private.

    Raises:
        ConfigurationError: matplotlib is not installed.
        DataError: No record can be read.
    """
    os.environ["MPLBACKEND"] = "agg"  # which is not used; a wrong one would be refused
    with extra_needed("demo", "`--picture`"):
        import matplotlib
        from matplotlib.figure import Figure
    rows = [(number, _some_of(dataset, number)) for number in range(min(dataset.classes, _MOST_CLASSES))]
    if not any(len(records) for _, records in rows):
        raise DataError("None of the records that the picture was to show can be read.")
    # One scale for all, so that classes can be compared.
    limits = (0.0, 1.0) if dataset.dtype == np.uint8 else _range([records for _, records in rows])
    with matplotlib.rc_context():
        matplotlib.rcdefaults()
        matplotlib.rcParams.update(_STYLE)
        columns = _columns(dataset)
        height_in = {1: 1.1, 2: 1.2, 3: 0.85}[len(dataset.shape)]
        width_in = 1.6 + columns * {1: 1.5, 2: 2.2, 3: 0.85}[len(dataset.shape)]
        margin_in = 0.75 if len(dataset.shape) < 3 else 0.55
        total_in = height_in * len(rows) + margin_in + 0.35
        figure = Figure(figsize=(max(width_in, 6.0), total_in))
        grid = figure.subplots(len(rows), columns, squeeze=False)
        figure.subplots_adjust(
            left=1.5 / max(width_in, 6.0), right=0.99, top=1 - margin_in / total_in, bottom=0.35 / total_in,
            wspace=0.12 if len(dataset.shape) < 3 else 0.05, hspace=0.35 if len(dataset.shape) < 3 else 0.08,
        )  # fmt: skip
        _title(figure, dataset, total_in)
        for axes, (number, records) in zip(grid, rows, strict=True):
            _label(figure, axes[0], dataset, number)
            _DRAW[len(dataset.shape)](list(axes), records, limits)
        _mark_columns(list(grid[0]), list(grid[-1]), dataset)
        buffer = io.BytesIO()
        kind = suffix.removeprefix(".")
        nothing: dict[str, Any] = {"Date": None} if kind == "svg" else {}
        figure.savefig(buffer, format=kind, dpi=130, metadata=nothing | {"Title": "Private records"})
    return buffer.getvalue()


def _some_of(dataset: Dataset, number: int) -> NDArray[np.float32]:
    """The first records of a class that can be read."""
    members = np.flatnonzero(dataset.labels == number)
    wanted = _EACH[len(dataset.shape)]
    try:
        return to_float32(dataset.batch(members[:wanted])[0])
    except DataError:
        kept = []
        for index in members[: _TRIES * min(wanted, 20)]:
            try:
                kept.append(to_float32(dataset.batch(np.array([index]))[0]))
            except DataError:
                continue  # The check lists it.
        return np.concatenate(kept)[:wanted] if kept else np.empty((0, *dataset.shape), np.float32)


def _columns(dataset: Dataset) -> int:
    return min(dataset.shape[0], _MOST_CHANNELS) if len(dataset.shape) == 1 else _EACH[len(dataset.shape)]


def _title(figure: Figure, dataset: Dataset, height_in: float) -> None:
    shown = min(dataset.classes, _MOST_CLASSES)
    more = f", the first {shown} of {counted(dataset.classes, 'class')}" if shown < dataset.classes else ""
    figure.text(
        0.02, 1 - 0.2 / height_in, f"Private: records of this device{more}", va="center", fontsize=11,
        fontweight="bold",
    )  # fmt: skip


def _label(figure: Figure, axes: Axes, dataset: Dataset, number: int) -> None:
    count = int(dataset.class_counts()[number])
    name = _short(dataset.class_label(number))
    box = axes.get_position()
    figure.text(
        0.02, (box.y0 + box.y1) / 2, f"{name}\n{counted(count, 'record')}", va="center", linespacing=1.4,
    )  # fmt: skip


def _draw_images(axes: list[Axes], records: NDArray[np.float32], limits: tuple[float, float]) -> None:
    low, high = limits
    for place, one in enumerate(axes):
        one.axis("off")
        if place < len(records):
            pixels = (np.nan_to_num(records[place], posinf=high, neginf=low) - low) / (high - low)
            channels = pixels.shape[-1]
            shown = pixels if channels == 3 else pixels[..., 0]
            one.imshow(np.clip(shown, 0, 1), cmap=None if channels == 3 else "gray", vmin=0, vmax=1)


def _draw_series(axes: list[Axes], records: NDArray[np.float32], limits: tuple[float, float]) -> None:
    for place, one in enumerate(axes):
        _plain_axes(one)
        one.set_xlim(0, max(records.shape[1] - 1, 1))
        one.set_ylim(limits)
        if place:
            one.set_yticklabels([])
        if place < len(records):
            for channel in range(min(records.shape[2], _MOST_CHANNELS)):
                line = records[place, :, channel]
                one.plot(np.where(np.isfinite(line), line, np.nan), color=_COLOURS[channel], linewidth=0.8)


def _draw_columns(axes: list[Axes], records: NDArray[np.float32], limits: tuple[float, float]) -> None:
    for place, one in enumerate(axes):
        _plain_axes(one)
        one.set_yticks([])
        values = records[:, place] if len(records) else np.empty(0)
        values = values[np.isfinite(values)].astype(np.float64)
        if len(values):
            one.hist(values, bins=_BINS, color=_COLOURS[0])


_DRAW: Final = {1: _draw_columns, 2: _draw_series, 3: _draw_images}


def _mark_columns(top: list[Axes], bottom: list[Axes], dataset: Dataset) -> None:
    names = dataset.columns
    if len(dataset.shape) == 1:
        for place, one in enumerate(top):
            name = names[place] if names else f"input {place}"
            one.set_title(_short(name), fontsize=8.5, loc="left")
        _share_limits(dataset, top, bottom)
    elif len(dataset.shape) == 2:
        shown = [names[channel] if names else f"channel {channel}" for channel in range(dataset.shape[1])]
        handles = top[0].get_lines()
        if handles:
            top[0].figure.legend(
                handles, [_short(name) for name in shown[:_MOST_CHANNELS]], loc="upper right",
                ncols=min(len(handles), _MOST_CHANNELS), fontsize=8, frameon=False, borderaxespad=0.3,
            )  # fmt: skip


def _share_limits(dataset: Dataset, top: list[Axes], bottom: list[Axes]) -> None:
    """One horizontal axis a column, so that classes can be compared."""
    grid = top[0].figure.axes
    for place in range(len(top)):
        column = [one for number, one in enumerate(grid) if number % len(top) == place and one.patches]
        if column:
            low = min(one.get_xlim()[0] for one in column)
            high = max(one.get_xlim()[1] for one in column)
            for one in grid[place :: len(top)]:
                one.set_xlim(low, high)
                if one is not bottom[place]:
                    one.set_xticklabels([])


def _short(name: str) -> str:
    """A name that fits, as it is: a dollar sign would begin a formula, a null character end an SVG."""
    shown = "".join(letter if letter.isprintable() else "�" for letter in name)
    return (shown if len(shown) <= 18 else f"{shown[:17]}…").replace("$", r"\$")


def _plain_axes(axes: Axes) -> None:
    axes.spines[["top", "right"]].set_visible(False)
    axes.spines[["left", "bottom"]].set_color(_PALE)
    axes.tick_params(length=0, labelsize=7)
    axes.locator_params(nbins=3)


def _range(rows: list[NDArray[np.float32]]) -> tuple[float, float]:
    """Least and greatest finite value, apart."""
    finite = np.concatenate([records[np.isfinite(records)] for records in rows])
    if not len(finite):
        return 0.0, 1.0
    low, high = float(finite.min()), float(finite.max())
    return (low, high) if low < high else (low - 0.5, high + 0.5)
