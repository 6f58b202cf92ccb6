"""Modules of libraries that are seldom needed, whose code waits until something of them is used."""

from __future__ import annotations

import importlib
import sys
from importlib.util import find_spec
from threading import Lock
from types import ModuleType
from typing import Any, Final

_taking: Final = Lock()


def put_off(name: str) -> None:
    """Have an import of a module not run its code, unless it is loaded already: the first use of it does.

    ``importlib.util.LazyLoader`` is for a module that one place imports: in Python 3.11, a second import runs
    its code.

    Args:
        name: of the module, with those of its packages, which are imported.

    Raises:
        ModuleNotFoundError: there is no such module.

    >>> put_off("xmlrpc.client")
    >>> import xmlrpc.client
    >>> type(sys.modules["xmlrpc.client"]).__name__, xmlrpc.client.MAXINT, type(xmlrpc.client).__name__
    ('_PutOff', 2147483647, 'module')
    """
    if name in sys.modules:
        return
    spec = find_spec(name)
    if spec is None:
        raise ModuleNotFoundError(f"There is no module {name}.", name=name)
    sys.modules[name] = stand_in = _PutOff(name)
    stand_in.__spec__ = spec
    package, _, last = name.rpartition(".")
    if package:  # As an import does.
        setattr(sys.modules[package], last, stand_in)


class _PutOff(ModuleType):
    """In the place of a module until something of it is asked for."""

    def __getattr__(self, attribute: str) -> Any:
        name = self.__name__
        # Of threads that ask at once, a later one would take away the module that another is loading.
        with _taking:
            if sys.modules.get(name) is self:
                del sys.modules[name]
        return getattr(importlib.import_module(name), attribute)
