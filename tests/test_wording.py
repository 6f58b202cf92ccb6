"""How sentences count and name settings."""

from __future__ import annotations

import itertools
import re
from pathlib import Path

import pytest

from dpagent.learning.data.registry import FORMATS
from dpagent.learning.data.settings import DatasetSettings
from dpagent.wording import counted, named, settings_named_by

ROOT = Path(__file__).parents[1]


def test_words_are_counted() -> None:
    made = [counted(1, "file"), counted(0, "file"), counted(1200, "class")]
    assert made == ["1 file", "0 files", "1,200 classes"]


def test_settings_are_named_as_yaml_has_them_unless_a_program_says_otherwise() -> None:
    assert [named("csv.label"), named("size", [8, 4]), named("header", False), named("decimal", ",")] == [
        "`csv.label`", "`size: [8, 4]`", "`header: false`", "`decimal: ','`",
    ]  # fmt: skip
    with settings_named_by(lambda key, value: f"{key}!"):
        assert named("label") == "`label!`"
    assert named("label") == "`label`"


def test_no_sentence_of_the_library_names_a_setting_in_one_way_for_all() -> None:
    sections = [known.section.model_fields for known in FORMATS.values()]
    keys = {*DatasetSettings.model_fields, *itertools.chain(*sections)} - {"path", *FORMATS}
    plain = re.compile(rf"(?<!`)`(?:(?:{'|'.join(FORMATS)})\.)?({'|'.join(keys)})(: [^`]*)?`(?!`)")
    assert plain.search("Set `csv.decimal: ','`")
    for file in (ROOT / "dpagent" / "learning").rglob("*.py"):
        for match in plain.finditer(file.read_text()):
            pytest.fail(f"{file}: {match[0]} does not go through named()")
