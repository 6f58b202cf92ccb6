"""What several adversaries play against."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from devices import KEY, started_trainer, worker_of
from fleets import write_agent
from pictures import folder_of

from agent.settings import load_agent_settings
from agent.worker import Worker


@pytest.fixture
def worker(tmp_path: Path) -> Iterator[Worker]:
    """A real training process of a board with ten grey pictures of 8×8 in ``photos``, a class each."""
    folder_of(tmp_path / "photos", *(f"{n}/a.png" for n in range(10)), width=8, height=8, channels=1)
    data: dict[str, Any] = {
        "path": str(tmp_path / "photos"), "kind": "images", "dtype": "uint8",
        "images": {"size": [8, 8], "mode": "grey", "folder": "."},
    }  # fmt: skip
    settings = load_agent_settings(write_agent(tmp_path, None, KEY, engine="numpy", data=data))
    started_trainer(settings)
    worker = worker_of(settings)
    yield worker
    worker.end()
    worker._looks.end()
