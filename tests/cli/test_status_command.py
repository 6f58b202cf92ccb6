"""``dpagent status``: a real agent's status, read beside it, when it stops, when it is killed, and before."""

from __future__ import annotations

import itertools
import json
import os
import signal
import subprocess
import tempfile
from collections.abc import Iterable, Iterator
from contextlib import closing, contextmanager
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from brokers import Broker, wait_until
from children import PATIENCE_S
from clocks import MovableClock
from commands import Result, command_line, dpagent, dpagent_process
from daemons import agent_thread, attentive_daemons
from fleets import DIGITS, make_plan, run_agent, write_agent
from ledgers import DATA, charge_for, fragments, open_state
from observers import Announcer, in_an_hour

from agent.disclosed import disclosed
from agent.home_assistant import entities_of
from agent.overview import overview_of
from agent.profile import open_profile
from agent.sensors import Sensors
from agent.settings import AgentSettings, load_agent_settings, on_board
from agent.status import Doing, Link, RoundStatus, Status, StatusFile
from cli.status import lines_of
from dpagent.errors import ExitCode
from dpagent.protocol.messages import Receipts
from dpagent.protocol.receipts import receipt_digest
from dpagent.protocol.sealing import Opener, new_sealing_secret
from dpagent.protocol.signing import Signer
from dpagent.protocol.weights import weights_to_bytes

KEY = Signer(bytes(range(32)), "testers").public_key
SECRET = new_sealing_secret()
_numbers = itertools.count()


@pytest.fixture
def fleet() -> str:
    return f"watched-{next(_numbers)}"


@pytest.fixture
def announcer(mosquitto: Broker, fleet: str) -> Iterator[Announcer]:
    with attentive_daemons(), Announcer(mosquitto, fleet) as announcer:
        yield announcer


@pytest.fixture
def board(
    tmp_path: Path, mosquitto: Broker, announcer: Announcer, fleet: str, monkeypatch: pytest.MonkeyPatch
) -> Path:
    """An ``agent.yaml``, and a directory in memory as systemd gives one."""
    (tmp_path / "run").mkdir()
    monkeypatch.setenv("RUNTIME_DIRECTORY", str(tmp_path / "run"))
    return write_agent(tmp_path / "board", mosquitto, announcer.signer.public_key, fleet=fleet)


def status(file: Path, *options: str) -> Result:
    return dpagent("status", "--config", file, *options)


