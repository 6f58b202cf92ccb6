"""Commands that are imported when they are asked for, and that refuse the value of an option in our own
words, whatever library reads the command line."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from importlib import import_module
from typing import Any, ClassVar

import typer
from typer.core import TyperCommand, TyperGroup
from typer.models import CommandFunctionType

from dpagent.errors import ParameterError, UsageError


class Command(TyperCommand):
    """A command. A value that it cannot read ends with exit code 2, a number out of range with 9."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """As typer does, with errors of this project.

        Raises:
            UsageError: A value is of the wrong type.
            ParameterError: A number is out of range.
        """
        try:
            return super().parse_args(ctx, args)
        except typer.BadParameter as error:
            from cli.typed_values import problem_of

            if (problem := problem_of(error)) is None:
                raise  # Of a missing argument, for example: in typer's own words.
            kind = ParameterError if problem.is_out_of_range else UsageError
            raise kind(f"`{_shown(error)}`: {problem.complaint()}.") from error


class Commands(typer.Typer):
    """A group of commands, each of which is a :class:`Command`."""

    def command(
        self, name: str | None = None, *, cls: type[TyperCommand] | None = Command, **options: Any
    ) -> Callable[[CommandFunctionType], CommandFunctionType]:
        """As of ``typer.Typer``."""
        return super().command(name, cls=cls, **options)


class CommandsByName(TyperGroup):
    """A group whose commands are imported by name."""

    places: ClassVar[Mapping[str, str]] = {}
    """``module:attribute`` of each: a function, or a group of commands."""

    def list_commands(self, ctx: Any) -> list[str]:
        """The names, in their order."""
        return [*self.places]

    def get_command(self, ctx: Any, cmd_name: str) -> Any:
        """The command of a name, or None."""
        if cmd_name not in self.commands and cmd_name in self.places:
            self.commands[cmd_name] = _command_at(self.places[cmd_name], cmd_name)
        return self.commands.get(cmd_name)


@functools.cache
def _command_at(place: str, name: str) -> Any:
    """The command of a place, made once: the parameters of a group take longer than many commands."""
    module, _, attribute = place.partition(":")
    found = getattr(import_module(module), attribute)
    if isinstance(found, typer.Typer):
        command: Any = typer.main.get_group(found)
    else:
        alone = Commands(add_completion=False)
        alone.command()(found)
        command = typer.main.get_command(alone)
    command.name = name
    return command


def _shown(error: typer.BadParameter) -> str:
    """The option as it is written, or the argument as the help text calls it."""
    if error.param is None:
        return "value"
    option = max(error.param.opts, key=len)
    return option if option.startswith("-") else str(error.param.metavar or option.upper())
