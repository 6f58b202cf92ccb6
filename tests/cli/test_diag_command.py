"""``dpagent diag``: what a pack for support has, and that boards with neighbouring records have the same."""

from __future__ import annotations

import json
import os
import re
import resource
import subprocess
import tarfile
from collections.abc import Iterator
from contextlib import closing
from functools import partial
from pathlib import Path
from typing import Annotated, Any, get_args, get_origin

import numpy as np
import pytest
import yaml
from brokers import Broker, wait_until
from commands import Result, command_line, dpagent, dpagent_process
from fleets import Program, make_plan, run_agent, run_coordinator, write_agent, write_fleet
from ledgers import DATA, charge_for, fragments, open_state
from numpy.typing import NDArray

from agent.settings import AgentSettings
from benchmarks.demo import mnist_directory
from benchmarks.figures import Skipped
from cli.diag.command import write_new
from cli.diag.contents import LEFT_OUT, without_secrets
from coordinator.keys import load_signer
from coordinator.settings import load_fleet_settings
from dpagent.errors import ExitCode, StorageError
from dpagent.learning.data.dataset import ArrayDataset
from dpagent.learning.data.formats.npz import save_npz
from dpagent.learning.data.opening import open_dataset
from dpagent.learning.data.settings import DatasetSettings
from dpagent.protocol.signing import Signer
from dpagent.schema.base import Schema, fields_of

KEY = Signer(bytes(range(32)), "testers").public_key
NAMES = {
    "README.txt", "versions.json", "configuration.json", "doctor.json", "status.json", "ledger.json",
    "agent.log",
}  # fmt: skip
LOG = """\
2026-11-26T01:02:03 INFO    connected to mqtt://broker:1883
2026-11-26T01:02:04 INFO    (private) the data changed: 17 records, 16 before
/usr/lib/python3/numpy.py:1: RuntimeWarning: 17 values overflow
2026-11-26T01:02:05 WARNING (private) an engine failed
  2026-11-26T01:02:05 INFO    with 17 of the records
dpagent: 17 records are too many
2026-11-26T01:02:06 INFO    round 1 of 2: spooled
"""


@pytest.fixture
def board(tmp_path: Path) -> Path:
    return write_agent(tmp_path / "board", None, KEY)


def diag(file: Path, target: Path, *options: str | Path) -> Result:
    return dpagent("diag", target, "--config", file, "--no-broker", *options)


def pack(file: Path, target: Path, *options: str | Path) -> dict[str, str]:
    """The files of a pack."""
    result = diag(file, target, *options)
    assert (result.returncode, result.stderr) == (0, "")
    return read(target)


def read(target: Path) -> dict[str, str]:
    with tarfile.open(target) as archive:
        members = archive.getmembers()
        assert all(each.isreg() and (each.uid, each.uname) == (0, "") for each in members)
        return {
            each.name.removeprefix("dpagent-diag/"): stream.read().decode()
            for each in members
            if (stream := archive.extractfile(each)) is not None
        }


def test_it_says_what_is_in_it_and_what_is_not(board: Path, tmp_path: Path) -> None:
    (tmp_path / "log").write_text(LOG)
    result = diag(board, tmp_path / "pack.tar.gz", "--log", tmp_path / "log")
    assert (result.returncode, result.stderr) == (0, "")
    parts = read(tmp_path / "pack.tar.gz")
    assert set(parts) == NAMES
    assert all(name in result.stdout for name in NAMES)
    assert "Left out: passwords" in result.stdout
    assert f"2 lines of {tmp_path / 'log'}" in result.stdout
    assert (tmp_path / "pack.tar.gz").stat().st_mode & 0o777 == 0o600
    assert parts["agent.log"].splitlines() == [LOG.splitlines()[0], LOG.splitlines()[-1]]
    assert json.loads(parts["configuration.json"])["data.max_records"]["value"] == 60
    assert json.loads(parts["ledger.json"])["accounts"]["digits"]["epsilon_left"] == 4.0
    assert json.loads(parts["status.json"])["runs"] is False
    assert json.loads(parts["versions.json"])["dpagent"]
    checks = {each["check"] for each in json.loads(parts["doctor.json"])["checks"]}
    assert {"clock", "ledger", "engine", "budget"} <= checks
    assert not {"data", "storage", "memory"} & checks
    assert "17" not in parts["agent.log"]


