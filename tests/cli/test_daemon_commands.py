"""The daemons as commands: bad input, signals, a broker that is not there."""

from __future__ import annotations

import base64
import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml
from brokers import wait_until
from children import PATIENCE_S
from commands import command_line, dpagent
from pictures import folder_of
from stores import begin_job

import cli
from agent.child_programs import LITTLE_MEMORY
from coordinator.queue import Queue
from coordinator.settings import load_fleet_settings
from coordinator.stepping import Stepper
from coordinator.store import RoundResult
from dpagent.learning.data.dataset import ArrayDataset
from dpagent.learning.data.formats.npz import save_npz

DATA = {
    "name": "numbers", "kind": "npz", "path": "data.npz", "classes": 10, "shape": [8, 8, 1],
    "dtype": "float32", "max_records": 20,
}  # fmt: skip
KEY = base64.b64encode(bytes([9]) + bytes(31)).decode()


def write_agent(directory: Path, **changes: Any) -> Path:
    rng = np.random.default_rng(1)
    if not (directory / "data.npz").exists():
        inputs = rng.random((20, 8, 8, 1), dtype=np.float32)
        save_npz(directory / "data.npz", ArrayDataset(inputs, rng.integers(0, 10, 20), 10))
    settings = {
        "fleet": "test",
        "coordinator_key": KEY,
        "data": DATA,
        "budget": {"epsilon": 1.0, "delta": 1e-5},
        "mqtt": {"url": "mqtt://127.0.0.1:1"},
    } | changes
    file = directory / "agent.yaml"
    file.write_text(yaml.safe_dump(settings, sort_keys=False))
    return file


def begun(file: Path) -> Path:
    """The same ``agent.yaml``, with a ledger."""
    result = dpagent("budget", "init", "--config", str(file))
    assert result.returncode == 0, result.stderr
    return file


def write_fleet(directory: Path, **changes: Any) -> Path:
    settings = {
        "fleet": "test", "devices": 2, "records_per_device": 20, "rounds": 2,
        "privacy": {"epsilon": 2.0}, "model": {"name": "digits"}, "mqtt": {"url": "mqtt://127.0.0.1:1"},
    } | changes  # fmt: skip
    file = directory / "fleet.yaml"
    file.write_text(yaml.safe_dump(settings, sort_keys=False))
    return file


@pytest.mark.parametrize(
    ("changes", "code", "words"),
    [
        ({"colour": "green"}, 3, "agent.yaml:19: colour: unknown key"),
        ({"budget": {"epsilon": "lots", "delta": 1e-5}}, 3, "budget.epsilon"),
        ({"coordinator_key": "abc"}, 3, "coordinator_key"),
        ({"profile": "cray-1"}, 3, "raspberry-pi-4"),
        ({"data": {"name": "numbers", "path": "data.npz"}}, 3, "kind, classes, max_records are missing"),
        ({"mqtt": {"url": "http://example"}}, 3, "mqtt://"),
        ({"mqtt": {"username": "me", "password_file": "missing"}}, 3, "password_file"),
    ],
)
def test_agent_refuses_bad_settings(tmp_path: Path, changes: dict[str, Any], code: int, words: str) -> None:
    result = dpagent("run", "--config", str(write_agent(tmp_path, **changes)))
    assert result.returncode == code, result.stderr
    assert words in result.stderr
    assert "Traceback" not in result.stderr


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"path": "nowhere.npz"}, "nowhere.npz"),
        ({"max_records": 19}, "holds 20 records; expected at most 19"),
    ],
)
def test_agent_refuses_data_that_are_not_as_declared(
    tmp_path: Path, changes: dict[str, Any], words: str
) -> None:
    result = dpagent("run", "--config", str(begun(write_agent(tmp_path, data=DATA | changes))))
    assert result.returncode == 4, result.stderr
    assert words in result.stderr


@pytest.mark.parametrize(
    ("changes", "code", "words"),
    [
        ({"devices": 0}, 3, "fleet.yaml:2: devices: got 0"),
        ({"model": {"name": "alexnet"}}, 3, "alexnet"),
        ({"privacy": {"epsilon": 2.0, "schedule": {"kind": "random"}}}, 3, "schedule.kind"),
        ({"privacy": {"epsilon": 1e-6}, "rounds": 500}, 9, "epsilon 1e-06"),
        ({"test_data": {"path": "missing.npz"}}, 4, "missing.npz"),
        (
            {"fragments_per_update": 1, "model": {"name": "sensor-cnn"}, "records_per_device": 1e6},
            9,
            "fragments_per_update is 1",
        ),
    ],
)
def test_coordinator_refuses_bad_settings(
    tmp_path: Path, changes: dict[str, Any], code: int, words: str
) -> None:
    result = dpagent("coordinator", "run", "--config", str(write_fleet(tmp_path, **changes)))
    assert result.returncode == code, result.stderr
    assert words in result.stderr
    assert "Traceback" not in result.stderr


