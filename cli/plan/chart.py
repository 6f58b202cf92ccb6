"""A small chart in plain characters: the noise multiplier by round, a letter for each schedule."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Final

from cli.notation import figure

_ROWS: Final = 11
_MIN_COLUMNS: Final = 24
_MAX_COLUMNS: Final = 58
_UNICODE: Final = "│┤└─"
_ASCII: Final = "|++-"


def noise_chart(lines: Mapping[str, Sequence[float]], *, first: str, width: int, encoding: str) -> str:
    """The chart; empty for fewer than three rounds, equal noise or a narrow terminal.

    Args:
        lines: noise multiplier of every round by schedule; schedules have different initials.
        first: name of the schedule to draw over the others.
        width: characters per line.
        encoding: of the output, which may lack box-drawing characters.
    """
    rounds = len(lines[first])
    margin, names = 8, max(len(name) for name in lines) + 3
    columns = min(width - margin - names, _MAX_COLUMNS)
    if rounds < 3 or columns < _MIN_COLUMNS:
        return ""
    low, high = (end(end(line) for line in lines.values()) for end in (min, max))
    if high - low < 1e-3 * high:
        return ""
    side, tick, corner, floor = _UNICODE if _can_show(_UNICODE, encoding) else _ASCII

    def height(sigma: float) -> int:
        return round((high - sigma) / (high - low) * (_ROWS - 1))

    canvas = [[" "] * columns for _ in range(_ROWS)]
    for name in sorted(lines, key=lambda name: name == first):
        for column in range(0, columns, 2):
            number = round(column / (columns - 1) * (rounds - 1))
            canvas[height(lines[name][number])][column] = name[0]
    labels = _apart({name: height(line[-1]) for name, line in lines.items()})
    text = ["noise multiplier σ by round"]
    for row, marks in enumerate(canvas):
        value = figure(high - row / (_ROWS - 1) * (high - low))
        scale = f"{value:>{margin - 1}}{tick}" if row % 5 == 0 else f"{side:>{margin}}"
        label = f"  {labels[row]}" if row in labels else ""
        text.append(f"{scale}{''.join(marks)}{label}".rstrip())
    text.append(f"{corner:>{margin}}{floor * columns}")
    text.append(f"{'1':>{margin + 1}}{rounds:>{columns - 2}}")
    return "\n".join(text) + "\n"


def _apart(wanted: Mapping[str, int]) -> dict[int, str]:
    """A separate row for each name, in order, as close as possible to the wanted row."""
    rows: dict[int, str] = {}
    names = sorted(wanted, key=lambda name: wanted[name])
    for place, name in enumerate(names):
        below = len(names) - 1 - place
        row = max(wanted[name], max(rows, default=-1) + 1)
        rows[min(row, _ROWS - 1 - below)] = name
    return rows


def _can_show(text: str, encoding: str) -> bool:
    try:
        text.encode(encoding)
    except (UnicodeEncodeError, LookupError):
        return False
    return True
