"""The figures, for a terminal and for a script."""

from __future__ import annotations

import shutil
import textwrap
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any, Final

from cli.bench.measuring import ModelFigures, Terms
from cli.notation import figure
from cli.tables import render_table
from dpagent.wording import counted

_WIDTH: Final = 100


def page(results: Sequence[ModelFigures], terms: Terms, machine: Mapping[str, str | int | None]) -> str:
    """The figures as text."""
    rows, reasons = [], []
    for result in results:
        for number, figures in enumerate(result.engines):
            chosen = " *" if result.auto == figures.engine else ""
            rows.append(
                [
                    result.name if number == 0 else "",
                    f"{figures.engine}{chosen}",
                    f"{result.parameters:,}" if number == 0 else "",
                    "-" if figures.examples_per_s is None else figure(figures.examples_per_s, 3),
                    "-" if figures.peak_mib is None else f"{figures.peak_mib:.1f}",
                ]
            )
            if figures.why_not:
                reasons.append(f"{result.name}, {figures.engine}: {figures.why_not}.")
    table = render_table(["model", "engine", "parameters", "examples/s", "peak MiB"], rows, words=2)
    return "\n".join([table, *_wrapped(_legend(results, terms)), *_wrapped([*reasons, *_about(machine)]), ""])


def as_json(
    results: Sequence[ModelFigures], terms: Terms, machine: Mapping[str, str | int | None]
) -> dict[str, Any]:
    """The figures as plain values."""
    return {
        "machine": dict(machine),
        "lot": terms.lot,
        "microbatch": terms.microbatch,
        "processes": terms.processes,
        "models": [asdict(result) for result in results],
    }


def _legend(results: Sequence[ModelFigures], terms: Terms) -> list[str]:
    sentences = [
        f"Examples/s: summed clipped gradients per second, in lots of {terms.lot:,}, median; microbatch "
        f"{terms.microbatch}, {counted(terms.processes, 'process')}.",
        "Peak: resident memory of a process that only trains; an agent needs its own memory in addition.",
    ]
    if any(result.auto for result in results):
        sentences.append("* the choice of `engine: auto` on this board, by its own trial.")
    if any(result.has_front_end for result in results):
        names = ", ".join(result.name for result in results if result.has_front_end)
        sentences.append(f"{names}: only the layers after the front end, whose features are computed once.")
    return sentences


def _about(machine: Mapping[str, str | int | None]) -> list[str]:
    board = f"{machine['board']}, " if machine["board"] else ""
    packages = ", ".join(
        f"{name} {machine[name] or 'not installed'}"
        for name in ("dpagent", "python", "numpy", "onnxruntime", "onnx")
    )
    return [
        f"{board}{machine['processor']}, {counted(int(machine['cores'] or 1), 'core')}, "
        f"{machine['system']}; {packages}."
    ]


def _wrapped(sentences: Sequence[str]) -> list[str]:
    width = max(20, min(shutil.get_terminal_size((_WIDTH, 0)).columns, _WIDTH))
    return [
        textwrap.fill(one, width, break_long_words=False, break_on_hyphens=False, subsequent_indent="  ")
        for one in sentences
    ]
