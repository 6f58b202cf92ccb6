"""Pages whose pictures a test does not look at."""

from __future__ import annotations

from typing import Any

import pytest
from matplotlib.figure import Figure

from simulation.report import device_pictures, round_pictures
from simulation.report.drawing import draw_picture


@pytest.fixture
def unrendered(monkeypatch: pytest.MonkeyPatch) -> None:
    """Pictures are drawn and not rendered: that takes half a second a page. ``test_page.py`` does it."""

    def savefig(self: Figure, stream: Any, **_options: Any) -> None:
        stream.write('<svg viewBox="0 0 1 1"></svg>')

    monkeypatch.setattr(Figure, "savefig", savefig)


@pytest.fixture
def undrawn(unrendered: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nor are they drawn, for what a page says beside them: a tenth of a second a page."""

    def empty(*words: Any) -> Any:
        return draw_picture(*words[:-1], lambda _figure: None)

    for module in (device_pictures, round_pictures):
        monkeypatch.setattr(module, "draw_picture", empty)