def values(file: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(status(file, "--json").stdout)
    return found


def lines(file: Path) -> dict[str, str]:
    """The text of each line, by its name."""
    return _by_name(status(file).stdout.splitlines())


def says(file: Path, name: str, words: str) -> bool:
    """Whether a line has some words: asked often, so without reading the settings anew each time."""
    return words in _by_name(lines_of(overview_of(_settings(file), Sensors()))).get(name, "")


@cache
def _settings(file: Path) -> AgentSettings:
    settings = load_agent_settings(file)
    return on_board(settings, open_profile(settings.profile).profile)


def _by_name(shown: Iterable[str]) -> dict[str, str]:
    return {line[:12].strip(): line[13:] for line in shown}


def test_a_round_is_seen_from_its_plan_to_its_receipts(announcer: Announcer, board: Path, fleet: str) -> None:
    opener = Opener(SECRET, fleet)
    plan = make_plan(
        fleet=fleet, sealing_key=opener.public_key, deadline=in_an_hour(), compute_slot_s=30.0,
        jitter_window_s=60.0,
    )  # fmt: skip
    name = f"1 of {plan.rounds} of job {plan.job.hex()[:8]} (dp-sgd)"
    with agent_thread(board) as agent:

        def turns_up(name: str, words: str) -> None:
            agent.clock.advance_until(lambda: says(board, name, words), f"{name}: {words}", 2.0)

        turns_up("awaits", f"a plan on dpagent/v1/{fleet}/plan")
        assert says(board, "agent", "runs, connected to mqtt://127.0.0.1:")
        assert lines(board)["budget"].startswith("digits: ε = 0.000 spent and 0.000 reserved of 4; 4.000 and")
        assert lines(board)["last receipt"] == "none yet"
        announcer.announce(plan)
        turns_up("awaits", "the model of the round, in chunks")
        assert lines(board)["round"] == f"{name}: model, offered"
        announcer.announce_model(weights_to_bytes(DIGITS.initial_weights(0), "float32"))
        turns_up("awaits", "the end of the time that training has, in ")
        assert lines(board)["round"] == f"{name}: train, charged"
        assert says(board, "budget", "reserved of 4")
        assert values(board)["accounts"][0]["epsilon_left"] < 4
        turns_up("awaits", "the times at which ")
        assert lines(board)["round"] == f"{name}: spooled"
        number = int(lines(board)["fragments"].split()[0])
        agent.clock.advance_until(lambda: len(set(announcer.fragments)) >= number, "all fragments", 10.0)
        turns_up("awaits", f"receipts for {number}")
        ids = {opener.open(message, b"j" * 16).id for message in announcer.fragments}
        receipts = Receipts(b"".join(map(receipt_digest, sorted(ids)[:1])))
        announcer.publish(announcer.topics.receipts, announcer.signer.sign(receipts, "receipts"))
        turns_up("last receipt", "UTC")
        turns_up("fragments", "1 counted")
        rest = Receipts(b"".join(map(receipt_digest, sorted(ids))))
        announcer.publish(announcer.topics.receipts, announcer.signer.sign(rest, "receipts"))
        turns_up("awaits", "the next round")
        assert lines(board)["round"] == f"{name}: receipted"
        assert values(board)["runs"] is True
        assert status(board).returncode == ExitCode.OK
    assert status(board).returncode == ExitCode.CHILD
    assert lines(board)["agent"].startswith("stopped 20")
    assert values(board)["awaits"] == "nothing: no agent runs"


def test_an_agent_that_was_killed_is_not_said_to_run(board: Path, announcer: Announcer) -> None:
    with run_agent(board) as agent:
        wait_until(lambda: says(board, "agent", "runs, connected"), "the agent")
        before = values(board)["status"]
        assert before["program"]["pid"] == agent.process.pid
        assert values(board)["readings"]["agent_mib"] > 10
        agent.kill()
    result = status(board)
    assert result.returncode == ExitCode.CHILD
    assert "does not run: it was killed, or the machine lost power" in result.stdout
    # Another program has its number by now: this one.
    file = next(board.parent.parent.glob("run/dpagent-*.json"))
    file.write_text(json.dumps(before | {"program": before["program"] | {"pid": os.getpid()}}))
    assert says(board, "agent", "does not run")
    # And the machine was started again since.
    mine = before["program"] | {"pid": os.getpid(), "started": _started(), "boot": "another"}
    file.write_text(json.dumps(before | {"program": mine}))
    assert says(board, "agent", "does not run")
    file.write_text(json.dumps(before | {"program": mine | {"boot": before["program"]["boot"]}}))
    assert says(board, "agent", "runs, connected"), "so that these tests can fail"


def test_an_agent_in_another_container_is_not_said_to_be_dead(board: Path, announcer: Announcer) -> None:
    with agent_thread(board):
        wait_until(lambda: says(board, "agent", "runs"), "the agent")
        file = next(board.parent.parent.glob("run/dpagent-*.json"))
        known = json.loads(file.read_text())
    file.write_text(json.dumps(known | {"program": known["program"] | {"namespace": "pid:[1]"}}))
    assert says(board, "agent", "in another container, it seems")
    assert status(board).returncode == ExitCode.OK


def _started() -> int:
    return int(Path("/proc/self/stat").read_text().rpartition(")")[2].split()[19])


def test_a_board_on_which_none_has_run(tmp_path: Path) -> None:
    file = write_agent(tmp_path, None, KEY)
    result = status(file)
    assert (result.returncode, result.stderr) == (ExitCode.CHILD, "")
    assert lines(file)["agent"].startswith("none has run here since the machine was started")
    assert lines(file)["model"] == "none yet; it comes when a job is finished"
    assert "round" not in lines(file)
    assert "awaits" not in lines(file)
    assert says(file, "budget", "4.000 and δ = 0.0001 are left")


@pytest.mark.parametrize("content", [b"", b"{", b'{"link": "flying"}', bytes(70_000)])
def test_a_file_that_is_no_status_is_none(tmp_path: Path, content: bytes) -> None:
    file = write_agent(tmp_path, None, KEY)
    (tmp_path / "state" / "status.json").write_bytes(content)
    assert lines(file)["agent"].startswith("none has run here")


@pytest.mark.parametrize(
    "change", [{"mood": "serene"}, {"link": "flying"}, {"topic": None}], ids=["more", "another", "less"]
)
def test_an_agent_of_another_version_is_said_to_be_that(tmp_path: Path, change: dict[str, Any]) -> None:
    """As after an upgrade, until the service is started again. Before, none had run here."""
    file = write_agent(tmp_path, None, KEY)
    settings = _settings(file)
    StatusFile(settings.state_dir, MovableClock(1.0), {}).note(Status(Link.CONNECTED, "mqtt://here", "plans"))
    place = tmp_path / "state" / "status.json"
    known = json.loads(place.read_text())
    place.write_text(json.dumps(known | change))
    assert status(file).returncode == ExitCode.OK
    assert lines(file)["agent"].startswith("runs, but is of another version than this command")
    assert says(file, "awaits", "is not known")
    assert says(file, "memory", "the agent takes")
    assert says(file, "governor", "is not known") or "no `governor` is set" in lines(file)["governor"]
    assert values(file)["is_other"]
    metrics = dpagent("metrics", "--config", file).stdout
    assert "dpagent_agent_up 1.0" in metrics
    assert "dpagent_agent_connected" not in metrics
    board = {
        each.key: each.value for each in entities_of(disclosed(settings, overview_of(settings, Sensors())))
    }
    assert (board["running"], board["connected"]) == ("ON", None)
    found = json.loads(dpagent("doctor", "--config", file, "--no-broker", "--json", "-").stdout)["checks"]
    (agent,) = [each for each in found if each["check"] == "agent"]
    assert (agent["verdict"], "another version" in agent["finding"]) == ("warning", True)
    place.write_text(json.dumps(known | change | {"program": known["program"] | {"pid": 1 << 22}}))
    assert lines(file)["agent"] == "does not run; the last one was of another version"
    assert "awaits" not in lines(file)


def test_a_link_to_a_pipe_or_to_anothers_file_is_no_status(tmp_path: Path) -> None:
    file = write_agent(tmp_path, None, KEY)
    link = tmp_path / "state" / "status.json"
    os.mkfifo(tmp_path / "pipe")
    link.symlink_to(tmp_path / "pipe")
    assert lines(file)["agent"].startswith("none has run here")
    link.unlink()
    link.symlink_to(tmp_path / "gone")
    assert lines(file)["agent"].startswith("none has run here")


def test_a_board_without_a_ledger_says_how_it_begins(tmp_path: Path) -> None:
    file = write_agent(tmp_path, None, KEY)
    for each in (tmp_path / "state").iterdir():
        each.unlink()
    (tmp_path / "state").rmdir()
    result = status(file)
    assert result.returncode == ExitCode.CHILD
    assert says(file, "ledger", "ledger.db does not exist")
    assert not (tmp_path / "state").exists(), "a look makes nothing"


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can be another user for a while")
def test_another_users_board_is_said_to_be_that() -> None:
    with tempfile.TemporaryDirectory() as name:
        os.chmod(name, 0o755)  # noqa: PTH101
        file = write_agent(Path(name), None, KEY)
        (state := Path(name) / "state").chmod(0o700)
        os.seteuid(65_534)
        try:
            result = status(file)
        finally:
            os.seteuid(0)
    assert result.returncode == ExitCode.STORAGE
    assert f"{state} belongs to user 0, and this command runs as user 65534" in result.stderr
    assert "sudo" in result.stderr


def test_why_a_round_was_declined_is_said_and_why_one_is_noise_alone_is_not(tmp_path: Path) -> None:
    file = write_agent(tmp_path, None, KEY, budget={"epsilon": 50.0, "delta": 1e-3})
    with closing(open_state(tmp_path / "state")) as state:
        job = make_plan().job.hex()
        state.offer(job, 1, bytes(32), 1.0)
        state.decline(job, 1, "the price is too high", 2.0)
    assert says(file, "round", "declined: the price is too high")
    with closing(open_state(tmp_path / "state")) as state:
        plan = make_plan(round=2)
        state.offer(job, 2, bytes(32), 3.0)
        state.charge([charge_for(plan, DATA, state.ledger)], 4.0)
        state.spool_round(job, 2, fragments(1), 5.0, "record 17 is broken")
    assert "17 is" not in status(file).stdout + status(file, "--json").stdout
    assert says(file, "round", f"2 of job {job[:8]}: spooled")


def test_a_status_that_lags_behind_the_database_contradicts_it_in_nothing(tmp_path: Path) -> None:
    file = write_agent(tmp_path, None, KEY, budget={"epsilon": 50.0, "delta": 1e-3})
    plan = make_plan()
    trains = RoundStatus(plan.job.hex(), 1, 2, "dp-sgd", Doing.TRAIN, until=4e9, deadline=5e9)
    says_so = Status(Link.CONNECTED, "mqtt://broker", "plan", trains)
    StatusFile(tmp_path / "state", MovableClock(), {}).note(says_so)
    with closing(open_state(tmp_path / "state")) as state:
        state.offer(plan.job.hex(), 1, bytes(32), 3.0)
        state.charge([charge_for(plan, DATA, state.ledger)], 4.0)
        assert lines(file)["round"].endswith(": train, charged")
        assert says(file, "awaits", "the end of the time that training has, in ")
        state.spool_round(plan.job.hex(), 1, fragments(1), 5.0, None)
        assert lines(file)["round"].endswith(": spooled")
        assert lines(file)["awaits"] == "the times at which 3 of its fragments leave"


def test_it_goes_on_until_it_is_interrupted_and_a_pipe_gets_a_line_a_change(
    board: Path, announcer: Announcer
) -> None:
    with _watching(board) as watch:
        assert watch.stdout is not None
        assert "none has run here" in watch.stdout.readline()
        with run_agent(board) as agent:
            seen = []
            while not any("awaits a plan on" in line for line in seen):
                seen.append(watch.stdout.readline())
                assert seen[-1], "it ended"
            assert agent.stop() == ExitCode.OK
        assert "stopped" in watch.stdout.readline()
        watch.send_signal(signal.SIGINT)
        assert watch.wait(PATIENCE_S) == ExitCode.OK
        rest, errors = watch.communicate()
        assert (rest, errors) == ("", "")
    assert len(seen) == len({line[25:] for line in seen}), "no line is said twice"


def test_with_json_it_writes_an_object_a_line(board: Path) -> None:
    with _watching(board, "--json") as watch:
        assert watch.stdout is not None
        assert json.loads(watch.stdout.readline())["runs"] is False
        watch.send_signal(signal.SIGTERM)
        assert watch.wait(PATIENCE_S) == ExitCode.OK


def test_on_a_terminal_it_redraws_and_ends_with_0(board: Path) -> None:
    first, second = os.openpty()
    with subprocess.Popen(
        command_line("status", "--watch", "--config", board), stdin=second, stdout=second, stderr=second
    ) as watch:
        os.close(second)
        said = b""
        while b"model" not in said:
            said += os.read(first, 65_536)
        watch.send_signal(signal.SIGINT)
        assert watch.wait(PATIENCE_S) == ExitCode.OK
    os.close(first)
    assert b"none has run here" in said
    assert b"Traceback" not in said


@contextmanager
def _watching(file: Path, *options: str) -> Iterator[subprocess.Popen[str]]:
    command = command_line("status", "--watch", "--config", file, *options)
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as watch:
        try:
            yield watch
        finally:
            watch.kill()


def test_reading_takes_no_lock_and_changes_no_file(board: Path, announcer: Announcer) -> None:
    traced = (
        "import sys; sys.addaudithook(lambda event, args: event in ('fcntl.flock', 'fcntl.lockf')"
        " and sys.exit('took a lock'))"
    )
    with agent_thread(board) as agent:
        agent.clock.advance_until(lambda: says(board, "awaits", "a plan"), "the agent")
        before = _stamps(board)
        result = dpagent_process("status", "--config", board, before=traced)
        assert (result.returncode, result.stderr) == (ExitCode.OK, "")
        assert _stamps(board) == before


def _stamps(file: Path) -> dict[Path, int]:
    """When each file was last written, but for those that SQLite's readers and writers share."""
    found = file.parent.rglob("*")
    return {each: each.lstat().st_mtime_ns for each in found if each.suffix not in (".db-shm", ".db-wal")}