def test_no_secret_is_in_it(board: Path, tmp_path: Path) -> None:
    values = yaml.safe_load(board.read_text())
    (board.parent / "password").write_text("s3cret-password\n")
    values["mqtt"] = {
        "url": "mqtt://127.0.0.1:1", "username": "s3cret-user",
        "password_file": str(board.parent / "password"),
    }  # fmt: skip
    values["serve"] = {"mqtt": values["mqtt"] | {"username": "s3cret-other"}}
    values["governor"] = {"command": ["true", "--token", "s3cret-token"]}
    values["model"] = {"command": ["true", "s3cret-hook"]}
    board.write_text("# s3cret-comment\n" + yaml.safe_dump(values))
    parts = pack(board, tmp_path / "pack.tar.gz", "--broker")
    assert not [name for name, text in parts.items() if "s3cret" in text]
    configuration = json.loads(parts["configuration.json"])
    assert configuration["mqtt.username"]["value"] == LEFT_OUT
    assert configuration["governor.command"]["value"] == ["true", LEFT_OUT]
    assert "127.0.0.1" in parts["doctor.json"], "it was asked"


def test_what_is_wrong_with_a_configuration_is_not_quoted(board: Path, tmp_path: Path) -> None:
    with board.open("a") as stream:
        stream.write("mqtt: {username: 7, url: 's3cret'}\n")
    parts = pack(board, tmp_path / "pack.tar.gz")
    assert set(parts) == {"README.txt", "versions.json", "configuration.json", "agent.log"}
    assert "dpagent config check" in parts["configuration.json"]
    assert not [name for name, text in parts.items() if "s3cret" in text]


TEXTS = {
    "coordinator_key", "enrolment.ca_file", "enrolment.url", "data.kind", "data.name", "data.classes",
    "data.path", "fleet", "governor.command", "home_assistant.discovery_prefix",
    "home_assistant.mqtt.ca_file", "home_assistant.mqtt.cert_file", "home_assistant.mqtt.client_id",
    "home_assistant.mqtt.key_file", "home_assistant.mqtt.password_file", "home_assistant.mqtt.topic_prefix",
    "home_assistant.mqtt.url", "home_assistant.mqtt.username", "home_assistant.name",
    "governor.hours", "governor.thermal_zones", "ledger.second_head", "limits.methods", "limits.mixer_keys",
    "model.command", "model.file",
    "mqtt.ca_file", "mqtt.cert_file", "mqtt.client_id", "mqtt.key_file", "mqtt.password_file",
    "mqtt.topic_prefix", "mqtt.url", "mqtt.username", "profile", "serve.mqtt.ca_file", "serve.mqtt.cert_file",
    "serve.mqtt.client_id", "serve.mqtt.key_file", "serve.mqtt.password_file", "serve.mqtt.topic_prefix",
    "serve.mqtt.url", "serve.mqtt.username", "serve.socket", "serve.topic",
    "state_dir", "trusted_graphs",
}  # fmt: skip
"""Settings that take any text, each looked at: it is no secret, or is left out."""


def test_each_setting_that_takes_a_text_is_known() -> None:
    found = set(_texts(AgentSettings))
    # What records are is declared, and public.
    declared = ("data.csv.", "data.images.", "data.cifar.")
    assert {key for key in found - TEXTS if not key.startswith(declared)} == set()
    assert found >= {"mqtt.username", "serve.mqtt.username", "governor.command", "profile"}
    for section in ("mqtt", "serve.mqtt", "home_assistant.mqtt"):
        for key in ("username", "client_id"):
            assert without_secrets(f"{section}.{key}", "me") == LEFT_OUT


def _texts(schema: type[Schema], path: str = "") -> Iterator[str]:
    """The keys of a schema whose values may be texts, or paths, of any content."""
    for name, field in fields_of(schema).items():
        for kind in _kinds(field.annotation):
            if isinstance(kind, type) and issubclass(kind, Schema):
                yield from _texts(kind, f"{path}{name}.")
            elif kind in (str, Path):
                yield f"{path}{name}"


def _kinds(annotation: Any) -> Iterator[Any]:
    if get_origin(annotation) is Annotated:
        annotation = get_args(annotation)[0]
    yield annotation
    for each in get_args(annotation):
        yield from _kinds(each)


# Bad places.