def test_data_that_no_model_fits_and_damaged_data(tmp_path: Path) -> None:
    file = begun(write_agent(tmp_path))
    (tmp_path / "data.npz").write_bytes(b"PK\x03\x04 not really")
    result = dpagent("run", "--config", str(file))
    assert result.returncode == 4
    assert "data.npz" in result.stderr


def members(group: int) -> set[int]:
    """The processes of a group that have not ended."""
    found = set()
    for stat in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):
            state, _, number = stat.read_text().rpartition(")")[2].split()[:3]
            if int(number) == group and state != "Z":
                found.add(int(stat.parent.name))
    return found


def groups_that_decode(agent: int) -> list[int]:
    """Those of the process that opens an agent's records, and of what decodes them there, in a fork."""
    for opening in children_of(agent):
        for decoding in children_of(opening):
            if len(members(decoding)) == 2:
                return [opening, decoding]
    return []


def children_of(process: int) -> list[int]:
    """The children of a process, of whichever of its threads."""
    found = []
    for place in Path(f"/proc/{process}/task").glob("*/children"):
        with contextlib.suppress(OSError):
            found += map(int, place.read_text().split())
    return found


@pytest.mark.parametrize(
    ("number", "code"),
    [
        pytest.param(signal.SIGTERM, 0, marks=pytest.mark.slow),
        pytest.param(signal.SIGINT, 130, marks=pytest.mark.slow),
        (signal.SIGKILL, -signal.SIGKILL),
    ],
)
@pytest.mark.usefixtures("executed")
def test_an_agent_that_is_stopped_while_it_decodes_leaves_no_process_behind(
    tmp_path: Path, number: signal.Signals, code: int
) -> None:
    folder_of(tmp_path / "photos", "0/0.png", width=1500, height=1500)
    for other in range(1, 1_000):
        os.link(tmp_path / "photos/0/0.png", tmp_path / f"photos/0/{other}.png")
    section = {"size": [8, 8], "mode": "grey", "folder": "."}
    data = {"kind": "images", "path": "photos", "dtype": "uint8", "images": section, "max_records": 1_000}
    data = {key: value for key, value in DATA.items() if key != "shape"} | data
    file = begun(write_agent(tmp_path, data=data))
    agent = subprocess.Popen(command_line("run", "--config", str(file)), stderr=subprocess.PIPE, text=True)
    try:
        groups = wait_until(lambda: groups_that_decode(agent.pid), "a fork that decodes")
        agent.send_signal(number)
        _, said = agent.communicate(timeout=PATIENCE_S)
    finally:
        agent.kill()
    wait_until(lambda: not any(map(members, groups)), "the end of what decodes")
    assert agent.returncode == code, said
    assert "Traceback" not in said


@pytest.mark.heavy
@pytest.mark.parametrize(
    ("number", "code"), [pytest.param(signal.SIGTERM, 0, marks=pytest.mark.slow), (signal.SIGINT, 130)]
)
@pytest.mark.parametrize("daemon", ["agent", "coordinator"])
def test_daemons_keep_trying_and_stop_when_told(
    tmp_path: Path, daemon: str, number: signal.Signals, code: int
) -> None:
    """Without a broker a daemon says so and tries again; a signal stops it cleanly."""
    arguments = (
        ["run", "--config", str(begun(write_agent(tmp_path)))]
        if daemon == "agent"
        else ["coordinator", "run", "--config", str(write_fleet(tmp_path))]
    )
    child = subprocess.Popen(command_line(*arguments), stderr=subprocess.PIPE, text=True)
    assert child.stderr is not None
    said = ""
    until = time.monotonic() + 60
    while "no broker answers" not in said and time.monotonic() < until and child.poll() is None:
        said += child.stderr.readline()
    child.send_signal(number)
    _, rest = child.communicate(timeout=PATIENCE_S)
    assert child.returncode == code, said + rest
    assert "reconnecting" in said
    assert "Traceback" not in said + rest


