"""What was found, for a terminal and for a script."""

from __future__ import annotations

import os
import textwrap
from dataclasses import asdict
from typing import Any, Final

import yaml

from cli.notation import plain
from cli.tables import render_table
from dpagent.learning.data.checking import Findings
from dpagent.learning.data.declared import MAX_RECORDS
from dpagent.learning.data.settings import DatasetSettings
from dpagent.learning.models.costs import features_mib
from dpagent.learning.models.spec import ModelSpec
from dpagent.schema.json_values import json_values
from dpagent.wording import counted

_MOST_CLASSES: Final = 20
_MOST_COLUMNS: Final = 20
_MOST_SENTENCES: Final = 20
_WIDTH: Final = 100
_BAR: Final = 24


def page(
    findings: Findings,
    declared: DatasetSettings,
    *,
    model: str | None = None,
    spec: ModelSpec | None = None,
    misfit: str | None = None,
) -> str:
    """The findings as text, and the section of ``agent.yaml`` that declares what was found."""
    parts = [
        f"{findings.source}\n\n",
        _facts(findings),
        "\n",
        render_table(["class", "", "records", "share"], _class_rows(findings), words=2),
        _columns(findings),
        _list("Cannot be read", findings.unreadable),
        _list("Left out", findings.left_out),
        _list("Warnings", findings.warnings),
    ]
    if model is not None:
        parts.append("\n" + (f"Does not fit: {misfit}\n" if misfit else f"Fits the model {model}.\n"))
    parts.append(
        f"\nFor agent.yaml (`name` is the ledger's name for these records):\n\n"
        f"{_yaml(declared, findings.records, spec)}"
    )
    return "".join(parts)


def as_json(findings: Findings, *, model: str | None = None, misfit: str | None = None) -> dict[str, Any]:
    """The findings as plain values."""
    values = asdict(findings)
    values["shape"] = list(findings.shape)
    values["classes"] = [{"name": name, "records": count} for name, count in findings.classes]
    return values | {"model": model, "fits": None if model is None else misfit is None, "misfit": misfit}


def _facts(findings: Findings) -> str:
    axes = {1: "features", 2: "length × channels", 3: "height × width × channels"}[len(findings.shape)]
    values = "none is finite"
    if findings.minimum is not None and findings.maximum is not None:
        values = f"{plain(findings.minimum)} to {plain(findings.maximum)}"
    if findings.dtype == "uint8":
        values += ", which the network sees divided by 255"
    contradictions = f", {findings.contradictions:,} of them with another label" * bool(
        findings.contradictions
    )
    rows = [
        ["records", f"{findings.records:,}"],
        ["shape", f"{' × '.join(map(str, findings.shape))} ({axes})"],
        ["stored as", findings.dtype],
        ["values", values],
        ["classes", f"{len(findings.classes):,}"],
        ["not finite", f"{findings.non_finite:,}"],
        ["duplicates", f"{findings.duplicates:,}{contradictions}"],
        ["unreadable", f"{len(findings.unreadable):,}"],
        ["all in memory", f"{findings.memory_bytes / 2**20:,.1f} MiB; records are read as needed"],
    ]
    return "".join(f"{name:<15}{value}\n" for name, value in rows)


def _class_rows(findings: Findings) -> list[list[str]]:
    most = max(count for _, count in findings.classes)
    rows = [
        [name, "#" * round(_BAR * count / most), f"{count:,}", f"{count / findings.records:.1%}"]
        for name, count in findings.classes
    ]
    if len(rows) > _MOST_CLASSES:
        rest = sum(count for _, count in findings.classes[_MOST_CLASSES:])
        more = len(rows) - _MOST_CLASSES
        rows = [
            *rows[:_MOST_CLASSES],
            [f"({more:,} more)", "", f"{rest:,}", f"{rest / findings.records:.1%}"],
        ]
    return rows


def _columns(findings: Findings) -> str:
    """What a model is given of a table, column by column."""
    if not findings.columns:
        return ""
    rows = [
        [
            column.name,
            "-" if column.minimum is None else plain(column.minimum),
            "-" if column.maximum is None else plain(column.maximum),
            "only grows" if column.only_grows else "",
        ]
        for column in findings.columns[:_MOST_COLUMNS]
    ]
    more = len(findings.columns) - len(rows)
    rest = f"({counted(more, 'more column')}; --json has all of them.)\n" if more > 0 else ""
    return "\n" + render_table(["input column", "least", "greatest", ""], rows) + rest


def _list(title: str, sentences: tuple[str, ...]) -> str:
    if not sentences:
        return ""
    lines = [
        textwrap.fill(
            "".join(letter if letter.isprintable() else "�" for letter in sentence),
            _WIDTH, initial_indent="  - ", subsequent_indent="    ", break_long_words=False,
        )
        for sentence in sentences[:_MOST_SENTENCES]
    ]  # fmt: skip
    if len(sentences) > _MOST_SENTENCES:
        lines.append(f"  - … and {len(sentences) - _MOST_SENTENCES:,} more.")
    return f"\n{title}:\n" + "\n".join(lines) + "\n"


def declaration(declared: DatasetSettings, records: int, spec: ModelSpec | None) -> dict[str, Any]:
    """The section ``data`` of ``agent.yaml`` with which a board opens the same records, and has room for
    features."""
    values: dict[str, Any] = json_values(declared.as_dict(only_given=True))
    values = {"name": "my-records"} | values | {"path": os.path.normpath(declared.path.absolute())}
    if declared.max_records == MAX_RECORDS:
        values["max_records"] = _with_room(records)
    if spec is not None and spec.front_end:
        values["features_mib"] = features_mib(spec, values["max_records"])
    return values


def _yaml(declared: DatasetSettings, records: int, spec: ModelSpec | None) -> str:
    values = declaration(declared, records, spec)
    text = yaml.safe_dump({"data": values}, sort_keys=False, allow_unicode=True, default_flow_style=None)
    return textwrap.indent(text, "  ")


def _with_room(records: int) -> int:
    """A round number of at least twice as many, if there may be as many."""
    unit: int = 10 ** (len(str(2 * records)) - 1)
    return min(MAX_RECORDS, -(-2 * records // unit) * unit)
