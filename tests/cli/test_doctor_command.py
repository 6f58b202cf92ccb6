"""``dpagent doctor``: each thing that is broken on a board or a coordinator is named in one line."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml
from brokers import Broker, wait_for
from commands import Result, dpagent
from fleets import digits, make_plan, write_agent, write_fleet
from ledgers import charge_for, open_state, tamper

from agent.charges import Budget, BudgetChange
from agent.diagnosis import _budget
from coordinator.keys import load_signer
from dpagent import storage
from dpagent.errors import ExitCode
from dpagent.learning.data.dataset import ArrayDataset
from dpagent.learning.data.formats.npz import save_npz
from dpagent.notation import upwards
from dpagent.protocol.messages import Plan
from dpagent.protocol.signing import Signer
from dpagent.protocol.topics import Topics
from dpagent.transport.events import Acknowledged, Connected
from dpagent.wording import counted

KEY = Signer(bytes(range(32)), "testers").public_key
STATE_BUDGET = Budget(4.0, 1e-4)


def doctor(file: Path, *options: str) -> Result:
    return dpagent("doctor", "--config", file, *options)


def checks(result: Result) -> dict[str, dict[str, Any]]:
    """The worst finding of each check."""
    order = ["skipped", "ok", "warning", "problem"]
    found: dict[str, dict[str, Any]] = {}
    for each in json.loads(result.stdout)["checks"]:
        before = found.get(each["check"])
        if before is None or order.index(each["verdict"]) > order.index(before["verdict"]):
            found[each["check"]] = each
    return found


def of_board(file: Path) -> dict[str, dict[str, Any]]:
    """What is found of a board without its broker."""
    return checks(doctor(file, "--no-broker", "--json", "-"))


def only(found: dict[str, dict[str, Any]], check: str, verdict: str = "problem") -> str:
    """The text of the one finding that is not well."""
    names = [name for name, each in found.items() if each["verdict"] in ("warning", "problem")]
    assert names == [check], found
    assert found[check]["verdict"] == verdict
    return str(found[check]["finding"]) + str(found[check]["remedy"])


@pytest.fixture
def board(tmp_path: Path) -> Path:
    return write_agent(tmp_path, None, KEY)


def test_a_board_without_a_fault_has_none(board: Path) -> None:
    result = doctor(board, "--no-broker")
    assert (result.returncode, result.stderr) == (0, "")
    lines = result.stdout.splitlines()
    assert lines[-1] == "Nothing is wrong."
    assert any("digits: 50 records" in line for line in lines)
    assert any("ε = 4.000 of 4 is left" in line for line in lines)
    assert not any("→" in line for line in lines)


def test_nothing_on_the_board_is_changed(board: Path) -> None:
    def content() -> dict[Path, tuple[bytes, int]]:
        # Whoever reads a database that is written ahead makes these two, if they are not there.
        files = [file for file in board.parent.rglob("*") if file.suffix not in (".db-shm", ".db-wal")]
        return {file: (file.read_bytes(), file.stat().st_mtime_ns) for file in files if file.is_file()}

    before = content()
    doctor(board, "--no-broker")
    assert content() == before


# --- the governor ---


def test_what_the_governor_sees_is_said_and_whether_it_would_train(tmp_path: Path) -> None:
    now = time.time()
    hours = [f"{time.strftime('%H:%M', time.localtime(now + 3_600 * n))}" for n in (2, 3, 23)]
    closed, opened = f"{hours[0]}-{hours[1]}", f"{hours[2]}-{hours[0]}"
    board = write_agent(tmp_path, None, KEY, governor={"hours": [closed], "highest_load": 1.0})
    found = only(of_board(board), "governor", "warning")
    assert "no round would begin now" in found
    assert closed in found
    assert "other programs take" in found
    command = ["/bin/sh", "-c", "echo it rains; exit 4"]
    board = write_agent(tmp_path, None, KEY, governor={"hours": [opened], "command": command})
    assert "sh says no: it rains" in only(of_board(board), "governor", "warning")
    board = write_agent(tmp_path, None, KEY, governor={"hours": [opened]})
    assert "a round would begin now" in of_board(board)["governor"]["finding"]


def test_a_limit_on_the_disk_of_the_records_is_named_and_the_agent_does_not_start(tmp_path: Path) -> None:
    board = write_agent(tmp_path, None, KEY, governor={"least_free_disk_mib": 1})
    assert "least_free_disk_mib is 1" in only(of_board(board), "governor")
    result = dpagent("run", "--config", board)
    assert result.returncode == ExitCode.CONFIGURATION
    assert "least_free_disk_mib is 1" in result.stderr


# --- files ---


@pytest.mark.parametrize(
    ("text", "words"),
    [
        (None, "No such file"),
        ("fleet: [", "not valid YAML"),
        ("fleet: meadow\n", "is no agent.yaml, fleet.yaml, mixer.yaml or job file"),
        ("fleet: meadow\ncoordinator_key: x\ndata: {}\n", "coordinator_key"),
    ],
)
def test_a_configuration_that_cannot_be_used_is_named(tmp_path: Path, text: str | None, words: str) -> None:
    file = tmp_path / "agent.yaml"
    if text is not None:
        file.write_text(text)
    result = doctor(file)
    assert result.returncode == ExitCode.CONFIGURATION
    assert result.stdout.startswith("PROBLEM  configuration ")
    assert words in result.stdout


def test_a_profile_that_does_not_fit_is_named(tmp_path: Path) -> None:
    (tmp_path / "mine.yaml").write_text("extends: generic-x86-64\nboard: {memory_mib: 99999999}\n")
    file = write_agent(tmp_path, None, KEY, profile="mine.yaml")
    assert "mine.yaml is for 99,999,999" in only(of_board(file), "board memory")
    assert doctor(file, "--no-broker").returncode == ExitCode.CONFIGURATION
    (tmp_path / "mine.yaml").unlink()
    assert "No such file" in only(of_board(file), "profile")


def test_a_ledger_that_was_never_begun_or_is_damaged_is_named(board: Path) -> None:
    state = board.with_name("state")
    tamper(state / "ledger.db", "UPDATE entries SET body = replace(body, '4.0', '5.0')")
    assert "entry 1" in only(of_board(board), "ledger").lower()
    assert doctor(board, "--no-broker").returncode == ExitCode.LEDGER
    (state / "ledger.db").unlink()
    assert "it was deleted or lost" in only(of_board(board), "ledger")
    board.with_name("state.head").unlink()
    assert "`dpagent budget init`" in only(of_board(board), "ledger")


def test_a_second_head_that_is_missing_is_named(board: Path) -> None:
    board.with_name("state.head").unlink()
    assert "second head" in only(of_board(board), "ledger")


def test_a_budget_that_only_the_file_has_is_named(board: Path) -> None:
    values = yaml.safe_load(board.read_text())
    board.write_text(yaml.safe_dump(values | {"budget": {"epsilon": 9.0, "delta": 1e-4}}))
    assert "ε = 9" in only(of_board(board), "budget")


def test_what_is_left_of_the_budget_is_told_in_jobs(board: Path) -> None:
    plan = make_plan()
    with closing(open_state(board.with_name("state"), STATE_BUDGET)) as state:
        charge = charge_for(plan, digits(0, 50), state.ledger)
        state.offer(charge.job, charge.round, bytes(32), 0.0)
        state.charge([charge], 0.0)
        price = state.ledger.accounts.reserved("digits").epsilon
    values = yaml.safe_load(board.read_text())
    for delta, by_delta in ((1e-4, 9), (3e-5, 2)):
        board.write_text(yaml.safe_dump(values | {"budget": {"epsilon": 4.0, "delta": delta}}))
        text = str(of_board(board)["budget"]["finding"])
        assert f"for {min(int((4.0 - price) / price), by_delta)} job" in text
        assert f"(ε = {upwards(price)}, δ = 1e-5)" in text
    # Just as much as is reserved: nothing is left.
    board.write_text(yaml.safe_dump(values | {"budget": {"epsilon": price, "delta": 1e-4}}))
    assert "nothing is left" in only(of_board(board), "budget")
    board.write_text(yaml.safe_dump(values | {"budget": {"epsilon": price * 1.05, "delta": 1e-4}}))
    assert "train no more" in only(of_board(board), "budget", "warning")


@pytest.mark.parametrize("jobs", range(2, 30))
@pytest.mark.parametrize("epsilon", [0.1, 0.7, 1.1])
def test_as_many_jobs_are_told_as_admission_takes(epsilon: float, jobs: int) -> None:
    """One has run. 0.3 − 0.1 is less than 2·0.1 in numbers of the computer, and admission takes all three."""
    budget, price = Budget(jobs * epsilon, jobs * 1e-5), Budget(epsilon, 1e-5)
    known = BudgetChange("digits", budget.epsilon, budget.delta)
    finding = _budget("digits", budget, known, price, price)
    assert f"for {counted(jobs - 1, 'job')} like the last one" in finding.text


def test_a_round_that_was_declined_is_told_with_its_reason(board: Path) -> None:
    with closing(open_state(board.with_name("state"), STATE_BUDGET)) as state:
        state.offer("6a" * 16, 3, bytes(32), 0.0)
        state.decline("6a" * 16, 3, "the method is central", 0.0)
    text = only(of_board(board), "rounds", "warning")
    assert "round 3 of job 6a6a6a6a was declined: the method is central" in text


# --- data ---


def test_data_that_are_not_there_or_too_many_or_none_are_named(board: Path) -> None:
    data = board.with_name("data.npz")
    save_npz(data, digits(0, 61))
    assert "data.max_records is 60" in only(of_board(board), "data")
    assert doctor(board, "--no-broker").returncode == ExitCode.DATA
    save_npz(data, ArrayDataset(np.zeros((0, 8, 8, 1), np.float32), np.zeros(0, np.int64), 10))
    assert "noise alone" in only(of_board(board), "data", "warning")
    data.write_bytes(b"PK\x03\x04 not really")
    assert "data.npz" in only(of_board(board), "data")
    data.unlink()
    assert "There is no file" in only(of_board(board), "data")


# --- broker and plan ---


def test_a_disk_without_room_for_the_rows_is_named_before_the_agent_starts(
    board: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(storage, "SPACE_LEFT", 1 << 60)
    found = of_board(board)
    assert found["data"]["verdict"] == "problem"
    assert "the rows of 60 records" in found["data"]["finding"]
    assert doctor(board, "--no-broker").returncode == ExitCode.STORAGE
    assert not (board.with_name("state") / "records.rows").exists(), "nothing is taken by a look"


@contextmanager
def announced(broker: Broker, fleet: str, payload: bytes) -> Iterator[None]:
    """A retained plan, taken back afterwards."""
    with broker.session(f"announcer-{fleet}") as session:
        wait_for(session, Connected)
        for message in (payload, b""):
            session.publish(Topics(fleet).plan, message, retain=True)
            wait_for(session, Acknowledged)
            if message:
                yield


def signed(fleet: str, **changes: Any) -> tuple[str, bytes]:
    signer = Signer(bytes(range(32)), fleet)
    plan: Plan = make_plan(fleet=fleet, **changes)
    return signer.public_key, signer.sign(plan, "plan")


def with_plan(
    tmp_path: Path, broker: Broker, fleet: str, payload: bytes, key: str, **changes: Any
) -> dict[str, dict[str, Any]]:
    file = write_agent(tmp_path, broker, key, fleet=fleet, **changes)
    with announced(broker, fleet, payload):
        return checks(doctor(file, "--json", "-"))


def test_a_broker_that_is_away_is_named_and_what_follows_is_not_tried(
    tmp_path: Path, new_broker: Any
) -> None:
    file = write_agent(tmp_path, new_broker(), KEY)
    result = doctor(file)
    assert result.returncode == ExitCode.BROKER
    found = checks(doctor(file, "--json", "-"))
    assert "nothing listens" in only(found, "port")
    assert all(found[check]["verdict"] == "skipped" for check in ("TLS", "login", "topics", "plan"))


def test_a_plan_of_this_fleet_is_found_within_the_limits(tmp_path: Path, mosquitto: Broker) -> None:
    key, payload = signed("well")
    found = with_plan(tmp_path, mosquitto, "well", payload, key)
    assert {each["verdict"] for each in found.values()} == {"ok"}
    assert "round 1 of job 6a6a6a6a, dp-sgd, is within this board's limits" in found["plan"]["finding"]


def test_no_plan_and_one_of_another_key_and_one_that_is_none_are_told_apart(
    tmp_path: Path, mosquitto: Broker
) -> None:
    file = write_agent(tmp_path / "none", mosquitto, KEY, fleet="silent")
    text = only(checks(doctor(file, "--json", "-")), "plan", "warning")
    assert "dpagent/v1/silent/plan" in text
    assert "`fleet` is another's name" in text
    _, payload = signed("other")
    text = only(with_plan(tmp_path / "key", mosquitto, "other", payload, _other_key()), "plan")
    assert "signed by another key than coordinator_key" in text
    assert "`dpagent coordinator key`" in text
    key, _ = signed("odd")
    text = only(with_plan(tmp_path / "odd", mosquitto, "odd", b"\x63 nonsense", key), "plan")
    assert "unsupported version" in text


def _other_key() -> str:
    return Signer(bytes(reversed(range(32))), "other").public_key


def test_a_plan_that_the_board_declines_is_told_with_the_key_of_the_limit(
    tmp_path: Path, mosquitto: Broker
) -> None:
    key, payload = signed("limited")
    found = with_plan(tmp_path, mosquitto, "limited", payload, key, limits={"maximum_sampling_rate": 0.001})
    assert "limits.maximum_sampling_rate" in only(found, "plan")


def test_a_plan_that_is_long_over_asks_for_the_clock(tmp_path: Path, mosquitto: Broker) -> None:
    key, payload = signed("late", deadline=time.time() - 7_300)
    text = only(with_plan(tmp_path, mosquitto, "late", payload, key), "plan", "warning")
    assert "was to end 2 hours ago" in text
    assert "clock" in text


def test_a_job_that_is_finished_is_no_fault(tmp_path: Path, mosquitto: Broker) -> None:
    key, payload = signed("over", state="finished")
    found = with_plan(tmp_path, mosquitto, "over", payload, key)
    assert "is finished; the board waits" in found["plan"]["finding"]


# --- the coordinator ---


def test_a_coordinator_without_a_fault_has_none(tmp_path: Path, mosquitto: Broker) -> None:
    file = write_fleet(tmp_path, mosquitto)
    result = doctor(file)
    assert result.returncode == 0, result.stdout
    assert "none yet" in result.stdout
    load_signer(tmp_path / "keys", "testers")
    assert "sealing.key is missing" in only(checks(doctor(file, "--no-broker", "--json", "-")), "keys")
    dpagent("coordinator", "key", "--config", file)


def test_keys_that_others_may_read_are_named(tmp_path: Path) -> None:
    file = write_fleet(tmp_path, None)
    for name in ("signing.key", "sealing.key"):
        (tmp_path / "keys").mkdir(exist_ok=True)
        (tmp_path / "keys" / name).write_bytes(bytes(32))
        (tmp_path / "keys" / name).chmod(0o600)
    assert doctor(file, "--no-broker").returncode == 0
    (tmp_path / "keys" / "sealing.key").chmod(0o644)
    assert "chmod 600" in only(checks(doctor(file, "--no-broker", "--json", "-")), "keys")


def test_test_data_that_are_missing_are_named(tmp_path: Path) -> None:
    file = write_fleet(tmp_path, None, test_data={"path": "missing.npz"})
    result = doctor(file, "--no-broker")
    assert result.returncode == ExitCode.DATA
    assert "PROBLEM  test data " in result.stdout
