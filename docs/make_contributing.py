"""Writes the worked examples into CONTRIBUTING.md as they stand in tests/examples.

Run it after a change to one: ``python docs/make_contributing.py``. A test compares.
"""

from __future__ import annotations

import re
from pathlib import Path

ROOT = Path(__file__).parents[1]
PAGE = ROOT / "CONTRIBUTING.md"
_MARK = re.compile(r"<!-- (tests/examples/[\w.]+) -->\n(?:\n?```python\n.*?```\n)?", re.DOTALL)


def render() -> str:
    """The page with every example as it is now."""
    return _MARK.sub(
        lambda mark: f"<!-- {mark[1]} -->\n\n```python\n{(ROOT / mark[1]).read_text('utf-8')}```\n",
        PAGE.read_text(encoding="utf-8"),
    )


if __name__ == "__main__":
    PAGE.write_text(render(), encoding="utf-8")
