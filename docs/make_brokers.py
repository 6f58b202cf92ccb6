"""Writes into ``brokers.md`` the table of what the suite saw on each broker, from ``docs/brokers/*.json``.

Run it after ``RECORD_BROKERS=1 make test-brokers``: ``python docs/make_brokers.py``. A test compares.
"""

from __future__ import annotations

import json
import re
from pathlib import Path

DOCS = Path(__file__).parent
PAGE = DOCS / "brokers.md"
_TABLE = re.compile(r"(<!-- observed -->\n\n).*?(\n\n<!-- end -->)", re.DOTALL)


def table() -> str:
    """A column for each broker and version, a row for each question."""
    records = [json.loads(file.read_text("utf-8")) for file in sorted((DOCS / "brokers").glob("*.json"))]
    questions = sorted({question for record in records for question in record["answers"]})
    rows = [["", *(f"{record['software']} {record['version']}" for record in records)]]
    rows.append(["---"] * len(rows[0]))
    for question in questions:
        rows.append([question, *(record["answers"].get(question, "not tried") for record in records)])
    return "\n".join(f"| {' | '.join(row)} |" for row in rows)


def render() -> str:
    """The page with the table as it is now."""
    return _TABLE.sub(lambda found: found[1] + table() + found[2], PAGE.read_text("utf-8"))


if __name__ == "__main__":
    PAGE.write_text(render(), "utf-8")
