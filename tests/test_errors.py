"""Exit codes: every one has a meaning, and the documentation says the same."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from dpagent import errors
from dpagent.errors import (
    DpagentError,
    ExitCode,
    ParameterError,
    require_between,
    require_count,
    require_positive,
)

PAGE = Path(__file__).parents[1] / "docs" / "exit-codes.md"


def _subclasses(kind: type[DpagentError]) -> set[type[DpagentError]]:
    return {kind}.union(*(_subclasses(child) for child in kind.__subclasses__()))


@pytest.mark.parametrize("code", ExitCode)
def test_every_code_has_a_sentence(code: ExitCode) -> None:
    assert re.fullmatch(r"[A-Z].{10,200}\.", code.meaning)


def test_no_two_codes_mean_the_same() -> None:
    assert len({code.meaning for code in ExitCode}) == len(ExitCode)


def test_codes_are_never_changed() -> None:
    assert {code.name: code.value for code in ExitCode} == {
        "OK": 0, "INTERNAL": 1, "USAGE": 2, "CONFIGURATION": 3, "DATA": 4, "LEDGER": 5, "BROKER": 6,
        "STATE_IN_USE": 7, "STORAGE": 8, "PLAN": 9, "CHILD": 10, "CLUSTER": 11, "INTERRUPTED": 130,
    }  # fmt: skip


@pytest.mark.parametrize("kind", [getattr(errors, name) for name in dir(errors) if name.endswith("Error")])
def test_every_error_leads_to_a_code_that_is_no_success(kind: type[DpagentError]) -> None:
    assert issubclass(kind, DpagentError)
    assert kind.exit_code in ExitCode
    assert kind.exit_code != ExitCode.OK
    assert kind in _subclasses(DpagentError)


def test_only_the_base_stands_for_the_unforeseen() -> None:
    kinds = {kind for kind in _subclasses(DpagentError) if kind.__module__ == "dpagent.errors"}
    assert {kind for kind in kinds if kind.exit_code == ExitCode.INTERNAL} == {DpagentError}


def test_the_page_lists_every_code_and_no_other() -> None:
    cells = re.findall(
        r"^\|\s*`?(\d+)`?\s*\|\s*`?([A-Z_]+)`?\s*\|\s*(.*?)\s*\|", PAGE.read_text("utf-8"), re.MULTILINE
    )
    assert [(int(number), name, meaning) for number, name, meaning in cells] == [
        (code.value, code.name, code.meaning) for code in ExitCode
    ]


@pytest.mark.parametrize("value", [0, -1, float("nan"), float("inf"), True, "1", None])
def test_what_is_not_positive_is_named_with_its_value(value: float) -> None:
    with pytest.raises(ParameterError, match=re.escape(f"clip norm is {value!r}; expected")):
        require_positive("clip norm", value)


def test_intervals_are_open_and_closed_as_asked() -> None:
    assert require_between("rate", 1, 0, 1) == 1.0
    assert require_between("rate", 0, 0, 1) == 0.0
    with pytest.raises(ParameterError, match=re.escape("in (0, 1]")):
        require_between("rate", 0, 0, 1, low_open=True)
    with pytest.raises(ParameterError, match=re.escape("in [0, 1)")):
        require_between("rate", 1, 0, 1, high_open=True)


@pytest.mark.parametrize("value", [0, 11, True, 1.0, "1"])
def test_counts_are_whole_numbers_in_range(value: int) -> None:
    assert require_count("rounds", 10, maximum=10) == 10
    with pytest.raises(ParameterError, match=f"rounds is {value!r}; expected a whole number"):
        require_count("rounds", value, maximum=10)


def test_integers_beyond_floating_point_are_refused_in_one_line() -> None:
    for check in (require_positive, require_count):
        with pytest.raises(ParameterError, match=r"^rounds is an integer of 33,220 bits; expected"):
            check("rounds", 10**10_000, maximum=10)
    with pytest.raises(ParameterError, match=r"^rate is an integer of 33,220 bits; expected"):
        require_between("rate", -(10**10_000), 0, 1)
