"""What holds of every schema of the programs."""

from __future__ import annotations

import importlib
import re
from collections.abc import Iterator
from typing import Any

import pytest

from agent.governor_settings import GovernorSettings
from coordinator.database.settings import StoreSettings
from dpagent.schema.base import Schema, fields_of
from dpagent.schema.limits import Limits
from dpagent.schema.problems import SchemaError
from simulation.sweep.file import Vary

PLACES = (
    "agent.settings", "coordinator.budget_audit", "coordinator.page.app", "coordinator.settings",
    "mixer.settings", "dpagent.protocol.enrolment", "dpagent.protocol.tokens", "simulation.sweep.file",
)  # fmt: skip


def schemas() -> list[type[Schema]]:
    """All schemas of the programs."""
    for place in PLACES:
        importlib.import_module(place)
    return [each for each in below(Schema) if not each.__module__.startswith("test_")]


def below(base: type[Schema]) -> Iterator[type[Schema]]:
    for each in base.__subclasses__():
        yield each
        yield from below(each)


def test_what_is_made_of_nothing_is_checked_like_the_rest() -> None:
    """It takes a shorter way (:meth:`Schema.__init__`)."""
    found = [each for each in schemas() if len(each.defaults) == len(each.names) and each.names]
    assert {GovernorSettings, StoreSettings, Vary} <= set(found)
    for each in found:
        try:
            made = each.checked({})
        except SchemaError as error:
            with pytest.raises(SchemaError, match=re.escape(str(error))):
                each()
        else:
            assert (made, made.given) == (each(), each().given), each


def test_every_pattern_is_for_a_whole_text() -> None:
    patterns = {
        rule.pattern
        for each in schemas()
        for field in fields_of(each).values()
        for rule in _rules_in(field.annotation)
        if isinstance(rule, Limits) and rule.pattern is not None
    }
    assert len(patterns) > 10
    for pattern in patterns:
        assert pattern.startswith("^"), pattern
        assert pattern.endswith("$"), pattern


def _rules_in(annotation: Any) -> Iterator[Any]:
    yield from getattr(annotation, "__metadata__", ())
    for part in getattr(annotation, "__args__", ()):
        yield from _rules_in(part)
