"""Pages whose pictures a test does not look at."""

from __future__ import annotations

from typing import Any

import pytest
from matplotlib.figure import Figure


@pytest.fixture
def unrendered(monkeypatch: pytest.MonkeyPatch) -> None:
    """Pictures are drawn and not rendered: that takes half a second a page. ``test_page.py`` does it."""

    def savefig(self: Figure, stream: Any, **_options: Any) -> None:
        stream.write('<svg viewBox="0 0 1 1"></svg>')

    monkeypatch.setattr(Figure, "savefig", savefig)
