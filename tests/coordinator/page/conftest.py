"""A coordinator's settings, with a job or without, and its page."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from fleets import write_fleet
from page_servers import PageServer
from stores import BLANK_MODEL, begin_job

from coordinator.measurements import Traffic
from coordinator.settings import FleetSettings, load_fleet_settings
from coordinator.store import RoundResult, Store
from dpagent.learning.inference.evaluation import Evaluation


@pytest.fixture
def settings(tmp_path: Path) -> FleetSettings:
    return load_fleet_settings(write_fleet(tmp_path / "fleet", None, mqtt={"url": "mqtt://nowhere.invalid"}))


@pytest.fixture
def store(settings: FleetSettings) -> Store:
    """A job with one closed round, and an open one."""
    store = begin_job(settings, BLANK_MODEL)
    store.start_round(1, 10.0, 70.0)
    evaluation = Evaluation(np.array([[3, 1], [0, 2]]), 0.5)
    store.close_round(
        1, BLANK_MODEL, RoundResult(evaluation, 0, 1.0, 2.5, 1.25, traffic=Traffic(700, 900)), closed_at=40.0
    )
    store.start_round(2, 41.0, 101.0)
    return store


@pytest.fixture
def page(settings: FleetSettings, tmp_path: Path) -> Iterator[PageServer]:
    with PageServer(settings, tmp_path / "fleet") as server:
        yield server