def test_a_file_that_is_there_is_not_written_over(board: Path, tmp_path: Path) -> None:
    (tmp_path / "mine").write_text("mine")
    (tmp_path / "link").symlink_to(tmp_path / "nowhere")
    for name in ("mine", "link", "board"):
        result = diag(board, tmp_path / name)
        assert result.returncode == ExitCode.STORAGE
        assert f"{tmp_path / name} is there already" in result.stderr
    assert (tmp_path / "mine").read_text() == "mine"
    assert not (tmp_path / "nowhere").exists()


def test_a_place_that_cannot_be_written_is_named(board: Path, tmp_path: Path) -> None:
    result = diag(board, tmp_path / "none" / "pack.tar.gz")
    assert result.returncode == ExitCode.STORAGE
    assert f"{tmp_path / 'none' / 'pack.tar.gz'}: No such file" in result.stderr
    assert "Traceback" not in result.stderr


def test_of_a_disk_that_is_full_no_part_of_a_pack_stays(tmp_path: Path) -> None:
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1_000, limits[1]))
    try:
        with pytest.raises(StorageError, match="pack"):
            write_new(tmp_path / "pack", bytes(2_000))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert list(tmp_path.iterdir()) == []


def test_without_a_name_it_takes_one_of_its_own(board: Path, tmp_path: Path) -> None:
    path = os.pathsep.join([str(Path(__file__).parents[2]), os.environ.get("PYTHONPATH", "")])
    result = dpagent_process(
        "diag", "--config", board, "--no-broker", cwd=tmp_path, env=os.environ | {"PYTHONPATH": path}
    )
    assert (result.returncode, result.stderr) == (0, "")
    (made,) = tmp_path.glob("dpagent-diag-*.tar.gz")
    assert made.name in result.stdout


def test_it_goes_to_standard_output_and_takes_a_log_from_standard_input(board: Path, tmp_path: Path) -> None:
    command = command_line("diag", "-", "--config", board, "--no-broker", "--log", "-")
    result = subprocess.run(command, input=LOG.encode(), capture_output=True, check=True)
    (tmp_path / "pack").write_bytes(result.stdout)
    parts = read(tmp_path / "pack")
    assert set(parts) == NAMES
    assert len(parts["agent.log"].splitlines()) == 2
    assert b"2 lines of standard input" in result.stderr
    assert not Path("-").exists()


