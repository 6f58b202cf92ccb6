"""Mechanisms of the tests, where a plan can name them."""

from __future__ import annotations

from dataclasses import replace

import pytest

from dpagent.privacy.mechanisms.mechanism import CalibratedMechanism
from dpagent.privacy.mechanisms.registry import CALIBRATED, MECHANISMS
from dpagent.privacy.methods import DEFAULT_METHOD, METHODS


def plant(
    monkeypatch: pytest.MonkeyPatch, mechanism: type[CalibratedMechanism], noise: str = "planted"
) -> None:
    """Do what a mechanism's line in the registry does, and its line in the default method."""
    monkeypatch.setitem(MECHANISMS, mechanism.name, mechanism)
    monkeypatch.setitem(CALIBRATED, mechanism.name, mechanism)
    method = METHODS[DEFAULT_METHOD]
    more = replace(method, mechanisms=method.mechanisms | {noise: mechanism.name})
    monkeypatch.setitem(METHODS, DEFAULT_METHOD, more)
