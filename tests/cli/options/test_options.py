"""Options that stand for settings: every setting has one, and values come back as they were written."""

from __future__ import annotations

import shlex
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal, get_args, get_origin

import pytest
import typer
from typer.testing import CliRunner

from cli.demo.next_steps import predict_commands
from cli.options import forms
from cli.options.forms import SWITCH, SWITCH_OFF, choice
from cli.options.rows import BROKER, DATA, RUN
from cli.options.table import Given, Option, OptionTable, with_options
from dpagent.errors import DataError, ParameterError, UsageError
from dpagent.learning.data.settings import DatasetSettings
from dpagent.schema.base import Schema, fields_of
from dpagent.settings import Settings
from dpagent.wording import named
from simulation.layout import Layout
from simulation.notes import RunNotes
from simulation.request import BrokerRequest, Request


def settings_in(schema: type[Schema], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """The settings of a schema, dotted, with their annotations."""
    for name, field in fields_of(schema).items():
        if isinstance(field.annotation, type) and issubclass(field.annotation, Schema):
            yield from settings_in(field.annotation, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}", field.annotation


REGISTERED = {"method", "noise"}
"""Settings whose words are names in a registry."""


def words_of(annotation: Any) -> tuple[str, ...]:
    """The words of a ``Literal``, also where None may stand instead."""
    if get_origin(annotation) is Literal:
        return get_args(annotation)
    literals = [part for part in get_args(annotation) if get_origin(part) is Literal]
    return get_args(literals[0]) if literals else ()


@pytest.mark.parametrize(
    ("table", "schema", "elsewhere"),
    [
        (DATA, DatasetSettings, {"path"}),
        (RUN, Request, {"data.train"}),
        (BROKER, BrokerRequest, set()),
    ],
)
def test_every_setting_has_one_option_with_the_words_that_the_setting_knows(
    table: OptionTable, schema: type[Schema], elsewhere: set[str]
) -> None:
    known = dict(settings_in(schema))
    rows = {row.setting: row for row in table.rows if row.setting != "data.train.path"}
    assert len(rows) == len(table.rows) - (table is RUN)
    assert set(rows) | elsewhere == set(known)
    for setting, row in rows.items():
        if setting not in REGISTERED:
            assert tuple(row.form.words() if row.form.words else ()) == words_of(known[setting]), setting
    assert len({row.option for row in table.rows}) == len(table.rows)


@pytest.mark.parametrize(
    ("key", "value", "option"),
    [
        ("label", None, "`--label`"),
        ("csv.window", None, "`--window`"),
        ("shape", [28, 28, 1], "`--shape 28,28,1`"),
        ("size", [32, 24], "`--size 32x24`"),
        ("mode", "rgb", "`--mode rgb`"),
        ("stride", 64, "`--stride 64`"),
        ("header", False, "`--no-header`"),
        ("decimal", ",", "`--decimal ,`"),
        ("first_column", "id", "`--first-column id`"),
        ("offset", -2.5, "`--offset=-2.5`"),
        ("elsewhere", 3, "`elsewhere: 3`"),
    ],
)
def test_sentences_name_options_while_a_command_runs(key: str, value: object, option: str) -> None:
    said: list[str] = []

    @with_options(data=DATA)
    def command(data: Given) -> None:
        said.append(named(key, value))

    command(**{row.parameter.name: None for row in DATA.rows})
    assert said == [option]
    assert "--" not in named(key, value)


def test_errors_that_pass_keep_their_kind() -> None:
    @with_options(data=DATA)
    def command(data: Given) -> None:
        raise DataError(f"Set {named('kind')} to one.")

    with pytest.raises(DataError, match="Set `--kind` to one"):
        command(**{row.parameter.name: None for row in DATA.rows})


def given(table: OptionTable, **values: Any) -> Given:
    return Given(table, {row.setting: values.get(row.parameter.name) for row in table.rows})


def test_a_number_out_of_range_and_any_other_wrong_value_are_told_apart() -> None:
    with pytest.raises(ParameterError, match=r"`csv\.window`: got 0; expected a number of at least 1"):
        given(DATA, csv_window="0").settings(DatasetSettings, path=Path("x"))
    with pytest.raises(ParameterError, match=r"`delta`: got 1\.0; expected a number below 1"):
        given(RUN, delta=1.0).settings(Request)
    with pytest.raises(ParameterError, match=r"data\.test_share|test_share"):
        given(RUN, data_test_share=1.0).settings(Request, data={"train": DatasetSettings(path=Path("x"))})

    with pytest.raises(UsageError, match=r"`csv\.delimiter`: got 'ab'; expected one character"):
        given(DATA, csv_delimiter="ab").settings(DatasetSettings, path=Path("x"))
    with pytest.raises(UsageError, match=r"`csv\.window`.*\n.*`csv\.delimiter`"):
        given(DATA, csv_delimiter="ab", csv_window="0").settings(DatasetSettings, path=Path("x"))


def test_what_is_given_is_set_and_nothing_else() -> None:
    made = given(DATA, csv_label="y", csv_header=True, images_size="8").settings(
        DatasetSettings, path=Path("x")
    )
    assert made.as_dict(only_given=True) == {
        "path": Path("x"), "csv": {"label": "y", "header": False}, "images": {"size": [8, 8]},
    }  # fmt: skip


def test_a_row_is_all_that_an_option_takes() -> None:
    class Colours(Settings):
        colour: Literal["red", "blue"] = "red"
        is_bright: bool = False

    table = OptionTable(
        Option("colour", choice("red", "blue"), "Which colour."), Option("is_bright", SWITCH, "Whether.")
    )
    app, seen = typer.Typer(), []

    @app.command()
    @with_options(colours=table)
    def paint(colours: Given, times: int = 1) -> None:
        """Paint."""
        seen.append((colours.settings(Colours), times))

    @app.command()
    def other() -> None:
        """Two commands, so that the first has a name."""

    app(["paint", "--colour", "blue", "--is-bright", "--times", "3"], standalone_mode=False)
    app(["paint"], standalone_mode=False)
    assert seen == [(Colours(colour="blue", is_bright=True), 3), (Colours(), 1)]


def test_a_size_is_width_and_height_or_a_square() -> None:
    def size(text: str) -> Any:
        return forms.SIZE.read(text, "--size")

    assert size("32x24") == size("32X24") == size("32×24") == [32, 24]
    assert size("32") == [32, 32]
    for wrong in ("", "x", "32x", "1x2x3", "wide", "3.5"):
        with pytest.raises(UsageError, match="expected WIDTHxHEIGHT, such as 32x32"):
            size(wrong)


@pytest.mark.parametrize(
    ("form", "value"),
    [
        (forms.NAMES, ["a b", "c"]), (forms.SHAPE, [28, 28, 1]), (forms.SIZE, [32, 24]),
        (forms.CONSTANTS, {"x": -0.123456789, "y": 0.0}), (forms.CONSTANTS, -2.5), (forms.ROWS, 64),
        (forms.TEXT, "x"), (forms.DELIMITER, ";"),
    ],
)  # fmt: skip
def test_what_a_form_writes_it_reads_back(form: forms.Form, value: Any) -> None:
    assert form.read(form.write(value), "--x") == value


@pytest.mark.parametrize(
    ("form", "text"),
    [(forms.SHAPE, "8,a"), (forms.CONSTANTS, "much"), (forms.CONSTANTS, "x=1,2"), (forms.ROWS, "6.5")],
)
def test_what_a_form_cannot_read_is_named(form: forms.Form, text: str) -> None:
    with pytest.raises(UsageError, match="expected") as caught:
        form.read(text, "--thing")
    assert repr(text) in str(caught.value)
    assert "`--thing`" in str(caught.value)


def commands(kind: str, reading: dict[str, Any] | None) -> list[list[str]]:
    train = None if reading is None else DatasetSettings.checked({"path": Path("/d")} | reading)
    notes = RunNotes(kind=kind, columns=("a b", "c"))
    return [shlex.split(command)[2:] for command in predict_commands(train, notes, Layout(Path("my run")))]


def test_the_commands_after_a_run_hold_what_new_files_need_and_the_model_does_not_say() -> None:
    form = {
        "label": "y", "offset": {"c": -0.123456789}, "scale": 2.5, "window": 8, "delimiter": "\t",
        "header": False, "decimal": ",",
    }  # fmt: skip
    model, test = "my run/coordinator/state/jobs/first/model.onnx", "my run/coordinator/test.npz"
    held_out, new = commands("csv", {"csv": form | {"offset": -2.5}})
    assert held_out == [model, test, "--summary"]
    assert new == [
        model, "NEW.csv", "--delimiter", "tab", "--decimal", ",", "--no-header",
    ]  # fmt: skip
    named_first = {"header": True, "first_column": "id"}
    assert commands("csv", {"csv": form | named_first})[1][-2:] == ["--first-column", "id"]
    assert commands("csv", {"csv": {"window": 8, "group": "who"}})[1][2:] == ["--group", "who"]
    square, flat = {"images": {"size": [8, 8]}}, {"images": {"size": [8, 4], "mode": "grey"}, "shape": [32]}
    assert commands("images", square)[1] == [model, "NEW.png"]
    assert commands("images", flat)[1] == [model, "NEW.png"]
    assert commands("images", {"images": {"max_pixels": 9, "folder": "x"}})[1][2:] == ["--max-pixels", "9"]
    assert len(commands("idx", {})) == 1
    assert len(commands("arrays", None)) == 1


def test_a_switch_that_is_as_it_was_takes_no_option() -> None:
    assert Option("x", SWITCH, "").words(False) == Option("x", SWITCH_OFF, "").words(True) == []


def test_a_word_of_a_registry_is_read_and_completed_as_the_registry_has_it() -> None:
    known = ["auto"]
    form = forms.registered(lambda: known, "KIND")
    with pytest.raises(UsageError, match=r"got 'jsonl'; expected one of auto\."):
        form.read("jsonl", "--kind")
    known.append("jsonl")
    assert form.read("jsonl", "--kind") == "jsonl"
    app = typer.Typer()

    @app.command()
    @with_options(data=OptionTable(Option("kind", form, "Format.")))
    def check(data: Given) -> None:
        """Check."""

    environment = {"_CHECK_COMPLETE": "complete_bash", "COMP_WORDS": "check --kind j", "COMP_CWORD": "2"}
    completed = CliRunner().invoke(app, [], prog_name="check", env=environment)
    assert completed.stdout.split() == ["jsonl"]


def test_help_waits_for_no_format() -> None:
    loaded = (
        "import sys, cli.main; print([name for name in ('numpy', 'dpagent.settings') if name in sys.modules])"
    )
    done = subprocess.run(
        [sys.executable, "-c", loaded], capture_output=True, text=True, timeout=60, check=True
    )
    assert done.stdout.strip() == "[]"
