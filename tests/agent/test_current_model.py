"""The model of a round reaches the board as a file: filled in, checked, and not too often."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from brokers import Broker, wait_until
from clocks import MovableClock
from commands import dpagent
from daemons import agent_thread
from exported_models import linear
from fleets import DIGITS, agent_values, make_plan, write_agent
from kept_models import kept_here
from lone_agents import charges, plan_for
from observers import Announcer

from agent.current_model import ROUND_KEY, current_model, weights_digest_of
from agent.latest_model import LatestModel, current_asset, previous_of
from agent.settings import AgentSettings, load_agent_settings
from dpagent.errors import DpagentError, ExitCode
from dpagent.learning.inference.export.model import export_onnx
from dpagent.learning.inference.model_bytes import weights_of, with_metadata
from dpagent.learning.inference.prediction.exported_model import ExportedModel
from dpagent.protocol.chunks import chunked, content_digest
from dpagent.protocol.messages import AssetTerms, Plan
from dpagent.protocol.signing import Signer
from dpagent.protocol.sizes import Precision
from dpagent.protocol.weights import weights_from_bytes, weights_to_bytes

CLOCK = MovableClock()
SIGNER = Signer(bytes(range(32)), "testers")
METADATA = {"dpagent.model": "digits", "dpagent.privacy": "ε = 2"}
EXPORT = export_onnx(DIGITS, np.zeros(DIGITS.parameter_count, np.float32), metadata=METADATA)


def sent(seed: int, precision: Precision = "float32") -> bytes:
    return weights_to_bytes(DIGITS.initial_weights(seed), precision)


def terms(weights: bytes, number: int = 2, export: bytes = EXPORT) -> dict[str, Any]:
    """Of a plan for a round with these weights."""
    asset = {"role": "export", "digest": content_digest(export), "size": len(export)}
    return {"round": number, "model": {"digest": content_digest(weights)}, "assets": [asset]}


@pytest.mark.parametrize("precision", ["float32", "int8"])
def test_the_file_is_the_one_that_a_coordinator_would_export(precision: Precision) -> None:
    weights = sent(1, precision)
    changes = terms(weights)
    changes["model"]["precision"] = precision
    file = current_model(make_plan(**changes), EXPORT, weights)
    values = weights_from_bytes(weights, DIGITS.parameter_count, precision)
    metadata = METADATA | {ROUND_KEY: "1", "dpagent.weights": content_digest(weights).hex()}
    exported = export_onnx(DIGITS, values, metadata={})
    assert file == with_metadata(exported, metadata)
    assert weights_digest_of(file) == content_digest(weights)
    assert weights_digest_of(exported) is None


@pytest.mark.parametrize(
    "export",
    [b"", b"rubbish", EXPORT[:-20_000], export_onnx(*linear((8, 8, 1), 10), metadata={})],
    ids=["nothing", "rubbish", "cut", "another architecture"],
)
def test_a_file_without_a_place_for_the_weights_is_refused(export: bytes) -> None:
    with pytest.raises(DpagentError):
        current_model(make_plan(**terms(sent(1))), export, sent(1))


@pytest.mark.parametrize("value", [np.nan, np.inf])
def test_weights_that_are_not_finite_are_refused(value: float) -> None:
    weights = weights_to_bytes(np.full(DIGITS.parameter_count, value, np.float32), "float32")
    with pytest.raises(DpagentError, match="not finite"):
        current_model(make_plan(**terms(weights)), EXPORT, weights)


# --- the file ---


def settings_in(directory: Path) -> AgentSettings:
    state = str(directory / "state")
    return AgentSettings.checked(
        agent_values(None, SIGNER.public_key, state_dir=state, model={"keep": "current"})
    )


@pytest.fixture
def latest(tmp_path: Path) -> LatestModel:
    (tmp_path / "state").mkdir()
    return LatestModel(settings_in(tmp_path), CLOCK)


def take(latest: LatestModel, seed: int) -> bool:
    """A round's model is there; whether it is taken."""
    weights = sent(seed)
    plan = make_plan(**terms(weights))
    if not latest.wants(current_asset(plan), is_finished=False):
        return False
    latest.take_current(plan, EXPORT, weights)
    finish(latest)
    return True


def finish(latest: LatestModel) -> None:
    def is_done() -> bool:
        latest.tend()
        return not latest.is_writing

    wait_until(is_done, "the file")


def seed_of(file: Path) -> int:
    found = weights_of(file.read_bytes(), DIGITS)
    return next(seed for seed in range(9) if np.array_equal(DIGITS.initial_weights(seed), found))