@pytest.mark.parametrize(
    ("start", "options"),
    [
        (["-m", "cli.main"], []),
        ([str(Path(sys.executable).with_name("dpagent"))], ["-P"]),
        (
            ["-W", "error::EncodingWarning", "-X", "dev", "-P", "-m", "cli.main"],
            ["-P", "-Werror::EncodingWarning", "-X", "dev"],
        ),
    ],
    ids=["module", "script", "options"],
)
@pytest.mark.usefixtures("executed")
def test_an_agent_goes_on_as_a_program_without_what_reads_options(
    tmp_path: Path, start: list[str], options: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """In the same process, with all that was given, to the interpreter too."""
    for name in ("PYTHONDONTWRITEBYTECODE", "PYTHONSAFEPATH"):
        monkeypatch.delenv(name, raising=False)  # Which are options by another name.
    monkeypatch.setenv("MALLOC_ARENA_MAX", "3")  # Which its owner has chosen.
    file = begun(write_agent(tmp_path))
    words = [
        sys.executable,
        *start,
        "run",
        "--config",
        file,
        "--log-level",
        "debug",
        "--set",
        "mqtt.keepalive_s=77",
    ]
    child = subprocess.Popen(words, stderr=subprocess.PIPE, text=True)
    assert child.stderr is not None
    place = Path(f"/proc/{child.pid}")
    try:
        next(line for line in child.stderr if "no broker answers" in line)
        command, maps = (place / "cmdline").read_text().split("\0"), (place / "maps").read_text()
        name, variables = (place / "comm").read_text(), (place / "environ").read_text().split("\0")
    finally:
        child.send_signal(signal.SIGTERM)
        said = child.communicate(timeout=PATIENCE_S)[1]
    assert child.returncode == 0, said
    given = ["debug", "text", "mqtt.keepalive_s=77", ""]
    assert command[1:] == [*options, "-m", "cli.agent_program", str(file), *given]
    assert name == "dpagent\n"
    assert {"MALLOC_TOP_PAD_=4096", "MALLOC_ARENA_MAX=3"} <= set(variables)
    assert "_sqlite3" in maps
    assert "pydantic" not in maps


def test_what_an_agent_starts_has_the_memory_that_its_owner_has_chosen(tmp_path: Path) -> None:
    """Before, a command of the board's owner had the agent's, which slows one with many threads."""
    program = "import atexit, os, cli.agent_program as here\n"
    program += (
        "atexit.register(lambda: print(*(name for name in os.environ if name.startswith('MALLOC_'))))\n"
    )
    program += "here.main()"
    ended = subprocess.run(
        [sys.executable, "-c", program, tmp_path / "absent.yaml", "info", "text"],
        env=os.environ | LITTLE_MEMORY | {"MALLOC_ARENA_MAX": "3"},
        stdout=subprocess.PIPE, text=True, timeout=PATIENCE_S, check=False,
    )  # fmt: skip
    assert ended.stdout == "MALLOC_ARENA_MAX\n"


@pytest.mark.usefixtures("executed")
def test_an_agent_of_a_checkout_goes_on_with_the_code_of_that_checkout(tmp_path: Path) -> None:
    """Before, with what was installed."""
    checkout = tmp_path / "checkout"
    shutil.copytree(Path(cli.__file__).parent, checkout / "cli", ignore=shutil.ignore_patterns("__pycache__"))
    file = checkout / "cli" / "agent_program.py"
    text = file.read_text()
    assert text.endswith("    main()\n")
    file.write_text(text.removesuffix("main()\n") + "sys.exit('of the checkout')\n")
    words = [sys.executable, "-m", "cli.main", "run", "--config", begun(write_agent(tmp_path))]
    ended = subprocess.run(
        words, cwd=checkout, capture_output=True, text=True, timeout=PATIENCE_S, check=False
    )
    assert ended.stderr == "of the checkout\n"


def started_with(
    code: str, directory: Path, *words: str | Path, inside: tuple[str, ...] = ()
) -> subprocess.CompletedProcess[str]:
    """A command whose interpreters run some code of the test's own at their start."""
    (directory / "sitecustomize.py").write_text(code)
    places = os.pathsep.join([str(directory), os.environ.get("PYTHONPATH", "")])
    return subprocess.run(
        [*inside, sys.executable, "-P", "-m", "cli.main", *words], capture_output=True, text=True,
        env={**os.environ, "PYTHONPATH": places}, timeout=PATIENCE_S, check=False,
    )  # fmt: skip


@pytest.mark.parametrize(("number", "code"), [(signal.SIGTERM, 0), (signal.SIGINT, 130)])
@pytest.mark.usefixtures("executed")
def test_a_signal_while_the_agents_program_is_loaded_ends_it_without_a_traceback(
    tmp_path: Path, number: signal.Signals, code: int
) -> None:
    """Where the interpreter starts for the second time, it gets one."""
    kills = f"import os, sys\nif 'cli.agent_program' in sys.orig_argv: os.kill(os.getpid(), {int(number)})\n"
    ended = started_with(kills, tmp_path, "run", "--config", begun(write_agent(tmp_path)))
    assert (ended.returncode, ended.stdout, ended.stderr) == (code, "", "")


KILLS = """
import os, signal, sys

class Finalized:
    def __del__(self):
        os.kill(os.getpid(), signal.SIGTERM)

class Finder:
    def find_spec(name, *_):
        if WHERE:
            HOW

sys.meta_path.insert(0, Finder)
"""
FINALIZES = KILLS.replace("WHERE", "name in ('agent.daemon', 'coordinator.daemon')").replace(
    "HOW", "Finalized()"
)


@pytest.mark.parametrize("daemon", ["agent", "coordinator"])
@pytest.mark.usefixtures("executed")
def test_a_signal_in_a_finalizer_while_a_daemon_starts_ends_it(tmp_path: Path, daemon: str) -> None:
    """Python drops what a finalizer raises, even what would end the program."""
    arguments = (
        ["run", "--config", begun(write_agent(tmp_path))]
        if daemon == "agent"
        else ["coordinator", "run", "--config", write_fleet(tmp_path)]
    )
    ended = started_with(FINALIZES, tmp_path, *arguments)
    assert "Exception ignored" in ended.stderr
    assert ended.returncode == 0, ended.stderr


@pytest.mark.parametrize(
    ("where", "code"),
    [
        ("name == 'typer'", 128 + signal.SIGTERM),
        ("name == 'agent.marked_log' and 'cli.agent_program' in sys.orig_argv", 0),
        ("name == 'agent.daemon'", 0),
    ],
    ids=["options", "program", "daemon"],
)
@pytest.mark.usefixtures("executed")
def test_the_first_process_of_a_container_hears_a_signal_while_it_starts(
    tmp_path: Path, where: str, code: int
) -> None:
    """The kernel drops what such a process does not handle."""
    inside = ("unshare", "--map-root-user", "--user", "--pid", "--fork", "--kill-child")
    if shutil.which("unshare") is None or subprocess.run([*inside, "true"], check=False).returncode:
        pytest.skip("the kernel gives no process a namespace of its own here")
    kills = KILLS.replace("WHERE", where).replace("HOW", "os.kill(os.getpid(), signal.SIGTERM)")
    arguments = ("run", "--config", begun(write_agent(tmp_path)))
    ended = started_with(kills, tmp_path, *arguments, inside=inside)
    assert ended.returncode == code, ended.stderr


def test_damaged_ledger_is_a_sentence(tmp_path: Path) -> None:
    file = begun(write_agent(tmp_path))
    (tmp_path / "state" / "ledger.db").write_bytes(b"this is no database, whatever its name says" * 100)
    result = dpagent("run", "--config", str(file))
    assert result.returncode == 5
    assert "not a readable database" in result.stderr
    verify = dpagent("budget", "verify", "--state-dir", str(tmp_path / "state"))
    assert verify.returncode == 5
    assert "Traceback" not in result.stderr + verify.stderr


@pytest.mark.heavy
def test_budget_of_a_fresh_agent(tmp_path: Path) -> None:
    child = subprocess.Popen(
        command_line("run", "--config", str(begun(write_agent(tmp_path)))), stderr=subprocess.PIPE, text=True
    )
    assert child.stderr is not None
    while "no broker answers" not in child.stderr.readline():
        assert child.poll() is None
    # Beside the running agent: reading needs no lock.
    shown = dpagent("budget", "show", "--state-dir", str(tmp_path / "state"))
    child.terminate()
    child.communicate(timeout=PATIENCE_S)
    assert shown.returncode == 0, shown.stderr
    assert "numbers" in shown.stdout
    exported = dpagent("budget", "export", "--state-dir", str(tmp_path / "state"))
    assert "no charges yet" in exported.stdout
    missing = dpagent("budget", "show", "--state-dir", str(tmp_path / "elsewhere"))
    assert missing.returncode == 5
    assert "elsewhere" in missing.stderr


def test_coordinator_key_is_stable_and_status_needs_a_job(tmp_path: Path) -> None:
    file = write_fleet(tmp_path)
    first, second = (dpagent("coordinator", "key", "--config", str(file)).stdout.strip() for _ in range(2))
    assert first == second
    assert len(base64.b64decode(first)) == 32
    status = dpagent("coordinator", "status", "--config", str(file))
    assert status.returncode == 8
    assert "coordinator.db" in status.stderr


def test_status_says_what_was_spent_for_whom_and_which_layers_left_their_range(tmp_path: Path) -> None:
    file = write_fleet(tmp_path, privacy={"method": "ldp-fl", "epsilon": 9.0}, cap={"kind": "none"})
    settings = load_fleet_settings(file)
    model = Stepper(settings, settings.model.spec()).initial()
    store = begin_job(settings, model)
    store.start_round(1, 10.0, 20.0)
    assert "Spent" not in dpagent("coordinator", "status", "--config", str(file)).stdout
    store.close_round(1, model, RoundResult(None, 0, 1.0, 1.0, 4.5, ("dense 1",)), closed_at=15.0)
    store.database.close()
    shown = dpagent("coordinator", "status", "--config", str(file))
    assert shown.returncode == 0, shown.stderr
    scope = "device-level, replace-one adjacency, trusted party: none"
    assert f"Spent in rounds that are over: ε = 4.5, δ = 1e-5 ({scope})." in shown.stdout
    assert "Layer dense 1: on the devices" in shown.stdout
    values = json.loads(dpagent("coordinator", "status", "--config", str(file), "--json").stdout)
    assert [(column["unit"], column["trust"]) for column in values["spent"]] == [
        ("device", "none"), ("device", "shuffler"), ("coordinate", "none"),
    ]  # fmt: skip
    assert values["spent"][0]["epsilon"] == 4.5
    assert values["spent"][1]["epsilon"] == 4.5, "one device hides among no others"
    assert "never added up" in shown.stdout
    assert values["rounds"][0]["out_of_range"] == ["dense 1"]
    assert values["rounds"][0]["clip_norm"] is None
    assert "clip norm" not in shown.stdout


def test_status_shows_a_clip_norm_that_follows_a_quantile(tmp_path: Path) -> None:
    privacy = {"method": "central", "epsilon": 9.0, "clipping": {"kind": "quantile"}}
    file = write_fleet(tmp_path, privacy=privacy, cap={"kind": "none"})
    settings = load_fleet_settings(file)
    model = Stepper(settings, settings.model.spec()).initial()
    store = begin_job(settings, model)
    store.start_round(1, 10.0, 20.0)
    result = RoundResult(None, 0, 1.0, 1.0, 4.5, clip_norm=0.1875)
    store.close_round(1, model, result, closed_at=15.0)
    store.database.close()
    shown = dpagent("coordinator", "status", "--config", str(file)).stdout
    assert "clip norm" in shown
    assert "0.188" in shown
    values = json.loads(dpagent("coordinator", "status", "--config", str(file), "--json").stdout)
    assert values["rounds"][0]["clip_norm"] == 0.1875


def test_status_shows_what_noise_of_devices_has_spent_without_trust(tmp_path: Path) -> None:
    privacy = {"method": "central", "epsilon": 9.0, "device_noise": {"epsilon": 30.0}}
    file = write_fleet(tmp_path, privacy=privacy, cap={"kind": "none"})
    settings = load_fleet_settings(file)
    model = Stepper(settings, settings.model.spec()).initial()
    store = begin_job(settings, model)
    (queued,) = Queue(store.database).jobs()
    job = queued.job
    store.start_round(1, 10.0, 20.0)
    store.close_round(1, model, RoundResult(None, 0, 1.0, 1.0, 4.5), closed_at=15.0)
    store.database.close()
    assert job.device is not None
    values = json.loads(dpagent("coordinator", "status", "--config", str(file), "--json").stdout)
    assert [(each["trust"], each["adjacency"]) for each in values["spent"]] == [
        ("coordinator", "zero-out"), ("none", "replace-one"),
    ]  # fmt: skip
    assert values["spent"][1]["epsilon"] == job.device.epsilon_by_round[0] < 30.0
    assert "never added up" in dpagent("coordinator", "status", "--config", str(file)).stdout