def test_without_a_file_it_reads_the_journal_of_the_service(
    board: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A stand-in for journalctl: no service of systemd's runs here."""
    (tmp_path / "log").write_text(LOG)
    program = tmp_path / "bin" / "journalctl"
    program.parent.mkdir()
    program.write_text(f'#!/bin/sh\necho "$@" > {tmp_path}/asked\ncat {tmp_path}/log\n')
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{program.parent}{os.pathsep}{os.environ['PATH']}")
    parts = pack(board, tmp_path / "pack")
    assert len(parts["agent.log"].splitlines()) == 2
    assert "--unit=dpagent-agent.service" in (tmp_path / "asked").read_text()
    assert "--output=cat" in (tmp_path / "asked").read_text()
    (tmp_path / "log").write_text("")
    assert "`--log FILE`" in diag(board, tmp_path / "second").stdout
    monkeypatch.setenv("PATH", str(tmp_path))
    assert "there is no journal" in diag(board, tmp_path / "third").stdout


def test_a_log_that_is_not_there_is_named(board: Path, tmp_path: Path) -> None:
    result = diag(board, tmp_path / "pack.tar.gz", "--log", tmp_path / "none.log")
    assert result.returncode == ExitCode.STORAGE
    assert str(tmp_path / "none.log") in result.stderr
    assert not (tmp_path / "pack.tar.gz").exists()


def test_of_a_line_without_an_end_nothing_is_shown(board: Path, tmp_path: Path) -> None:
    log = tmp_path / "log"
    good = "2026-11-26T01:02:03 INFO    here"
    log.write_text(f"{good}\n{'x' * 8_192}{good}\n{good} again\n{good} without an end")
    assert pack(board, tmp_path / "pack", "--log", log)["agent.log"] == f"{good}\n{good} again\n"


def test_another_daemons_configuration_is_refused(tmp_path: Path) -> None:
    file = write_fleet(tmp_path, None)
    result = diag(file, tmp_path / "pack")
    assert result.returncode == ExitCode.CONFIGURATION
    assert f"{file} is a coordinator's" in result.stderr


# Two boards of one fleet, of whose records one has one more.


def mnist(records: int) -> tuple[NDArray[np.uint8], NDArray[np.int64]]:
    """The first records of MNIST."""
    try:
        directory = mnist_directory()
    except Skipped as error:
        pytest.skip(str(error))
    dataset = open_dataset(DatasetSettings.checked({"kind": "idx", "path": directory}))
    return dataset.batch(np.arange(records))


@pytest.mark.parametrize("odd", ["one of MNIST", "one that is not finite"])
def test_the_pack_of_a_whole_job_is_that_of_a_neighbour(tmp_path: Path, mosquitto: Broker, odd: str) -> None:
    """Times, and what differs between any two boards of a fleet, apart."""
    inputs, labels = mnist(121)
    inputs = (inputs / np.float32(255)).astype(np.float32) if inputs.dtype == np.uint8 else inputs
    if odd == "one that is not finite":
        inputs[-1] = np.nan
    fleet = f"neighbours-{odd.replace(' ', '-')}"
    fleet_file = write_fleet(
        tmp_path / "coordinator", mosquitto, fleet=fleet, records_per_device=120,
        model={"name": "mnist-cnn"},
    )  # fmt: skip
    settings = load_fleet_settings(fleet_file)
    key = load_signer(settings.keys_dir, settings.fleet).public_key
    (tmp_path / "profile.yaml").write_text(
        "extends: generic-x86-64\nboard: {memory_mib: 64}\nmicrobatch: 8\nniceness: 0\nprocesses: 1\n"
    )
    files = []
    for name, number in (("one", 120), ("two", 121)):
        file = write_agent(
            tmp_path / name, mosquitto, key, fleet=fleet, profile=str(tmp_path / "profile.yaml"),
            engine="numpy", data={"shape": [28, 28, 1], "max_records": 200},
        )  # fmt: skip
        save_npz(file.parent / "data.npz", ArrayDataset(inputs[:number], labels[:number], 10))
        files.append(file)
    with run_coordinator(fleet_file) as coordinator:
        agents = [run_agent(file) for file in files]
        try:
            assert coordinator.wait(240.0) == 0
            for agent in agents:
                wait_until(partial(has_the_model, agent), "the model")
            packs = [
                pack(file, file.parent / "pack", "--broker", "--log", file.with_suffix(".log"))
                for file in files
            ]
        finally:
            for agent in agents:
                agent.stop()
    one, two = (comparable(parts, file.parent) for parts, file in zip(packs, files, strict=True))
    assert one == two
    assert "round 2 of 2: spooled" in one["agent.log"]
    said = [file.with_suffix(".log").read_text() for file in files]
    assert "(private)" in said[1], "so that this test can fail"
    if odd == "one that is not finite":
        assert "(private) 1 of 121 records contain NaN" in said[1]
        assert "NaN" not in one["agent.log"]


def has_the_model(agent: Program) -> bool:
    return "the latest model is in" in agent.said()


def comparable(parts: dict[str, str], directory: Path) -> dict[str, str]:
    """A pack without times, and without the place of its board."""

    def plain(text: str) -> str:
        text = text.replace(str(directory), "BOARD")
        text = re.sub(r"\d{4}-\d\d-\d\d[T ]\d\d:\d\d(:\d\d(\.\d+)?(\+00:00| UTC)?)?", "TIME", text)
        text = re.sub(r'("(?:\w+_at|until|deadline)": )[\d.]+', r"\1TIME", text)
        return re.sub(r"engine for (\S+): .*", r"engine for \1", text)

    return {name: plain(text) for name, text in parts.items()}


def test_a_round_of_noise_alone_is_not_in_it(board: Path, tmp_path: Path) -> None:
    values = yaml.safe_load(board.read_text()) | {"budget": {"epsilon": 50.0, "delta": 1e-3}}
    board.write_text(yaml.safe_dump(values))
    with closing(open_state(board.parent / "state")) as state:
        plan = make_plan()
        state.offer(plan.job.hex(), 1, bytes(32), 1.0)
        state.charge([charge_for(plan, DATA, state.ledger)], 2.0)
        state.spool_round(plan.job.hex(), 1, fragments(1), 3.0, "s3cret record")
    parts = pack(board, tmp_path / "pack")
    assert not [name for name, text in parts.items() if "s3cret" in text]
    assert '"state": "spooled"' in parts["status.json"]
