"""Another program of the code that runs here: the interpreter, its options, and a module."""

from __future__ import annotations

import subprocess
import sys


def program(module: str) -> list[str]:
    """The beginning of a command line, which imports from where this program does.

    Options of the interpreter go on (``-I``, ``-W``, ``-X dev``). A module that runs as the program, as in a
    checkout (``python -m cli.main``), has been looked for in the directory that it runs in, too; a script has
    not, and there may be folders that are called like the packages.

    Args:
        module: to be run.
    """
    given = subprocess._args_from_interpreter_flags()  # type: ignore[attr-defined]
    is_module = getattr(sys.modules["__main__"], "__spec__", None) is not None
    return [sys.executable, *given, *([] if is_module or sys.flags.safe_path else ["-P"]), "-m", module]
