"""The product as a person runs it: ``dpagent demo`` as a child process, real broker and all."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import commands
import pytest
from children import PATIENCE_S

from coordinator.reader import StoreReader
from dpagent.errors import StorageError

DEVICES, ROUNDS, FRAGMENTS = 2, 3, 16
MNIST = Path(__file__).parents[3] / "shared" / "data" / "mnist"
HAS_MOSQUITTO = shutil.which("mosquitto", path=f"{os.environ.get('PATH', '')}:/usr/sbin") is not None


def dpagent(*arguments: str, timeout: float = 120) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "cli.main", *arguments],
        capture_output=True,
        text=True,
        timeout=timeout,
        check=False,
    )


def demo_command(state_dir: Path, *more: str) -> list[str]:
    return [
        sys.executable, "-m", "cli.main", "demo", "--devices", str(DEVICES), "--rounds", str(ROUNDS),
        "--state-dir", str(state_dir), "--json", str(state_dir.parent / "results.json"), *more,
    ]  # fmt: skip


def processes_of(state_dir: Path) -> dict[int, str]:
    """Living processes that have the demo's directory on their command line."""
    found = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit() and int(entry.name) != os.getpid():
            try:
                command = (entry / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
            except OSError:
                continue
            if str(state_dir) in command:
                found[int(entry.name)] = command
    return found


def wait_for(condition: Callable[[], Any], what: str, timeout: float = PATIENCE_S) -> Any:
    until = time.monotonic() + timeout
    while time.monotonic() < until:
        if result := condition():
            return result
        time.sleep(0.1)
    pytest.fail(f"no {what} within {timeout:g} s")


@pytest.fixture
def started(tmp_path: Path) -> Iterator[Callable[..., subprocess.Popen[str]]]:
    children: list[subprocess.Popen[str]] = []

    def start(*more: str) -> subprocess.Popen[str]:
        child = subprocess.Popen(
            demo_command(tmp_path / "demo", *more), stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
        )
        children.append(child)
        return child

    yield start
    for child in children:
        if child.poll() is None:
            child.terminate()
            child.communicate(timeout=PATIENCE_S)


def rounds_closed(state_dir: Path) -> int:
    # Read here: `dpagent coordinator status` takes a second of a processor at each look.
    try:
        reader = StoreReader(state_dir / "coordinator" / "state")
    except StorageError:
        return 0
    with closing(reader):
        return sum(each.closed_at is not None for each in reader.rounds())


def check_whole_run(state_dir: Path, results: dict[str, Any]) -> None:
    """What must hold of every run, however rough it was."""
    assert len(results["accuracy_history"]) == ROUNDS
    fragments = results["fragments"]
    assert fragments["lost"] == 0
    assert fragments["charged"] == fragments["counted"] + fragments["expired"] + fragments["lost"]
    assert fragments["charged"] == DEVICES * ROUNDS * FRAGMENTS
    assert fragments["charged"] >= fragments["sent"] >= fragments["counted"]
    assert len(results["noise_cap"]["norm_kept"]) == ROUNDS
    assert all(0 < kept <= 1 for kept in results["noise_cap"]["norm_kept"])
    for number in range(1, DEVICES + 1):
        charges = verified_charges(state_dir, number)
        assert [charge["round"] for charge in charges] == list(range(1, ROUNDS + 1))
        assert charges[-1]["cumulative_epsilon"] == pytest.approx(epsilon_by_dp_accounting(charges), rel=0.01)
    leftovers = processes_of(state_dir)
    assert not leftovers


def verified_charges(state_dir: Path, number: int) -> list[dict[str, Any]]:
    """The charges in the ledger of a device, which verifies."""
    state = state_dir / f"device-{number:03d}" / "state"
    verified = commands.dpagent("budget", "verify", "--state-dir", state)
    assert verified.returncode == 0, verified.stderr
    exported = commands.dpagent("budget", "export", "--state-dir", state, "--json", "-")
    charges: list[dict[str, Any]] = json.loads(exported.stdout)["charges"]
    return charges


def epsilon_by_dp_accounting(charges: list[dict[str, Any]]) -> float:
    import dp_accounting
    from dp_accounting.pld import PLDAccountant

    accountant = PLDAccountant(value_discretization_interval=1e-3)
    for charge in charges:
        kind = {
            "discrete-gaussian": dp_accounting.GaussianDpEvent,
            "discrete-laplace": dp_accounting.LaplaceDpEvent,
        }
        event = kind[charge["mechanism"]](charge["noise_multiplier"])
        accountant.compose(
            dp_accounting.PoissonSampledDpEvent(charge["sampling_rate"], event), charge["steps"]
        )
    return float(accountant.get_epsilon(charges[-1]["delta"]))


@pytest.mark.parametrize(
    "broker",
    [
        "embedded",
        pytest.param(
            "mosquitto",
            marks=[pytest.mark.slow, pytest.mark.skipif(not HAS_MOSQUITTO, reason="needs mosquitto")],
        ),
    ],
)
def test_demo_trains_and_accounts(tmp_path: Path, broker: str) -> None:
    state_dir = tmp_path / "demo"
    # A relative state directory, as the default is.
    run = subprocess.run(
        demo_command(Path("demo"), "--broker", broker, "--report", "report", "--json", "results.json"),
        capture_output=True, text=True, timeout=200, check=False, cwd=tmp_path,
    )  # fmt: skip
    assert run.returncode == 0, run.stderr
    results = json.loads((tmp_path / "results.json").read_text())
    check_whole_run(state_dir, results)
    assert results["fragments"] == {
        "charged": DEVICES * ROUNDS * FRAGMENTS, "sent": DEVICES * ROUNDS * FRAGMENTS,
        "counted": DEVICES * ROUNDS * FRAGMENTS,
        "expired": 0, "duplicates": 0, "rejected": 0, "lost": 0,
    }  # fmt: skip
    privacy = results["privacy"]
    assert (privacy["unit"], privacy["adjacency"], privacy["trust"]) == (
        "record",
        "add-or-remove-one",
        "none",
    )
    statement = privacy["statement"]
    assert (statement["epsilon"], statement["delta"]) == (privacy["epsilon_target"], privacy["delta"])
    assert len(statement["assumptions"]) >= 2
    assert 0.99 * privacy["epsilon_target"] < privacy["epsilon_spent"][-1] <= privacy["epsilon_target"]
    assert privacy["noise_multipliers"] == sorted(privacy["noise_multipliers"], reverse=True)
    assert results["model"]["parameters"] == 9930
    assert results["baseline_accuracy"] == results["baseline_accuracy_history"][-1]
    # Some 5.5 bits a parameter up; a byte down with its scale, besides plans, receipts and, once, a graph.
    assert 9930 / 2 < results["bytes_per_device_round"]["up"] < 9930
    assert 9930 < results["bytes_per_device_round"]["down"] < 6 * 9930
    assert results["peak_memory_mib"]["agent_max"] > 20
    # The summary is of the same figures.
    assert f"{results['accuracy']:.2%}" in run.stdout
    assert f"{results['bytes_per_device_round']['up']:,}" in run.stdout
    page = (tmp_path / "report" / "index.html").read_text()
    assert page.count("<svg") >= 4
    assert re.search(rf"round +{ROUNDS}/{ROUNDS}", run.stderr)


def kill_the_coordinator_and_an_agent(state_dir: Path) -> None:
    for mark in ("coordinator run", "device-002/agent.yaml"):
        victims = [pid for pid, command in processes_of(state_dir).items() if mark in command]
        assert victims, mark
        for pid in victims:
            os.kill(pid, signal.SIGKILL)


@pytest.mark.slow
@pytest.mark.skipif(not HAS_MOSQUITTO, reason="needs mosquitto")
def test_laplace_noise_over_mosquitto_survives_kills_and_is_accounted_for(
    tmp_path: Path, started: Callable[..., subprocess.Popen[str]]
) -> None:
    """dp-accounting has Laplace noise in one dimension, whose price is no more than the vector's."""
    state_dir = tmp_path / "demo"
    demo = started(
        "--broker", "mosquitto", "--method", "incrementing", "--noise", "laplace", "--no-baseline",
        "--epsilon", "20",
    )  # fmt: skip
    wait_for(lambda: rounds_closed(state_dir) >= 1, "closed round")
    kill_the_coordinator_and_an_agent(state_dir)
    _, err = demo.communicate(timeout=200)
    assert demo.returncode == 0, err
    assert "clip norm 30 in L1 (whole)" in err
    results = json.loads((tmp_path / "results.json").read_text())
    assert results["privacy"]["statement"]["mechanism"] == "discrete-laplace"
    assert results["restarts"] >= 2
    assert results["fragments"]["counted"] == DEVICES * ROUNDS * FRAGMENTS
    assert "30 in L1" in (state_dir / "report" / "index.html").read_text()
    for number in range(1, DEVICES + 1):
        charges = verified_charges(state_dir, number)
        assert {charge["mechanism"] for charge in charges} == {"discrete-laplace"}
        spent = charges[-1]["cumulative_epsilon"]
        assert 0.9 * spent < epsilon_by_dp_accounting(charges) <= spent <= 20.0


@pytest.mark.slow
def test_killed_programs_go_on_where_they_were(
    tmp_path: Path, started: Callable[..., subprocess.Popen[str]]
) -> None:
    """SIGKILL to the coordinator and an agent in the middle: same counts, verified ledgers."""
    state_dir = tmp_path / "demo"
    demo = started()
    wait_for(lambda: rounds_closed(state_dir) >= 1, "closed round")
    kill_the_coordinator_and_an_agent(state_dir)
    out, err = demo.communicate(timeout=200)
    assert demo.returncode == 0, err
    results = json.loads((tmp_path / "results.json").read_text())
    check_whole_run(state_dir, results)
    assert results["restarts"] >= 2
    assert results["fragments"]["counted"] == DEVICES * ROUNDS * FRAGMENTS
    assert "started again" in out


@pytest.mark.parametrize("number", [signal.SIGINT, pytest.param(signal.SIGTERM, marks=pytest.mark.slow)])
def test_stopped_demo_leaves_nothing_behind_and_goes_on(
    tmp_path: Path, started: Callable[..., subprocess.Popen[str]], number: signal.Signals
) -> None:
    state_dir = tmp_path / "demo"
    demo = started("--no-baseline")
    wait_for(lambda: rounds_closed(state_dir) >= 1, "closed round")
    demo.send_signal(number)
    _, err = demo.communicate(timeout=PATIENCE_S)
    assert demo.returncode == 130
    assert "Traceback" not in err
    assert str(state_dir) in err.splitlines()[-1]
    assert not processes_of(state_dir)
    if number == signal.SIGINT:
        again = started("--no-baseline")
        _, err = again.communicate(timeout=200)
        assert again.returncode == 0, err
        assert re.search(rf"Goes on with the run in {re.escape(str(state_dir))} after round [1-9]", err)
        assert "round 1/" not in err
        check_whole_run(state_dir, json.loads((tmp_path / "results.json").read_text()))


def mixer_processes(state_dir: Path) -> list[int]:
    return [pid for pid, command in processes_of(state_dir).items() if "mixer run" in command]


@pytest.mark.slow
def test_demo_through_a_mixer_survives_its_end_and_goes_on_after_ctrl_c(
    tmp_path: Path, started: Callable[..., subprocess.Popen[str]]
) -> None:
    state_dir = tmp_path / "demo"
    demo = started("--mixer", "--no-baseline")
    wait_for(lambda: rounds_closed(state_dir) >= 1, "closed round")
    (victim,) = mixer_processes(state_dir)
    os.kill(victim, signal.SIGKILL)
    wait_for(lambda: {*mixer_processes(state_dir)} - {victim}, "another mixer")
    closed = rounds_closed(state_dir)
    wait_for(lambda: rounds_closed(state_dir) > min(closed, ROUNDS - 2), "closed round through it")
    demo.send_signal(signal.SIGINT)
    _, err = demo.communicate(timeout=PATIENCE_S)
    assert demo.returncode == 130, err
    assert not processes_of(state_dir)
    key = (state_dir / "mixer" / "keys" / "mixer.key").read_bytes()
    other = started("--no-baseline")
    _, err = other.communicate(timeout=PATIENCE_S)
    assert other.returncode == 3
    assert "`--mixer` was" in err
    again = started("--mixer", "--no-baseline")
    _, err = again.communicate(timeout=200)
    assert again.returncode == 0, err
    assert (state_dir / "mixer" / "keys" / "mixer.key").read_bytes() == key
    results = json.loads((tmp_path / "results.json").read_text())
    check_whole_run(state_dir, results)
    assert results["mixer"] is True
    assert (state_dir / "report" / "index.html").read_text().count("<svg") == 6


@pytest.mark.slow
def test_reports_go_through_a_mixer_over_the_embedded_broker(
    tmp_path: Path, started: Callable[..., subprocess.Popen[str]]
) -> None:
    demo = started("--mixer", "--no-baseline", "--method", "ldp-fl", "--broker", "embedded")
    out, err = demo.communicate(timeout=200)
    assert demo.returncode == 0, err
    fragments = json.loads((tmp_path / "results.json").read_text())["fragments"]
    assert fragments["charged"] == fragments["counted"] == DEVICES * ROUNDS * FRAGMENTS
    assert "broker and mixer" in out
    for number in range(1, DEVICES + 1):
        settings = (tmp_path / "demo" / f"device-{number:03d}" / "agent.yaml").read_text()
        assert "require_mixer: true" in settings


@pytest.mark.slow
@pytest.mark.usefixtures("executed")
def test_sigkilled_demo_takes_its_programs_with_it(
    tmp_path: Path, started: Callable[..., subprocess.Popen[str]]
) -> None:
    state_dir = tmp_path / "demo"
    demo = started()
    wait_for(lambda: rounds_closed(state_dir) >= 1, "closed round")
    demo.kill()
    demo.communicate(timeout=PATIENCE_S)
    wait_for(lambda: not processes_of(state_dir), "end of all programs", timeout=PATIENCE_S)


@pytest.mark.slow
def test_second_agent_on_the_same_state_is_refused(
    tmp_path: Path, started: Callable[..., subprocess.Popen[str]]
) -> None:
    state_dir = tmp_path / "demo"
    started("--rounds", "400")  # As long as it may take: the first agent must not be done before.
    wait_for(lambda: rounds_closed(state_dir) >= 1, "closed round")
    second = dpagent("run", "--config", str(state_dir / "device-001" / "agent.yaml"))
    assert second.returncode == 7
    assert "in use by process" in second.stderr
    assert "Traceback" not in second.stderr


def test_same_directory_with_other_options_is_refused(tmp_path: Path) -> None:
    state_dir = tmp_path / "demo"
    state_dir.mkdir()
    (state_dir / "something").write_text("of somebody's")
    run = subprocess.run(
        demo_command(state_dir), capture_output=True, text=True, timeout=PATIENCE_S, check=False
    )
    assert run.returncode == 3
    assert "not empty" in run.stderr


@pytest.mark.slow
def test_a_mistyped_first_start_does_not_spoil_the_directory_nor_does_where_one_is(tmp_path: Path) -> None:
    """Modules of the current directory are none of ours, and a corrected command goes on."""
    (tmp_path / "dpagent").mkdir()
    (tmp_path / "yaml.py").write_text("raise SystemExit('imported from the current directory')")
    script = Path(sys.executable).with_name("dpagent")
    command = [str(script) if script.exists() else sys.executable, "demo", "--state-dir", "demo"]
    wrong = subprocess.run(
        [*command, "--dataset", "mnist"],
        capture_output=True,
        text=True,
        timeout=PATIENCE_S,
        check=False,
        cwd=tmp_path,
    )
    assert wrong.returncode == 2, wrong.stderr
    right = subprocess.run(
        [*command, "--devices", "2", "--rounds", "2"],
        capture_output=True, text=True, timeout=120, check=False, cwd=tmp_path,
    )  # fmt: skip
    assert right.returncode == 0, right.stderr
    # The coordinator forgets everything: a new job, for which the devices have no budget left.
    for file in (tmp_path / "demo" / "coordinator" / "state").glob("coordinator.db*"):
        file.unlink()
    again = subprocess.run(
        [*command, "--devices", "2", "--rounds", "2"],
        capture_output=True, text=True, timeout=120, check=False, cwd=tmp_path,
    )  # fmt: skip
    assert again.returncode == 9
    assert "devices declined to take part" in again.stderr
    assert not processes_of(tmp_path / "demo")


@pytest.mark.parametrize(
    ("arguments", "code", "words"),
    [
        (["--dataset", "cats"], 2, "cats"),
        (["--dataset", "mnist"], 2, "--data-dir"),
        (["--dataset", "mnist", "--data-dir", "nowhere"], 4, "nowhere"),
        (["--model", "resnet-9000"], 3, "resnet-9000"),
        (["--model", "mnist-cnn"], 4, "28"),
        (["--epsilon", "-1"], 9, "-1"),
        (["--epsilon", "0.0001"], 9, "epsilon"),
        (["--delta", "1"], 9, "--delta"),
        (["--devices", "0"], 9, "--devices"),
        (["--broker", "carrier-pigeon"], 2, "carrier-pigeon"),
        # tests/simulation/test_fleet.py sees the same error without the wait.
        pytest.param(["--broker", "mqtt://127.0.0.1:1"], 6, "127.0.0.1:1", marks=pytest.mark.slow),
        (["--jitter-window", "nan"], 9, "--jitter-window"),
        (["--noise", "laplace"], 2, "gaussian"),
        (["--method", "incrementing", "--noise", "laplace", "--clipping", "layers"], 2, "--clipping whole"),
        (["--method", "incrementing", "--noise", "laplace", "--engine", "onnx"], 2, "--engine numpy"),
        (["--method", "ldp-fl", "--clipping", "layers"], 2, "expected whole"),
        (["--method", "ldp-fl", "--cap", "bounded"], 2, "expected none"),
        (["--method", "ldp-fl", "--clip-norm", "2"], 2, "ldp-fl cuts weights to ranges"),
        (["--method", "central", "--sampling-rate", "0.5"], 2, "central draws no lots"),
        (["--method", "dp-sgd", "--device-noise", "30"], 2, "--device-noise"),
        (["--method", "central", "--device-noise", "300"], 9, "noise as it is drawn"),
        (["--schedule", "uniform", "--step", "0.5"], 2, "--step"),
        (["--compare", "dp-sgd"], 2, "two or more"),
        (["--compare", "dp-sgd,ldp-fl", "--method", "dp-sgd"], 2, "--compare"),
        (["--compare", "dp-sgd,ldp-fl", "--cap", "clamp"], 2, "the caps of privacy.method ldp-fl"),
    ],
)
def test_bad_options_get_a_sentence_and_a_code(
    tmp_path: Path, arguments: list[str], code: int, words: str
) -> None:
    state_dir = tmp_path / "demo"
    run = commands.dpagent("demo", "--state-dir", state_dir, *arguments)
    assert run.returncode == code, run.stderr
    assert words in run.stderr
    assert "Traceback" not in run.stderr
    assert not processes_of(state_dir)


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.skipif(not MNIST.is_dir(), reason="needs ../shared/data/mnist")
def test_mnist_reaches_95_percent_at_epsilon_2(tmp_path: Path) -> None:
    state_dir = tmp_path / "demo"
    run = dpagent(
        "demo", "--dataset", "mnist", "--data-dir", str(MNIST), "--devices", "10", "--rounds", "100",
        "--epsilon", "2", "--state-dir", str(state_dir), "--json", str(tmp_path / "results.json"),
        timeout=1700,
    )  # fmt: skip
    assert run.returncode == 0, run.stderr
    results = json.loads((tmp_path / "results.json").read_text())
    assert results["accuracy"] >= 0.95
    assert results["privacy"]["epsilon_spent"][-1] <= 2
    assert results["fragments"]["lost"] == results["fragments"]["duplicates"] == 0


@pytest.mark.slow
def test_methods_are_compared_and_a_second_start_trains_nothing(tmp_path: Path) -> None:
    command = demo_command(tmp_path / "demo", "--compare", "ldp-fl,dp-sgd", "--rounds", "2", "--no-baseline")
    first = subprocess.run(command, capture_output=True, text=True, timeout=240, check=False)
    assert first.returncode == 0, first.stderr
    results = json.loads((tmp_path / "results.json").read_text())["compare"]
    assert list(results) == ["ldp-fl", "dp-sgd"]
    for method, each in results.items():
        assert each["privacy"]["method"] == method
        assert len(each["accuracy_history"]) == 2
        assert all(ledger["verified"] for ledger in each["privacy"]["ledgers"])
        assert (tmp_path / "demo" / "report" / method / "index.html").exists()
    assert results["ldp-fl"]["data"] == results["dp-sgd"]["data"]
    assert "no bound" in first.stdout
    assert not processes_of(tmp_path / "demo")
    again = subprocess.run(command, capture_output=True, text=True, timeout=PATIENCE_S, check=False)
    assert again.returncode == 0, again.stderr
    assert again.stderr.count("nothing is trained") == 2
    assert again.stdout == first.stdout


@pytest.mark.slow
def test_noise_of_devices_is_paid_by_an_account_of_its_own(
    tmp_path: Path, started: Callable[..., subprocess.Popen[str]]
) -> None:
    demo = started("--method", "central", "--device-noise", "30", "--no-baseline")
    out, err = demo.communicate(timeout=200)
    assert demo.returncode == 0, err
    results = json.loads((tmp_path / "results.json").read_text())
    own, alone = results["privacy"]["columns"]
    assert (own["trust"], alone["trust"]) == ("coordinator", "none")
    assert alone["epsilon"] == pytest.approx(30, rel=1e-3)
    assert "ε of the device, nobody trusted" in out
    assert results["fragments"]["counted"] == DEVICES * ROUNDS * FRAGMENTS
    for ledger in results["privacy"]["ledgers"]:
        assert (ledger["verified"], ledger["charges"]) == (True, ROUNDS)
        assert ledger["epsilon_spent"] == pytest.approx(8.0, rel=1e-3)
    for number in range(1, DEVICES + 1):
        accounts = [charge["dataset"] for charge in verified_charges(tmp_path / "demo", number)]
        assert accounts == ["digits", "digits@coordinator"] * ROUNDS
