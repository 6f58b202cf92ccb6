"""The model of a finished job reaches the board: whole, checked, kept with the one before, and told of."""

from __future__ import annotations

import contextlib
import itertools
import logging
import os
import signal
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from brokers import Broker, wait_until
from clocks import MovableClock
from daemons import agent_thread, attentive_daemons
from devices import worker_of
from exported_models import write_model
from fleets import agent_values, make_plan, write_agent
from kept_models import kept_here, written_once
from observers import Announcer

from agent.data_settings import DataSettings
from agent.diagnosis import examine
from agent.latest_model import LatestModel, previous_of
from agent.model_keeping import disagreements
from agent.settings import AgentSettings, load_agent_settings
from dpagent.diagnosis import Verdict
from dpagent.protocol.chunks import chunked, content_digest
from dpagent.protocol.messages import AssetTerms, Plan
from dpagent.protocol.signing import Signer
from dpagent.schema.problems import SchemaError

KEY = Signer(bytes(range(32)), "testers").public_key
_numbers = itertools.count()


def asset_of(data: bytes) -> AssetTerms:
    return AssetTerms(role="model", digest=content_digest(data), size=len(data))


def kept(latest: LatestModel, data: bytes) -> None:
    """Take a model, and see it written, or not."""
    latest.take(asset_of(data), data)
    wait_until(lambda: latest.tend() or not latest.is_writing, "the file")


def settings_in(directory: Path, **model: Any) -> AgentSettings:
    (directory / "state").mkdir(exist_ok=True)
    values = agent_values(None, KEY, state_dir=str(directory / "state"), model=model)
    return AgentSettings.checked(values)


@pytest.fixture
def clock() -> MovableClock:
    return MovableClock()


def test_a_plan_for_an_open_round_has_no_finished_model() -> None:
    model = asset_of(b"model").as_dict()
    assert make_plan(state="finished", assets=[model]).finished_model == asset_of(b"model")
    assert make_plan(state="finished").finished_model is None
    with pytest.raises(SchemaError, match="state is finished"):
        make_plan(assets=[model])


def test_a_model_replaces_the_one_before_which_stays_beside_it(tmp_path: Path, clock: MovableClock) -> None:
    latest = LatestModel(settings_in(tmp_path), clock)
    assert latest.file == tmp_path / "state" / "model.onnx"
    for data in (b"first", b"second", b"third"):
        assert latest.wants(asset_of(data))
        kept(latest, data)
        assert latest.file.read_bytes() == data
        assert not latest.wants(asset_of(data))
        clock.advance(700)
    assert previous_of(latest.file).read_bytes() == b"second"
    again = LatestModel(settings_in(tmp_path), clock)
    written = latest.file.stat().st_mtime_ns
    kept(again, b"third")
    assert latest.file.stat().st_mtime_ns == written, "the file is known again after a restart"
    assert previous_of(latest.file).read_bytes() == b"second"


def test_one_model_in_ten_minutes_is_written(tmp_path: Path, clock: MovableClock) -> None:
    latest = LatestModel(settings_in(tmp_path), clock)
    kept(latest, b"a")
    clock.advance(590)
    assert not latest.wants(asset_of(b"b"))
    clock.advance(20)
    assert latest.wants(asset_of(b"b"))


def test_a_model_that_cannot_be_written_is_told_once_and_left(
    tmp_path: Path, clock: MovableClock, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "file").touch()
    latest = LatestModel(settings_in(tmp_path, file=str(tmp_path / "file" / "model.onnx")), clock)
    with caplog.at_level(logging.INFO, "agent.latest_model"):
        kept(latest, b"a")
    assert not latest.wants(asset_of(b"a"))
    assert [record.levelname for record in caplog.records] == ["ERROR"]


