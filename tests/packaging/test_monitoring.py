"""The alert rules, the dashboard and the metrics that both speak of: promtool looks; their names agree."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from pathlib import Path

import numpy as np
import pytest
from fleets import DIGITS, write_agent, write_fleet
from prometheus_client import generate_latest
from stores import begin_job

from agent.metrics import registry_of
from agent.overview import overview_of
from agent.profile import open_profile
from agent.sensors import Sensors
from agent.settings import load_agent_settings, on_board
from coordinator.keys import load_signer
from coordinator.measurements import Traffic
from coordinator.model_state import ModelState
from coordinator.page.metrics import Metrics
from coordinator.page.view import View
from coordinator.settings import load_fleet_settings
from coordinator.status import Link, StatusFile
from coordinator.store import RoundResult
from dpagent.clock import SystemClock
from dpagent.learning.inference.evaluation import Evaluation

MONITORING = Path(__file__).parents[2] / "packaging" / "monitoring"
_NAME = re.compile(r"\bdpagent_[a-z_]+\b")
_LABELS = {"dpagent_job"}
_SELDOM = {"dpagent_certificate_end_timestamp_seconds", "dpagent_agent_certificate_end_timestamp_seconds",
           "dpagent_round_members_taking_part", "dpagent_workers",
           "dpagent_worker_fragments_total"}  # fmt: skip
"""Where there are certificates, members, or workers."""


@pytest.fixture
def exposed(tmp_path: Path) -> tuple[str, str]:
    """The metrics of a coordinator in the middle of a job, and of a board."""
    settings = load_fleet_settings(write_fleet(tmp_path / "fleet", None))
    dimension = DIGITS.parameter_count
    model = ModelState(np.zeros(dimension, np.float32), np.zeros((1, dimension)), 1.0, ())
    store = begin_job(settings, model)
    store.start_round(1, 10.0, 70.0)
    evaluation = Evaluation(np.array([[3, 1], [0, 2]]), 0.5)
    result = RoundResult(evaluation, 0, 1.0, 2.5, 1.25, traffic=Traffic(700, 900))
    store.close_round(1, model, result, closed_at=40.0)
    store.start_round(2, 41.0, 101.0)
    store.reject("improbable norm", 3)
    status = StatusFile(settings.state_dir, "mqtt://here", SystemClock())
    status.link(Link.CONNECTED)
    status.note("round 2 of 2 is open", blocks=5, received=10, published=20)
    coordinator, _ = Metrics(settings, View(settings)).exposed("")
    key = load_signer(settings.keys_dir, settings.fleet).public_key
    loaded = load_agent_settings(write_agent(tmp_path / "board", None, key, 1))
    board = on_board(loaded, open_profile(loaded.profile).profile)
    agent = generate_latest(registry_of(board, lambda: overview_of(board, Sensors())))
    return coordinator.decode(), agent.decode()


def promtool(*arguments: str | Path, given: str = "") -> None:
    if shutil.which("promtool") is None:
        pytest.skip("promtool is not installed (Debian: prometheus)")
    command = ["promtool", *map(str, arguments)]
    done = subprocess.run(
        command, input=given, capture_output=True, text=True, timeout=60, cwd=MONITORING, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr


def test_promtool_accepts_rules_configuration_and_metrics(exposed: tuple[str, str]) -> None:
    promtool("check", "rules", "alerts.yaml")
    promtool("check", "config", "--syntax-only", "prometheus.yaml")
    for part in exposed:
        promtool("check", "metrics", given=part)


def test_each_alert_fires_when_it_should_and_not_before() -> None:
    promtool("test", "rules", "alerts_test.yaml")


@pytest.mark.parametrize("name", ["alerts.yaml", "dashboard.json"])
def test_they_speak_of_metrics_that_there_are(name: str, exposed: tuple[str, str]) -> None:
    there = {
        line.partition("{")[0].split()[0]
        for line in "".join(exposed).splitlines()
        if not line.startswith("#")
    }
    named = set(_NAME.findall((MONITORING / name).read_text(encoding="utf-8"))) - _LABELS
    assert named - there - _SELDOM == set()
    assert len(named) > 10


def test_the_dashboard_is_whole() -> None:
    dashboard = json.loads((MONITORING / "dashboard.json").read_text(encoding="utf-8"))
    panels = dashboard["panels"]
    assert len({panel["id"] for panel in panels}) == len(panels)
    for panel in panels:
        assert panel["title"]
        assert all(target["expr"] for target in panel["targets"])
    places = [(panel["gridPos"]["x"], panel["gridPos"]["y"]) for panel in panels]
    assert len(set(places)) == len(places)
