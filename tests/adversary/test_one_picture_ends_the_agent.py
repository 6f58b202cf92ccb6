"""Attack: a picture that takes more memory than the board has, so that the agent is killed at each start.

Claim: a picture above the bound on pixels is refused before it is decoded, in a folder and in an archive,
before the agent starts and while it runs. It costs itself alone, and reading the data takes less than 32 MiB.

Power: there is no randomness. On the code of before the progressive JPEG of 8000 × 8000 pixels takes some 400
MiB at whatever size it is asked for, so the test fails each time; by chance it fails never.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import hostile_files as hostile
import pytest
from neighbours import look_again, opened_by_a_board
from peaks import read_all
from pictures import write, zip_of

SECTION: dict[str, Any] = {"size": [8, 8], "mode": "rgb", "folder": "."}
DECLARED: dict[str, Any] = {"kind": "images", "classes": 2, "images": SECTION}
MOST_MIB = 32


@pytest.mark.heavy
def test_a_progressive_jpeg_costs_itself_alone_and_no_memory(tmp_path: Path) -> None:
    files = {f"0/{number}.png": hostile.small_png() for number in range(3)}
    files["1/large.jpg"] = hostile.progressive()
    for name, data in files.items():
        write(tmp_path / "folder" / name, data)
    archive = zip_of(tmp_path / "x.zip", files)
    found = read_all(*({"path": str(path)} | DECLARED for path in (tmp_path / "folder", archive)))
    for one in found:
        assert (one["used"], one["read"]) == (4, 3)
        assert one["peak"] < MOST_MIB


@pytest.mark.heavy
def test_it_may_come_while_the_agent_runs(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    write(tmp_path / "0" / "1.png", hostile.small_png())
    records = opened_by_a_board(tmp_path, **DECLARED)
    write(tmp_path / "1" / "large.jpg", hostile.progressive())
    look_again(records)
    assert records.attempt(lambda data: sum(len(labels) for _, labels in data.readable_batches())) == 1
    assert "large.jpg: it is 8000 × 8000 pixels large; expected at most 8,388,608" in caplog.text
