"""Predictions as lines, and what is said of all of them, for a person."""

from __future__ import annotations

import re
import shutil
import textwrap
from collections import Counter
from collections.abc import Sequence
from types import TracebackType
from typing import Final

import typer
from rich.cells import cell_len

from cli.notation import percent
from cli.tables import render_table
from dpagent.learning.inference.prediction.exported_model import ExportedModel
from dpagent.learning.inference.prediction.outcome import Outcome, Tally
from dpagent.notation import plain_bound
from dpagent.wording import counted

_WIDEST_NAME: Final = 32
_MOST_CLASSES: Final = 100
_MOST_CONFUSED: Final = 3
_MOST_PAIRS: Final = 20
_WIDTH: Final = 100
_STYLE: Final = re.compile(r"\x1b\[[0-9;]*m")
"""What makes a header bold on a terminal."""


class TextOutput:
    """A line an input, as soon as it is known.

    Args:
        class_names: of the model, or empty.
        classes: how many it has.
        top: how many a line shows.
        silent: no lines at all.
    """

    def __init__(self, class_names: Sequence[str], classes: int, top: int, *, silent: bool) -> None:
        self._names, self._top, self._silent = class_names, min(top, classes), silent
        longest = max((cell_len(shown(name)) for name in class_names), default=len(str(classes - 1)))
        self._width = min(max(longest, len("class")), _WIDEST_NAME)
        self._began = False

    def write(self, outcome: Outcome) -> None:
        """Print one line; of an input without an answer there is none."""
        if self._silent or outcome.probabilities is None:
            return
        if not self._began:
            self._began = True
            columns = [f"{self._padded('class')}  probability"] * self._top
            typer.echo("  ".join([*columns, self._padded("label"), "input"]))
        parts = [
            f"{self._padded(class_label(self._names, number))}  {probability:11.4f}"
            for number, probability in outcome.top(self._top)
        ]
        label = outcome.input.label
        known = "-" if label is None else class_label(self._names, label)
        typer.echo("  ".join([*parts, self._padded(known), shown(outcome.input.name)]))

    def close(self, tally: Tally) -> None:
        """Nothing is left to print."""

    def __enter__(self) -> TextOutput:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, traceback: TracebackType | None
    ) -> None:
        """Nothing is left open."""

    def _padded(self, name: str) -> str:
        name = shown(name)
        return name + " " * (self._width - cell_len(name))


def about(model: ExportedModel) -> str:
    """Which model it is, and what it promises to those whose records it learnt from."""
    shape = " × ".join(map(str, model.input_shape))
    when = "" if model.round is None else f" after round {model.round}"
    spent = ""
    if model.epsilon_spent is not None:
        spent = f" Up to this round: ε = {plain_bound(model.epsilon_spent)}."
        spent += "".join(f" {each}" for each in _conditions(model))
    privacy = model.privacy.rstrip(".") or "the file says nothing of it; take it that there is no guarantee"
    return _wrapped(
        f"Model {model.name}{when}: inputs of {shape}, {counted(model.classes, 'class')}.",
        f"Privacy: {privacy}.{spent}",
    )


def _conditions(model: ExportedModel) -> list[str]:
    """Of the figure for the rounds up to the model's, besides those of the job's: sentences.

    A figure for a part of a job is a bound if it was to end there, whatever came of it.
    """
    own, whole = (
        each.get("assumptions") if isinstance(each, dict) else None
        for each in (model.spent[0] if model.spent else None, model.privacy_statement)
    )
    known = whole if isinstance(whole, list) else []
    told = own if isinstance(own, list) else []
    return [each for each in told if isinstance(each, str) and each not in known]


def closing(tally: Tally, model: ExportedModel) -> str:
    """What became of all inputs."""
    sentences = []
    if tally.unread:
        sentences.append(f"{counted(tally.unread, 'path')} could not be read as inputs, as said above.")
    if inputs := tally.inputs - tally.unread:
        sentences.append(f"{counted(inputs, 'input')}.")
    if tally.scaled:
        height, width = model.input_shape[:2] if len(model.input_shape) == 3 else (0, 0)
        size = f" of {width} × {height}" if width else ""
        were = "was" if tally.scaled == 1 else "were"
        sentences.append(
            f"{counted(tally.scaled, 'picture')} {were} scaled and cut to the model's input{size}."
        )
    if unanswered := tally.unanswered - tally.unread:
        sentences.append(f"{unanswered:,} without an answer, as said above.")
    return _wrapped(" ".join(sentences))


def accuracy_page(tally: Tally, class_names: Sequence[str]) -> str:
    """How many of the labelled inputs were right, and what each class was taken for."""
    assert tally.accuracy is not None
    records: Counter[int] = Counter()
    taken: dict[int, Counter[int]] = {}
    for (label, answer), count in tally.pairs.items():
        records[label] += count
        taken.setdefault(label, Counter())[answer] += count
    head = f"Accuracy: {percent(tally.accuracy, 2)}, {tally.right:,} of {tally.labelled:,} with a label.\n\n"
    present = sorted({number for pair in tally.pairs for number in pair})
    if len(present) > _MOST_PAIRS:
        return head + _confusions(records, taken, class_names)
    names = [shown(class_label(class_names, number)) for number in present]
    counts = [[taken.get(label, Counter())[answer] for answer in present] for label in present]
    table = render_table(
        ["class \\ taken for", *names, "right"],
        [
            [name, *(f"{count:,}" if count else "." for count in row), _share(row[place], sum(row))]
            for place, (name, row) in enumerate(zip(names, counts, strict=True))
        ],
    )
    width = min(shutil.get_terminal_size((_WIDTH, 0)).columns, 2 * _WIDTH)
    if max(cell_len(_STYLE.sub("", line)) for line in table.splitlines()) <= width:
        return head + table
    return head + _confusions(records, taken, class_names)


def _confusions(records: Counter[int], taken: dict[int, Counter[int]], class_names: Sequence[str]) -> str:
    """A line a class, where a table of all pairs is too wide."""
    rows = []
    for label in sorted(records)[:_MOST_CLASSES]:
        others = Counter({answer: count for answer, count in taken[label].items() if answer != label})
        said = [
            f"{class_label(class_names, answer)} {count:,}"
            for answer, count in others.most_common(_MOST_CONFUSED)
        ]
        rows.append(
            [
                class_label(class_names, label), ", ".join(said), f"{records[label]:,}",
                _share(taken[label][label], records[label]),
            ]
        )  # fmt: skip
    more = len(records) - len(rows)
    rest = f"({counted(more, 'more class')}; --json has all of them.)\n" if more > 0 else ""
    return render_table(["class", "most often taken for", "inputs", "right"], rows, words=2) + rest


def _share(part: int, whole: int) -> str:
    return percent(part / whole) if whole else "-"


def class_label(class_names: Sequence[str], number: int) -> str:
    """What class ``number`` is called."""
    return class_names[number] if class_names else str(number)


def shown(text: str) -> str:
    """Text from a file as a terminal may show it."""
    return "".join(letter if letter.isprintable() else "�" for letter in text)


def _wrapped(*paragraphs: str) -> str:
    width = min(shutil.get_terminal_size((_WIDTH, 0)).columns, _WIDTH)
    return "\n".join(
        textwrap.fill(one, max(width, 20), break_long_words=False, break_on_hyphens=False)
        for one in paragraphs
    )