def test_a_disk_with_little_room_keeps_it_for_the_ledger(
    tmp_path: Path, clock: MovableClock, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    kept_here(monkeypatch)
    monkeypatch.setattr("agent.model_keeping.SPACE_LEFT", 1 << 60)
    latest = LatestModel(settings_in(tmp_path), clock)
    kept(latest, b"a")
    assert not latest.file.exists()
    assert "Free some space" in caplog.text


def asked_for(directory: Path, clock: MovableClock) -> list[bool]:
    """When an agent would ask the broker for chunks, which shows: a model has come, those of others are
    missing, and after a restart those of the first as well."""
    directory.mkdir()
    asked, latest = [], LatestModel(settings_in(directory), clock)
    kept(latest, b"first")
    for data in (b"first", b"second", b"third"):
        for _ in range(15):
            if wants := latest.wants(asset_of(data)):
                latest.note_request(asset_of(data))
            asked.append(wants)
            clock.advance(60)
    again = LatestModel(settings_in(directory), clock)
    return [*asked, *(again.wants(asset_of(data)) for data in (b"first", b"second"))]


def test_what_is_asked_for_does_not_tell_whether_there_was_room(
    tmp_path: Path, clock: MovableClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    """How full a disk is follows from the records on it; before, an agent that had no room for the last model
    asked for the next one at once, and for the same one after a restart."""
    asked = asked_for(tmp_path / "roomy", clock)
    assert any(asked)
    assert not all(asked)
    kept_here(monkeypatch)
    monkeypatch.setattr("agent.model_keeping.SPACE_LEFT", 1 << 60)
    assert asked_for(tmp_path / "full", clock) == asked
    assert (tmp_path / "roomy/state/model.onnx").exists()
    assert not (tmp_path / "full/state/model.onnx").exists()


@pytest.mark.parametrize("has_room", [True, False])
def test_when_a_command_would_be_ending_does_not_tell_whether_there_was_room(
    tmp_path: Path, clock: MovableClock, monkeypatch: pytest.MonkeyPatch, has_room: bool
) -> None:
    """No round begins in that time where the owner asks for free memory, and no load is measured."""
    kept_here(monkeypatch)
    if not has_room:
        monkeypatch.setattr("agent.model_keeping.SPACE_LEFT", 1 << 60)
    latest = LatestModel(settings_in(tmp_path, command=["sleep", "600"]), clock)
    ending = []
    for data, seconds in ((b"first", 20), (b"second", 100)):  # The second one ends the first one's command.
        kept(latest, data)
        for _ in range(seconds):
            clock.advance(1.0)
            latest.tend()
            ending.append(latest.may_be_ending)
    latest.close()
    assert latest.file.exists() is has_room
    assert [second for second, is_ending in enumerate(ending) if is_ending] == [
        *range(4), *range(20, 24), *range(109, 114),
    ]  # fmt: skip


def test_nobody_waits_until_a_model_is_written(
    tmp_path: Path, clock: MovableClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A disk that is slow would show, and one that is full would not."""
    kept_here(monkeypatch)
    slow = written_once(monkeypatch)
    latest = LatestModel(settings_in(tmp_path), clock)
    for data in (b"first", b"second", b"third"):
        latest.take(asset_of(data), data)
        latest.tend()
    assert not latest.file.exists()
    clock.advance(700)
    assert latest.wants(asset_of(b"fourth")), "nor does what is asked for wait"
    slow.set()
    wait_until(lambda: latest.tend() or not latest.is_writing, "the file")
    assert latest.file.read_bytes() == b"third", "the last one, and not all that came meanwhile"
    assert previous_of(latest.file).read_bytes() == b"first"


def test_chunks_that_do_not_come_are_asked_for_a_few_times(tmp_path: Path, clock: MovableClock) -> None:
    latest = LatestModel(settings_in(tmp_path), clock)
    for _ in range(4):
        latest.note_request(asset_of(b"a"))
        assert latest.wants(asset_of(b"a"))
    latest.note_request(asset_of(b"a"))
    assert not latest.wants(asset_of(b"a"))


def test_several_models_that_do_not_come_are_asked_for_no_more_often(
    tmp_path: Path, clock: MovableClock
) -> None:
    """Two of them, announced in turn, had the broker send everything again 36 times in 7 s."""
    latest, asked = LatestModel(settings_in(tmp_path), clock), 0
    for number in range(60):
        asset = asset_of(b"ab"[number % 2 : number % 2 + 1] + bytes([number // 20]))
        if latest.wants(asset):
            latest.note_request(asset)
            asked += 1
        clock.advance(1.0)
    assert asked == 5
    clock.advance(600.0)
    assert latest.wants(asset_of(b"c"))


# --- what it says of its inputs ---

WALKS = {"features": ["ax", "ay"], "scale": 10.0, "window": 64}


@pytest.mark.parametrize(
    ("csv", "said"),
    [
        (WALKS, ""),
        (WALKS | {"stride": 8, "label": "what"}, ""),
        (
            WALKS | {"scale": 1},
            "data.csv.scale is 1.0 on this board, and its fleet's model was trained with 10.0",
        ),
        (WALKS | {"features": ["ay", "ax"]}, "data.csv.features is ['ay', 'ax']"),
    ],
)
def test_a_board_that_declares_other_inputs_than_the_model_is_told(
    tmp_path: Path, clock: MovableClock, caplog: pytest.LogCaptureFixture, csv: dict[str, Any], said: str
) -> None:
    file = write_model(tmp_path / "new.onnx", (64, 2), 3, inputs={"csv": WALKS})
    data = file.read_bytes()
    (tmp_path / "state").mkdir()
    declared = {"kind": "csv", "path": "walks", "classes": 3, "csv": csv, "shape": None, "dtype": None}
    values = agent_values(None, KEY, state_dir=str(tmp_path / "state"), data=declared)
    latest = LatestModel(AgentSettings.checked(values), clock)
    kept(latest, data)
    assert latest.file.read_bytes() == data
    warned = [record.getMessage() for record in caplog.records if record.levelname == "WARNING"]
    assert len(warned) == bool(said)
    assert said in "".join(warned)
    (finding,) = [
        one for one in examine(AgentSettings.checked(values), asks_broker=False) if one.check == "model"
    ]
    assert finding.verdict is (Verdict.WARNING if said else Verdict.OK)
    assert said in finding.text


@pytest.mark.parametrize(
    "data", [b"first", b"", bytes(99), b"\x72\x05\x0a\x03ab", b"\x72\xff\xff\xff\x7f", b"\x72\x80"]
)
def test_what_cannot_be_read_of_a_model_costs_a_sentence(data: bytes) -> None:
    settings = DataSettings.checked({"name": "x", "path": Path("x"), "kind": "csv", "csv": WALKS})
    assert len(disagreements(data, settings)) == bool(data)


# --- the owner's command ---


def test_the_owners_command_gets_the_path(tmp_path: Path, clock: MovableClock) -> None:
    told = tmp_path / "told"
    code = f"import shutil, sys; shutil.copy(sys.argv[1], {str(told)!r})"
    latest = LatestModel(settings_in(tmp_path, command=[sys.executable, "-c", code]), clock)
    kept(latest, b"new")
    wait_until(lambda: told.exists() and told.read_bytes() == b"new", "the command's copy")
    latest.close()


def test_what_the_command_has_started_ends_with_it(tmp_path: Path, clock: MovableClock) -> None:
    noted = tmp_path / "noted"
    shell = f"sleep 600 & echo $! > {noted}; wait"
    latest = LatestModel(settings_in(tmp_path, command=["/bin/sh", "-c", shell]), clock)
    kept(latest, b"new")
    wait_until(lambda: noted.exists() and noted.read_text().strip(), "the shell's child")
    child = int(noted.read_text())
    assert "sleep" in Path(f"/proc/{child}/cmdline").read_text()
    latest.close()
    wait_until(lambda: not is_running(child), "the end of the shell's child")


def test_the_command_stands_still_with_a_look_at_the_data(tmp_path: Path, clock: MovableClock) -> None:
    """It may read records, and the coordinator chooses when it runs: beside it, a trial takes longer, and
    training. Its minute counts without that time."""
    noted = tmp_path / "noted"
    shell = f"echo $$ >> {noted}; while :; do :; done"
    settings = settings_in(tmp_path, command=["/bin/sh", "-c", shell])
    latest = LatestModel(settings, clock)
    worker = worker_of(settings, latest)
    kept(latest, b"new")
    wait_until(lambda: noted.exists() and noted.read_text().strip(), "the command")
    command = int(noted.read_text())
    worker.hold_look()
    wait_until(lambda: state_of(command) == "T", "a command that stands still")
    clock.advance(61.0)
    latest.tend()
    worker.resume_look()
    wait_until(lambda: state_of(command) != "T", "a command that goes on")
    latest.tend()
    assert is_running(command), "its time is not over"
    worker.hold_look()
    clock.advance(601.0)
    kept(latest, b"newer")
    assert latest.processes == [command], "none begins meanwhile"
    worker.resume_look()
    latest.tend()
    wait_until(lambda: len(noted.read_text().split()) == 2, "the next command")
    latest.close()


def test_what_the_command_leaves_in_the_background_stands_still_and_ends_too(
    tmp_path: Path, clock: MovableClock, caplog: pytest.LogCaptureFixture
) -> None:
    """Before, a shell that had left a program behind was over, and the program went on beside training, at a
    higher priority."""
    noted = tmp_path / "noted"
    shell = f"while :; do :; done & echo $! > {noted}"
    latest = LatestModel(settings_in(tmp_path, command=["/bin/sh", "-c", shell]), clock)
    kept(latest, b"new")
    wait_until(lambda: noted.exists() and noted.read_text().strip(), "the shell's child")
    left = int(noted.read_text())
    try:
        wait_until(lambda: not is_running(os.getpgid(left)), "the shell's end")
        latest.tend()
        latest.hold()
        wait_until(lambda: state_of(left) == "T", "a program that stands still")
        clock.advance(61.0)
        latest.go_on()
        wait_until(lambda: state_of(left) == "R", "a program that goes on")
        latest.tend()
        assert "took more than" not in caplog.text, "its time is not over"
        clock.advance(91.0)
        latest.tend()
        wait_until(lambda: not is_running(left), "its end")
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.kill(left, signal.SIGKILL)
    assert "took more than 60 s and was ended; what it starts and is to go on" in caplog.text


def test_nobody_waits_until_a_command_is_gone_that_took_all_of_its_time(
    tmp_path: Path, clock: MovableClock
) -> None:
    """To give 400 MiB back takes a tenth of a second, in which the agent asked for nothing and read nothing:
    so who announced a plan then knew by what followed that the command had gone on."""
    noted = tmp_path / "noted"
    shell = f"echo $$ > {noted}; sleep 600"
    latest = LatestModel(settings_in(tmp_path, command=["/bin/sh", "-c", shell]), clock)
    kept(latest, b"new")
    wait_until(lambda: noted.exists() and noted.read_text().strip(), "the command")
    command = int(noted.read_text())
    clock.advance(91.0)
    latest.tend()
    assert Path(f"/proc/{command}").exists(), "nobody has waited for its end"
    assert latest.processes == [command]
    wait_until(lambda: latest.tend() or not latest.processes, "its end")
    assert not Path(f"/proc/{command}").exists()


def time_of_a_command(directory: Path, clock: MovableClock, *, written_after_s: int | None) -> list[bool]:
    """When the governor reckons with the end of a command, after a model has come that is written so much
    later; None: the disk has no room."""
    directory.mkdir()
    latest, may_be_ending = LatestModel(settings_in(directory, command=["/bin/true"]), clock), []
    with pytest.MonkeyPatch.context() as patch:
        kept_here(patch)
        written = written_once(patch)
        if written_after_s is None:
            patch.setattr("agent.model_keeping.SPACE_LEFT", 1 << 60)
        latest.take(asset_of(b"new"), b"new")
        for second in range(130):
            if second == (written_after_s or 0):
                written.set()
                wait_until(lambda: latest.tend() or not latest.is_writing, "the file")
            may_be_ending.append(latest.may_be_ending)
            clock.advance(1.0)
            latest.tend()
    latest.close()
    assert latest.file.exists() is (written_after_s is not None)
    return may_be_ending


def test_the_commands_time_does_not_tell_when_there_was_room(tmp_path: Path, clock: MovableClock) -> None:
    """No round begins, and no load is measured, where a command may be ending. Before, that counted from when
    the file was written, or was not: at once on a disk without room for it."""
    full = time_of_a_command(tmp_path / "full", clock, written_after_s=None)
    assert time_of_a_command(tmp_path / "quick", clock, written_after_s=0) == full
    assert time_of_a_command(tmp_path / "slow", clock, written_after_s=20) == full
    assert full == [second < 5 or 90 <= second < 95 for second in range(130)]


def test_where_memory_runs_out_the_command_ends_before_training(tmp_path: Path, clock: MovableClock) -> None:
    """It may read records, and take as much as they make it take, also while it stands still. Before, the
    system ended the training process where that was the larger one."""
    noted = tmp_path / "noted"
    shell = f"sleep 600 & echo $! > {noted}; wait"
    latest = LatestModel(settings_in(tmp_path, command=["/bin/sh", "-c", shell]), clock)
    kept(latest, b"new")
    wait_until(lambda: noted.exists() and noted.read_text().strip(), "the shell's child")
    child = int(noted.read_text())
    for process in (child, os.getpgid(child)):
        assert Path(f"/proc/{process}/oom_score_adj").read_text().strip() == "1000"
    latest.close()


def state_of(process: int) -> str:
    return Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[0]


def is_running(process: int) -> bool:
    try:
        return Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


@pytest.mark.parametrize(
    ("command", "words"),
    [
        (["/nowhere/reload"], "cannot be run"),
        ([sys.executable, "-c", "raise SystemExit(7)"], "ended with exit code 7"),
        ([sys.executable, "-c", "import time; time.sleep(600)"], "took more than 60 s and was ended"),
    ],
)
def test_a_command_that_fails_or_hangs_is_told_and_ends(
    tmp_path: Path, clock: MovableClock, caplog: pytest.LogCaptureFixture, command: list[str], words: str
) -> None:
    latest = LatestModel(settings_in(tmp_path, command=command), clock)
    began = time.monotonic()
    kept(latest, b"new")
    assert time.monotonic() - began < 10, "nobody waits for it"
    clock.advance(91.0 if "took more" in words else 0.0)

    def told() -> bool:
        latest.tend()
        return words in caplog.text

    wait_until(told, words)
    latest.tend()
    assert caplog.text.count(words) == 1
    latest.close()


# --- over a broker ---


@pytest.fixture
def fleet() -> Iterator[str]:
    with attentive_daemons():
        yield f"models-{next(_numbers)}"


@pytest.fixture
def announcer(mosquitto: Broker, fleet: str) -> Iterator[Announcer]:
    with Announcer(mosquitto, fleet) as announcer:
        yield announcer


def end_of_job(announcer: Announcer, fleet: str, data: bytes, *, sends: bytes | None = None) -> Plan:
    """Announce a model and the end of its job, as a coordinator does."""
    for chunk in chunked(data if sends is None else sends):
        named = chunk if sends is None else type(chunk)(content_digest(data), chunk.index, chunk.data)
        topic = announcer.topics.asset_chunk("model", chunk.index)
        announcer.publish(topic, announcer.signer.sign(named, "model"), retain=True)
    plan = make_plan(fleet=fleet, state="finished", assets=[asset_of(data).as_dict()])
    announcer.announce(plan)
    return plan


def test_the_model_of_a_finished_job_comes_to_the_board_also_after_a_restart(
    tmp_path: Path, mosquitto: Broker, announcer: Announcer, fleet: str
) -> None:
    data = bytes(range(256)) * 500  # three chunks
    file = write_agent(tmp_path, mosquitto, announcer.signer.public_key, fleet=fleet)
    model = load_agent_settings(file).model_file
    end_of_job(announcer, fleet, data)
    with agent_thread(file):
        wait_until(lambda: model.exists() and model.read_bytes() == data, "the model")
    model.unlink()
    with agent_thread(file):
        wait_until(model.exists, "the model once more")
    assert not previous_of(model).exists()


def test_a_model_that_is_not_what_was_signed_never_reaches_the_file(
    tmp_path: Path, mosquitto: Broker, announcer: Announcer, fleet: str, caplog: pytest.LogCaptureFixture
) -> None:
    file = write_agent(tmp_path, mosquitto, announcer.signer.public_key, fleet=fleet)
    model = load_agent_settings(file).model_file
    end_of_job(announcer, fleet, b"what was signed", sends=b"something else!")
    with agent_thread(file) as agent:
        agent.clock.advance_until(lambda: "did not come whole" in caplog.text, "giving up", step_s=5)
    assert not model.exists()


def test_a_model_beyond_the_limit_is_left(
    tmp_path: Path, mosquitto: Broker, announcer: Announcer, fleet: str
) -> None:
    data = bytes((1 << 20) + 1)
    file = write_agent(
        tmp_path, mosquitto, announcer.signer.public_key, fleet=fleet, limits={"maximum_model_mib": 1}
    )
    end_of_job(announcer, fleet, data)
    with agent_thread(file) as agent:
        for _ in range(20):
            agent.clock.advance(5)
            time.sleep(0.02)
    assert not load_agent_settings(file).model_file.exists()
