"""From rows to a command: its options, the settings they make, and how errors name both.

A command takes a table as one parameter::

    @with_options(data=DATA)
    def check(path: Path, data: Given) -> None:
        settings = data.settings(DatasetSettings, path=path)

On the command line the parameter is all options of the table. While the command runs, every sentence that
names a setting (:func:`dpagent.wording.named`) names the option.
"""

from __future__ import annotations

import inspect
import shlex
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Annotated, Any, TypeVar

import typer

from cli.options.forms import SWITCH, SWITCH_OFF, Form
from dpagent.errors import ParameterError, UsageError
from dpagent.wording import as_yaml, named, settings_named_by

if TYPE_CHECKING:
    from dpagent.schema.problems import Problem
    from dpagent.settings import Settings

    SettingsT = TypeVar("SettingsT", bound=Settings)


@dataclass(frozen=True, slots=True)
class Option:
    """A row: a setting and its option.

    Attributes:
        setting: The field of the settings, dotted, which is its key in YAML too: ``csv.label``.
        form: How its value is written.
        help: For the help text.
        name: Of the option; by default, the last part of the setting.
        default: What the help text gives as default; empty for none.
        panel: Heading in the help text.
    """

    setting: str
    form: Form
    help: str
    name: str = ""
    default: str = ""
    panel: str | None = None

    @property
    def option(self) -> str:
        """``--label``."""
        return self.name or "--" + self.setting.rpartition(".")[2].replace("_", "-")

    @property
    def short_option(self) -> str:
        """Of ``--this/--not-this``, the first."""
        return self.option.partition("/")[0]

    @property
    def parameter(self) -> inspect.Parameter:
        """As typer reads a function's parameters."""
        info = typer.Option(
            self.option,
            help=self.help,
            metavar=self.form.metavar,
            show_default=self.default or False,
            rich_help_panel=self.panel,
            autocompletion=None if self.form.words is None else self._completions,
        )
        return inspect.Parameter(
            self.setting.replace(".", "_"),
            inspect.Parameter.KEYWORD_ONLY,
            default=None,
            annotation=Annotated[self.form.type | None, info],
        )

    def _completions(self, incomplete: str) -> list[str]:
        words = () if self.form.words is None else self.form.words()
        return [word for word in words if word.startswith(incomplete)]

    def names(self, key: str) -> bool:
        """Whether a sentence means this setting by ``key``."""
        return key in (self.setting, self.setting.rpartition(".")[2]) or key.endswith(f".{self.setting}")

    def words(self, value: Any) -> list[str]:
        """The option with a value, as words of a command line."""
        if self.form in (SWITCH, SWITCH_OFF):
            on = value if self.form == SWITCH else not value
            return [self.short_option] if on else []
        text = self.form.write(value)
        # What begins with a hyphen would be taken for an option.
        return [f"{self.short_option}={text}"] if text.startswith("-") else [self.short_option, text]


class OptionTable:
    """Rows, in the order of the help text.

    Args:
        rows: One for each option.
    """

    def __init__(self, *rows: Option) -> None:
        self.rows = rows

    def without(self, *settings: str) -> OptionTable:
        """The table without the rows of ``settings``."""
        return OptionTable(*(row for row in self.rows if row.setting not in settings))

    def with_default(self, setting: str, default: str) -> OptionTable:
        """The table with another default in the help text of a row."""
        rows = (replace(row, default=default) if row.setting == setting else row for row in self.rows)
        return OptionTable(*rows)

    def row(self, key: str) -> Option | None:
        """The row of a setting, or None."""
        return next((row for row in self.rows if row.names(key)), None)

    def command_line(self, values: Mapping[str, Any], *settings: str) -> list[str]:
        """The options that stand for ``values``, which are nested as in YAML.

        Args:
            values: What was set; what is missing or None has no option.
            settings: Those to name, in this order.
        """
        words: list[str] = []
        for setting in settings:
            value: Any = values
            for part in setting.split("."):
                value = value.get(part) if isinstance(value, Mapping) else None
            row = self.row(setting)
            if value is not None and row is not None:
                words += row.words(value)
        return words


@dataclass(frozen=True, slots=True)
class Given:
    """What of a table's options was given on the command line."""

    table: OptionTable
    values: Mapping[str, Any]
    """By the setting; None was not given."""

    def nested(self) -> dict[str, Any]:
        """The values that were given, nested as in YAML.

        Raises:
            UsageError: One cannot be read.
        """
        made: dict[str, Any] = {}
        for row in self.table.rows:
            value = self.values[row.setting]
            if value is None:
                continue
            *sections, name = row.setting.split(".")
            place = made
            for section in sections:
                place = place.setdefault(section, {})
            place[name] = row.form.read(value, row.short_option)
        return made

    def settings(self, schema: type[SettingsT], **more: Any) -> SettingsT:
        """The settings that the options stand for.

        Args:
            schema: Of them.
            more: Other fields, laid over what was given; sections are merged.

        Raises:
            UsageError: A value is of the wrong type, or options do not go together.
            ParameterError: A number is out of range.
        """
        from dpagent.schema.problems import SchemaError

        values = self.nested()
        for name, value in more.items():
            is_section = isinstance(value, dict) and isinstance(values.get(name), dict)
            values[name] = {**values[name], **value} if is_section else value
        try:
            return schema.checked(values)
        except SchemaError as error:
            is_out_of_range = all(each.is_out_of_range for each in error.problems)
            kind = ParameterError if is_out_of_range else UsageError
            raise kind("\n".join(map(self._sentence, error.problems))) from error

    def _sentence(self, problem: Problem) -> str:
        """What is wrong, with the option in place of the key."""

        parts = [str(part) for part in problem.location]
        paths = [".".join(parts[:end]) for end in range(len(parts), 0, -1)]
        row = next((row for path in paths for row in self.table.rows if row.setting == path), None)
        option = f"{named(row.setting)}: " if row is not None else ""
        return f"{option}{problem.complaint()}."


def with_options(**tables: OptionTable) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Make a command of a function that takes each table as one parameter, of type :class:`Given`."""

    def decorated(function: Callable[..., None]) -> Callable[..., None]:
        own = inspect.signature(function, eval_str=True).parameters.values()
        parameters: list[inspect.Parameter] = []
        for parameter in own:
            if parameter.name in tables:
                parameters += [row.parameter for row in tables[parameter.name].rows]
            else:
                parameters.append(parameter.replace(kind=inspect.Parameter.KEYWORD_ONLY))

        def command(**values: Any) -> None:
            arguments = {name: value for name, value in values.items() if name in function.__annotations__}
            for name, table in tables.items():
                given = {row.setting: values[row.parameter.name] for row in table.rows}
                arguments[name] = Given(table, given)
            with settings_named_by(_namer(*tables.values())):
                function(**arguments)

        command.__name__, command.__doc__ = function.__name__, function.__doc__
        vars(command)["__signature__"] = inspect.Signature(parameters)
        return command

    return decorated


def _namer(*tables: OptionTable) -> Callable[[str, object], str]:
    def name(key: str, value: object) -> str:
        row = next((found for table in tables if (found := table.row(key)) is not None), None)
        if row is None:
            return as_yaml(key, value)
        return row.short_option if value is None else shlex.join(row.words(value))

    return name