def test_one_model_of_a_round_in_ten_minutes_is_written_and_the_finished_one_waits_for_none(
    latest: LatestModel,
) -> None:
    assert take(latest, 1)
    CLOCK.advance(590)
    assert not take(latest, 2), "another round's"
    finished = AssetTerms(role="model", digest=content_digest(b"finished"), size=8)
    assert latest.wants(finished)
    CLOCK.advance(20)
    assert take(latest, 3)
    assert (seed_of(latest.file), seed_of(previous_of(latest.file))) == (3, 1)
    CLOCK.advance(610)
    assert not take(latest, 3), "the same one"
    latest.take(finished, b"finished")
    finish(latest)
    assert latest.file.read_bytes() == b"finished"
    assert seed_of(previous_of(latest.file)) == 3


def test_the_model_in_the_file_is_not_written_again_after_a_restart(
    latest: LatestModel, tmp_path: Path
) -> None:
    assert take(latest, 1)
    written = latest.file.stat()
    again = LatestModel(settings_in(tmp_path), CLOCK)
    assert take(again, 1), "whether it is asked for does not follow from the disk"
    assert latest.file.stat().st_mtime_ns == written.st_mtime_ns
    assert not previous_of(latest.file).exists()


@pytest.mark.parametrize("has_links", [True, False])
def test_the_model_before_stays_whole_and_is_written_once_where_the_disk_has_links(
    latest: LatestModel, monkeypatch: pytest.MonkeyPatch, has_links: bool
) -> None:
    if not has_links:
        kept_here(monkeypatch)
        monkeypatch.setattr(os, "link", _no_links)
    for seed in (1, 2, 3):
        before = latest.file.stat().st_ino if latest.file.exists() else 0
        assert take(latest, seed)
        CLOCK.advance(610)
    previous = previous_of(latest.file)
    assert (seed_of(latest.file), seed_of(previous)) == (3, 2)
    assert (previous.stat().st_ino == before) == has_links
    assert (
        sorted(file.name for file in latest.file.parent.iterdir()) == [previous.name, latest.file.name][::-1]
    )


def _no_links(*_: object) -> None:
    raise PermissionError(1, "Operation not permitted")


# --- over a broker ---


def announce(announcer: Announcer, plan: Plan, weights: bytes, export: bytes = EXPORT) -> None:
    """As a coordinator does that sets ``current_models``."""
    for chunk in chunked(export):
        topic = announcer.topics.asset_chunk("export", chunk.index)
        announcer.publish(topic, announcer.signer.sign(chunk, "model"), retain=True)
    announcer.announce_model(weights)
    announcer.announce(plan)


@pytest.mark.usefixtures("attentive")
@pytest.mark.parametrize("keep", ["current", "finished"])
def test_the_model_of_an_open_round_is_a_file_that_predict_takes_where_the_owner_wants_it(
    tmp_path: Path, mosquitto: Broker, announcer: Announcer, fleet: str, keep: str
) -> None:
    told = tmp_path / "told"
    file = write_agent(
        tmp_path / "device", mosquitto, announcer.signer.public_key, fleet=fleet,
        budget={"epsilon": 100.0, "delta": 1e-2},
        model={"keep": keep, "command": ["/bin/cp", "-t", str(told)]},
    )  # fmt: skip
    told.mkdir()
    weights = sent(5)
    model = load_agent_settings(file).model_file
    plan = plan_for(fleet, compute_slot_s=1.0, jitter_window_s=1.0, **terms(weights))
    announce(announcer, plan, weights)
    with agent_thread(file) as agent:
        wait_until(lambda: charges(file), "the charge, for which the file is not waited for")
        if keep == "finished":
            assert not model.exists()
            return
        agent.clock.advance_until(lambda: (told / model.name).exists(), "the owner's command", 0.05)
    assert seed_of(model) == 5
    assert ExportedModel(model).round == 1
    ran = dpagent("predict", "--latest", file.with_name("data.npz"), "--config", file, "--json", "-")
    assert ran.returncode == ExitCode.OK
    assert json.loads(ran.stdout)["model"]["round"] == 1


@pytest.mark.usefixtures("attentive")
def test_a_file_that_cannot_be_filled_in_ends_nothing(
    tmp_path: Path, mosquitto: Broker, announcer: Announcer, fleet: str, caplog: pytest.LogCaptureFixture
) -> None:
    file = write_agent(
        tmp_path / "device", mosquitto, announcer.signer.public_key, fleet=fleet,
        budget={"epsilon": 100.0, "delta": 1e-2}, model={"keep": "current"},
    )  # fmt: skip
    plan = plan_for(fleet, **terms(sent(5), export=b"rubbish"))
    announce(announcer, plan, sent(5), b"rubbish")
    with agent_thread(file) as agent:
        wait_until(lambda: "the latest model is not kept" in caplog.text, "a word on it")
        wait_until(lambda: charges(file), "the charge")
        announcer.announce(plan_for(fleet, **terms(sent(5), 3) | {"assets": []}))
        wait_until(lambda: "current_models" in caplog.text, "a word on the coordinator's configuration")
        assert agent.is_running
    assert not load_agent_settings(file).model_file.exists()
    assert caplog.text.count("is not kept") == 1
