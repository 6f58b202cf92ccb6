"""What noise that is drawn inexactly adds to δ."""

from __future__ import annotations

import math

import pytest

from dpagent.privacy.accounting.imperfect_noise import imperfect_delta


def test_imperfect_noise() -> None:
    assert imperfect_delta(2.0, 1e-5, 0.0) == 1e-5
    assert imperfect_delta(2.0, 1e-5, 1e-6) == pytest.approx(1e-5 + (1 + math.exp(2)) * 1e-6)
    assert imperfect_delta(2.0, 1e-5, 1e-6) >= 1e-5 + (1 + math.exp(2)) * 1e-6
    assert imperfect_delta(1000.0, 0.0, 1e-30) == 1.0
    assert 0 < imperfect_delta(0.0, 0.0, 1e-300) < 1e-299
