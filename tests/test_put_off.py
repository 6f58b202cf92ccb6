"""Modules whose code waits until something of them is used: whichever thread asks, there is one of them."""

from __future__ import annotations

import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest

from dpagent.put_off import put_off

NAME = "a_library_of_the_test"
LOADED: list[int] = []
"""One entry for each time that its code ran."""


@pytest.fixture
def library(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A module that is there to be loaded."""
    file = tmp_path / f"{NAME}.py"
    file.write_text(f"from {__name__} import LOADED\nLOADED.append(1)\nvalue = object()\n")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(sys, "dont_write_bytecode", True)
    LOADED.clear()
    yield file
    sys.modules.pop(NAME, None)


@pytest.fixture
def hurried() -> Iterator[None]:
    """Threads take turns after each few instructions."""
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    yield
    sys.setswitchinterval(before)


@pytest.mark.usefixtures("library", "hurried")
def test_threads_that_use_it_at_once_get_one_module() -> None:
    """Before, one in thirty times, a second thread took away the module that a first one was loading: that
    one got a KeyError, or there were two of them."""
    for _ in range(400):
        sys.modules.pop(NAME, None)
        LOADED.clear()
        put_off(NAME)
        assert LOADED == []
        stand_in, found, together = sys.modules[NAME], list[object](), threading.Barrier(6)

        def use(stand_in: ModuleType, found: list[object], together: threading.Barrier) -> None:
            together.wait(30)
            found.append(stand_in.value)

        threads = [threading.Thread(target=use, args=(stand_in, found, together)) for _ in range(6)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(30)
        assert found == [sys.modules[NAME].value] * 6
        assert LOADED == [1]


def test_one_that_cannot_be_loaded_says_so_at_each_use_until_it_can(library: Path) -> None:
    text = library.read_text()
    library.write_text("raise ValueError('not now')\n")
    put_off(NAME)
    stand_in = sys.modules[NAME]
    for _ in range(2):
        with pytest.raises(ValueError, match="not now"):
            _ = stand_in.value
    library.write_text(text)
    assert stand_in.value is sys.modules[NAME].value


def test_a_module_that_is_not_there_is_refused_at_once() -> None:
    with pytest.raises(ModuleNotFoundError, match="There is no module no_such_library"):
        put_off("no_such_library")
