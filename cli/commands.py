"""Commands that refuse the value of an option in our own words, whatever library reads the command line."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import typer
from typer.core import TyperCommand
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
            from pydantic import ValidationError

            if not isinstance(error.__cause__, ValidationError):
                raise  # Of a missing argument, for example: in typer's own words.
            from dpagent.configuration import complaint, is_out_of_range

            problem = error.__cause__.errors(include_url=False)[0]
            kind = ParameterError if is_out_of_range(problem) else UsageError
            raise kind(f"`{_shown(error)}`: {complaint(problem)}.") from error


class Commands(typer.Typer):
    """A group of commands, each of which is a :class:`Command`."""

    def command(
        self, name: str | None = None, *, cls: type[TyperCommand] | None = Command, **options: Any
    ) -> Callable[[CommandFunctionType], CommandFunctionType]:
        """As of ``typer.Typer``."""
        return super().command(name, cls=cls, **options)


def _shown(error: typer.BadParameter) -> str:
    """The option as it is written, or the argument as the help text calls it."""
    if error.param is None:
        return "value"
    option = max(error.param.opts, key=len)
    return option if option.startswith("-") else str(error.param.metavar or option.upper())
