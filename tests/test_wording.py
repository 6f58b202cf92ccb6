"""How sentences count and name settings."""

from __future__ import annotations

import ast
import itertools
import re
from pathlib import Path

import pytest

from dpagent.learning.data.registry import FORMATS
from dpagent.learning.data.settings import DatasetSettings
from dpagent.wording import counted, named, settings_named_by

ROOT = Path(__file__).parents[1]


def test_words_are_counted() -> None:
    made = [counted(1, "file"), counted(0, "file"), counted(1200, "class"), counted(2, "entry")]
    assert made == ["1 file", "0 files", "1,200 classes", "2 entries"]
    assert [counted(1.0, "day"), counted(1.5, "day"), counted(1e7, "day")] == [
        "1 day", "1.5 days", "10,000,000 days",
    ]  # fmt: skip


_COUNTABLE = (
    "agents bytes cells charges classes columns coordinates devices entries features files fragments "
    "groups inputs labels layers lots messages numbers pairs parameters parts pictures records rounds rows "
    "shards steps threads values"
).replace(" ", "|")
_NOUNS = re.compile(rf"(?:training |test |local |more |different )?(?:{_COUNTABLE})\b")
_SPOKEN = ("agent", "cli", "coordinator", "simulation", "dpagent/learning/data", "dpagent/learning/inference")


def uncounted(source: str) -> list[str]:
    """The numbers in sentences and log lines that stand before a plural whatever they are."""
    found = []
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.JoinedStr):
            for value, after in itertools.pairwise(node.values):
                if not isinstance(value, ast.FormattedValue) or not isinstance(after, ast.Constant):
                    continue
                noun = _NOUNS.match(str(after.value).removeprefix(" "))
                # A constant in capitals is known to be several.
                if noun and str(after.value)[0] == " " and not re.search(r"[A-Z]{2}", ast.unparse(value)):
                    found.append(f"{ast.unparse(value.value)} {noun[0]}")
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            found += re.findall(rf"%d {_NOUNS.pattern}", node.value)
    return found


def test_what_is_not_counted_is_found() -> None:
    assert uncounted('f"{n:,} more rows"; f"{_MOST} rows"; f"{n} times"; f"{counted(n, \'row\')} here"') == [
        "n more rows"
    ]
    assert uncounted('log.info("%d of %d records", 1, 2)') == ["%d records"]


@pytest.mark.parametrize("place", _SPOKEN)
def test_programs_count_what_they_name(place: str) -> None:
    for file in sorted((ROOT / place).rglob("*.py")):
        assert uncounted(file.read_text(encoding="utf-8")) == [], file


_BOUND = re.compile(r"epsilon|delta|budget|reserved|spent")


def rounded_bounds(source: str) -> list[str]:
    """The ε and δ in sentences and tables that are rounded to the nearest, so that half of them are shown as
    less than they are."""
    found = []
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.FormattedValue) and isinstance(node.format_spec, ast.JoinedStr):
            spec, shown = (
                ast.unparse(node.format_spec),
                [node.value] * bool(_BOUND.search(ast.unparse(node.value))),
            )
            found += [ast.unparse(each) for each in shown if re.search(r"[efg]'$", spec)]
        elif isinstance(node, ast.Call) and ast.unparse(node.func) in ("plain", "figure"):
            found += [ast.unparse(node) for each in node.args if _BOUND.search(ast.unparse(each))]
    return found


def test_a_bound_that_is_rounded_to_the_nearest_is_found() -> None:
    source = 'f"{a.epsilon:g} {delta:.4g} {upwards(epsilon)} {share:.2f} {epsilon!r}"; plain(spent)'
    assert rounded_bounds(source) == ["plain(spent)", "a.epsilon", "delta"]


@pytest.mark.parametrize("place", ["agent", "cli", "coordinator", "mixer", "simulation"])
def test_no_program_shows_a_bound_as_less_than_it_is(place: str) -> None:
    for file in sorted((ROOT / place).rglob("*.py")):
        assert rounded_bounds(file.read_text(encoding="utf-8")) == [], file


def test_settings_are_named_as_yaml_has_them_unless_a_program_says_otherwise() -> None:
    assert [named("csv.label"), named("size", [8, 4]), named("header", False), named("decimal", ",")] == [
        "`csv.label`", "`size: [8, 4]`", "`header: false`", "`decimal: ','`",
    ]  # fmt: skip
    with settings_named_by(lambda key, value: f"{key}!"):
        assert named("label") == "`label!`"
    assert named("label") == "`label`"


def test_no_sentence_of_the_library_names_a_setting_in_one_way_for_all() -> None:
    sections = [known.section.names for known in FORMATS.values()]
    keys = {*DatasetSettings.names, *itertools.chain(*sections)} - {"path", *FORMATS}
    plain = re.compile(rf"(?<!`)`(?:(?:{'|'.join(FORMATS)})\.)?({'|'.join(keys)})(: [^`]*)?`(?!`)")
    assert plain.search("Set `csv.decimal: ','`")
    for file in (ROOT / "dpagent" / "learning").rglob("*.py"):
        for match in plain.finditer(file.read_text()):
            pytest.fail(f"{file}: {match[0]} does not go through named()")
