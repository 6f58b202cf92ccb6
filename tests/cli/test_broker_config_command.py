"""``dpagent coordinator broker-config``: what it writes, keeps, refuses; tests/conformance runs brokers."""

from __future__ import annotations

import json
import os
import re
import socket
import stat
import subprocess
import sys
from datetime import UTC, datetime
from pathlib import Path

import pytest
from brokers import reserved_port, wait_until
from children import Child
from commands import Result, dpagent
from cryptography import x509
from fleets import write_fleet
from members import enrolled

from benchmarks.certificates import broker_certificate
from coordinator.authority import load_authorities
from coordinator.brokers.mosquitto import find_mosquitto
from coordinator.devices import Devices
from dpagent.errors import ExitCode

ALL = ("mosquitto", "rabbitmq", "nats", "emqx")
BOARDS = ("--board", "attic", "--board", "cellar")


def broker_config(folder: Path, software: str, *options: str | Path) -> Result:
    file = folder / "fleet.yaml"
    if not file.exists():
        write_fleet(folder, None, fleet="porch")
    return dpagent("coordinator", "broker-config", software, "--config", file, *options)


def listens(port: int) -> bool:
    """Whether somebody takes connections there."""
    with socket.socket() as connection:
        return connection.connect_ex(("127.0.0.1", port)) == 0


def with_members(folder: Path) -> Path:
    """A fleet with an authority, a member, and a device that is none any more."""
    file = write_fleet(folder, None, fleet="porch")
    assert dpagent("coordinator", "ca", "init", "--config", file).returncode == 0
    authority = load_authorities(folder / "members", now=datetime.now(UTC)).issuing
    with Devices(folder / "members") as devices:
        member, gone = (enrolled(authority, devices)[1] for _ in range(2))
    (folder / "member").write_text(member.id)
    (folder / "gone").write_text(gone.id)
    assert dpagent("coordinator", "devices", "revoke", gone.id, "--config", file).returncode == 0
    return file


@pytest.fixture(scope="module")
def tls(tmp_path_factory: pytest.TempPathFactory) -> list[Path | str]:
    files = broker_certificate(tmp_path_factory.mktemp("tls"))
    return ["--certificate", files.certificate, "--key", files.key]


@pytest.mark.parametrize("software", ALL)
def test_each_user_gets_a_password_that_only_the_owner_may_read_and_keeps_it(
    tmp_path: Path, tls: list[Path | str], software: str
) -> None:
    result = broker_config(tmp_path, software, *tls, *BOARDS)
    assert result.returncode == 0, result.stderr
    users = tmp_path / "broker" / "users"
    assert sorted(file.name for file in users.iterdir()) == ["attic", "cellar", "coordinator"]
    words = {file.name: file.read_text() for file in users.iterdir()}
    assert len(set(words.values())) == 3
    for name, word in words.items():
        assert f"mqtt.username {name}, mqtt.password_file {users / name}" in result.stdout
        for file in (tmp_path / "broker").rglob("*"):
            if file.is_file() and word.strip() in file.read_text():
                assert stat.S_IMODE(file.stat().st_mode) == 0o600, file
    assert broker_config(tmp_path, software, *tls, *BOARDS, "--board", "loft").returncode == 0
    assert {name: (users / name).read_text() for name in words} == words
    assert (users / "loft").exists()


@pytest.mark.parametrize("software", ALL)
def test_a_broker_that_a_service_starts_has_a_directory_to_keep_messages_in(
    tmp_path: Path, tls: list[Path | str], software: str
) -> None:
    for _ in range(2):
        assert broker_config(tmp_path, software, *tls, *BOARDS).returncode == 0
        assert stat.S_IMODE((tmp_path / "broker" / "data").stat().st_mode) == 0o700


@pytest.mark.parametrize("software", ALL)
@pytest.mark.parametrize("mutual", [False, True], ids=["passwords", "certificates"])
def test_no_rule_has_a_wildcard_over_levels_and_boards_have_no_other_topic(
    tmp_path: Path, tls: list[Path | str], software: str, mutual: bool
) -> None:
    who = ["--members"] if mutual else [*BOARDS]
    if mutual:
        with_members(tmp_path)
    assert broker_config(tmp_path, software, *tls, *who, "--mixer").returncode == 0
    for file in (tmp_path / "broker").iterdir():
        text = file.read_text() if file.is_file() else ""
        rules = [line for line in text.splitlines() if "deny" not in line]
        assert "#" not in "".join(rules)
        for name in re.findall(r"dpagent[/.\\]+v1[/.\\]+(\w+)", text):
            assert name == "porch"


def test_who_shows_a_certificate_needs_no_name_in_the_rules(tmp_path: Path, tls: list[Path | str]) -> None:
    with_members(tmp_path)
    assert broker_config(tmp_path, "mosquitto", *tls, "--members").returncode == 0
    text = (tmp_path / "broker" / "mosquitto.conf").read_text()
    assert "require_certificate true\nuse_identity_as_username true" in text
    # After a SIGHUP, Mosquitto 2.0.11 crashes by sessions that end and whose clients are away.
    assert "persistent_client_expiration" not in text
    rules = (tmp_path / "broker" / "access").read_text()
    assert "pattern write dpagent/v1/porch/fragments" in rules
    assert "pattern write dpagent/v1/porch/plan" not in rules
    assert "user coordinator" in rules


@pytest.mark.parametrize("software", ["mosquitto", "emqx"])
def test_workers_are_one_user_that_reads_fragments_and_nothing_else(
    tmp_path: Path, tls: list[Path | str], software: str
) -> None:
    result = broker_config(tmp_path, software, *tls, *BOARDS, "--worker")
    assert f"worker: mqtt.username worker, mqtt.password_file {tmp_path}/broker/users/worker" in result.stdout
    if software == "mosquitto":
        rules = (tmp_path / "broker" / "access").read_text()
        (own,) = [part for part in rules.split("user ") if part.startswith("worker\n")]
        assert own.splitlines() == ["worker", "topic read dpagent/v1/porch/fragments"]
    else:
        rules = (tmp_path / "broker" / "acl.conf").read_text()
        own = [line for line in rules.splitlines() if '"worker"' in line]
        assert [re.findall(r"\[.*\]", line) for line in own] == [["[]"], ['["dpagent/v1/porch/fragments"]']]
        settings = json.loads((tmp_path / "broker" / "emqx.conf").read_text())
        assert settings["mqtt"]["shared_subscription"] is True


@pytest.mark.parametrize("software", ["rabbitmq", "nats"])
def test_a_broker_without_shared_subscriptions_takes_no_workers(
    tmp_path: Path, tls: list[Path | str], software: str
) -> None:
    result = broker_config(tmp_path, software, *tls, *BOARDS, "--worker")
    assert result.returncode == ExitCode.USAGE
    assert "shared subscriptions" in result.stderr
    assert not (tmp_path / "broker" / f"{software}.conf").exists()


def test_a_bridge_carries_what_its_role_may_and_is_one_user_at_the_other_broker(
    tmp_path: Path, tls: list[Path | str]
) -> None:
    with_members(tmp_path)
    assert broker_config(tmp_path, "mosquitto", *tls, "--members", "--bridge").returncode == 0
    rules = (tmp_path / "broker" / "access").read_text()
    (own,) = [part for part in rules.split("user ") if part.startswith("bridge\n")]
    own = own.partition("pattern")[0]
    assert "topic read dpagent/v1/porch/plan" in own
    assert "topic write dpagent/v1/porch/devices/+/ask" in own
    assert "fragments" not in own
    assert "receipts/+" not in own
    missing = broker_config(tmp_path, "mosquitto", *tls, "--members", "--bridge-to", "b.example")
    assert (missing.returncode, "ca client bridge" in missing.stderr) == (ExitCode.USAGE, True)
    fleet = str(tmp_path / "fleet.yaml")
    assert dpagent("coordinator", "ca", "client", "bridge", "--config", fleet).returncode == 0
    wrong = broker_config(tmp_path, "mosquitto", *tls, "--members", "--bridge-to", "b.example:x")
    assert (wrong.returncode, "b.example:x" in wrong.stderr) == (ExitCode.USAGE, True)
    assert broker_config(tmp_path, "mosquitto", *tls, "--members", "--bridge-to", "b.example").returncode == 0
    lines = (tmp_path / "broker" / "mosquitto.conf").read_text().splitlines()
    assert "address b.example:8883" in lines
    for line in (
        "topic dpagent/v1/porch/plan in 1", "topic dpagent/v1/porch/devices/+/answer in 1",
        "topic dpagent/v1/porch/devices/+/ask out 1", "topic dpagent/v1/porch/witness both 1",
    ):  # fmt: skip
        assert lines.count(line) == 1
    assert not [line for line in lines if "fragments" in line]
    # Its session at the other broker is one that no board can name, and so take over; it stays the same.
    (session,) = [line for line in lines if line.startswith("remote_clientid ")]
    assert len(session.removeprefix("remote_clientid dpagent-bridge-porch-")) >= 43
    assert (tmp_path / "broker" / "mosquitto.conf").stat().st_mode & 0o077 == 0
    assert broker_config(tmp_path, "mosquitto", *tls, "--members", "--bridge-to", "b.example").returncode == 0
    assert session in (tmp_path / "broker" / "mosquitto.conf").read_text().splitlines()


@pytest.mark.parametrize("software", ["rabbitmq", "nats", "emqx"])
def test_a_bridge_is_refused_where_it_was_not_tried(
    tmp_path: Path, tls: list[Path | str], software: str
) -> None:
    with_members(tmp_path)
    result = broker_config(tmp_path, software, *tls, "--members", "--bridge")
    assert (result.returncode, "mosquitto alone" in result.stderr) == (ExitCode.USAGE, True)
    named = broker_config(tmp_path, "mosquitto", *tls, *BOARDS, "--bridge")
    assert (named.returncode, "go with --members" in named.stderr) == (ExitCode.USAGE, True)


def test_files_of_emqx_are_well_formed(tmp_path: Path, tls: list[Path | str]) -> None:
    """No more can be tried: EMQX is in no registry that is reached here."""
    result = broker_config(tmp_path, "emqx", *tls, *BOARDS)
    assert "never run" in result.stdout
    settings = json.loads((tmp_path / "broker" / "emqx.conf").read_text())
    assert settings["authorization"]["no_match"] == "deny"
    assert settings["mqtt"]["shared_subscription"] is False
    rules = (tmp_path / "broker" / "acl.conf").read_text().splitlines()
    assert rules[-1] == "{deny, all}."
    assert all(
        re.fullmatch(r"\{allow, \{username, \"[a-z]+\"\}, \w+, \[.*\]\}\.", rule) for rule in rules[:-1]
    )


def test_a_coordinator_on_emqx_may_follow_the_requests_of_all_boards(
    tmp_path: Path, tls: list[Path | str]
) -> None:
    with_members(tmp_path)
    for options, may in (([*tls, *BOARDS], False), ([*tls, "--members"], True)):
        assert broker_config(tmp_path, "emqx", *options).returncode == 0
        settings = json.loads((tmp_path / "broker" / "emqx.conf").read_text())
        assert settings["mqtt"]["wildcard_subscription"] is may
    assert "devices/+/ask" in (tmp_path / "broker" / "acl.conf").read_text()


@pytest.mark.parametrize(
    ("options", "names"),
    [
        ([], "--members"),
        ([*BOARDS], "--certificate"),
        (["--plain"], "--plain"),
        (["--plain", "--address", "192.0.2.1", *BOARDS], "192.0.2.1"),
        (["--plain", "--address", "127.0.0.1"], "--board"),
        (["--plain", "--address", "127.0.0.1", "--board", "a b"], "a b"),
        (["--plain", "--address", "127.0.0.1", "--board", "coordinator"], "coordinator"),
        (["--plain", "--address", "127.0.0.1", "--board", "a", "--board", "a"], "twice"),
        (["--plain", "--address", "127.0.0.1", "--key", "k.pem", *BOARDS], "--key"),
        (["--certificate", "no.pem", "--key", "no.key", *BOARDS], "no.pem"),
        (["--plain", "--address", "127.0.0.1", "--members"], "--members"),
        (["--members", *BOARDS], "--members"),
    ],
)
def test_what_does_not_fit_is_refused_in_a_sentence_and_nothing_is_written(
    tmp_path: Path, options: list[str], names: str
) -> None:
    result = broker_config(tmp_path, "mosquitto", *options)
    assert result.returncode == ExitCode.USAGE
    assert names in result.stderr
    assert "Traceback" not in result.stderr
    assert not (tmp_path / "broker").exists()


@pytest.mark.parametrize("software", ALL)
def test_without_an_authority_there_are_no_members(
    tmp_path: Path, tls: list[Path | str], software: str
) -> None:
    result = broker_config(tmp_path, software, *tls, "--members")
    assert (result.returncode, "ca init" in result.stderr) == (ExitCode.CONFIGURATION, True)
    assert not (tmp_path / "broker").exists()


@pytest.mark.parametrize(
    ("software", "name"),
    [("mosquitto", "access"), ("nats", "nats.conf"), ("emqx", "acl.conf"), ("rabbitmq", "revoked")],
)
def test_the_files_follow_who_is_a_member(
    tmp_path: Path, tls: list[Path | str], software: str, name: str
) -> None:
    fleet = with_members(tmp_path)
    member, gone = ((tmp_path / each).read_text() for each in ("member", "gone"))
    assert broker_config(tmp_path, software, *tls, "--members").returncode == 0
    file = tmp_path / "broker" / name

    def is_let_in(device: str) -> bool:
        if software == "rabbitmq":
            (lists,) = file.iterdir()
            with Devices(tmp_path / "members") as devices:
                found = devices.find(device)
            assert found is not None
            crl = x509.load_pem_x509_crl(lists.read_bytes())
            return crl.get_revoked_certificate_by_serial_number(found.serial) is None
        return (device in file.read_text()) is (software == "nats")

    assert (is_let_in(member), is_let_in(gone)) == (True, False)
    revoked = dpagent("coordinator", "devices", "revoke", member, "--config", fleet)
    assert revoked.returncode == 0
    assert is_let_in(member) is False
    # Nobody started it: who did is told, unless it looks itself.
    assert ("Have the broker read" in revoked.stderr) is (software != "rabbitmq")


def test_the_list_for_rabbitmq_is_found_by_the_name_that_openssl_gives_it(
    tmp_path: Path, tls: list[Path | str]
) -> None:
    with_members(tmp_path)
    assert broker_config(tmp_path, "rabbitmq", *tls, "--members").returncode == 0
    (file,) = (tmp_path / "broker" / "revoked").iterdir()
    said = subprocess.run(
        ["openssl", "crl", "-hash", "-noout", "-in", file], capture_output=True, text=True, timeout=30,
        check=True
    )  # fmt: skip
    assert file.name == f"{said.stdout.strip()}.r0"


def test_a_record_that_is_damaged_is_named(tmp_path: Path, tls: list[Path | str]) -> None:
    fleet = with_members(tmp_path)
    assert broker_config(tmp_path, "nats", *tls, "--members").returncode == 0
    (tmp_path / "broker" / "broker.json").write_text("{}")
    member = (tmp_path / "member").read_text()
    result = dpagent("coordinator", "devices", "revoke", member, "--config", fleet)
    assert (result.returncode, "broker-config" in result.stderr) == (ExitCode.CONFIGURATION, True)
    # Nothing is revoked half.
    assert "1 member" in dpagent("coordinator", "devices", "list", "--config", fleet).stdout


def test_a_broker_that_is_not_installed_is_named_before_anything_is_written(
    tmp_path: Path, tls: list[Path | str]
) -> None:
    result = dpagent(
        "coordinator", "broker-config", "emqx", "--config", write_fleet(tmp_path, None), *tls, *BOARDS,
        "--run", PATH=os.fspath(tmp_path),
    )  # fmt: skip
    assert result.returncode == ExitCode.BROKER
    assert "emqx is not installed" in result.stderr
    assert not (tmp_path / "broker").exists()


@pytest.mark.skipif(find_mosquitto() is None, reason="mosquitto is not installed")
def test_the_files_of_a_broker_that_runs_are_no_other_starts(tmp_path: Path, tls: list[Path | str]) -> None:
    words = ("--address", "127.0.0.1", "--run")
    with reserved_port() as reservation:
        port = str(reservation.getsockname()[1])
    command = [sys.executable, "-P", "-m", "cli.main", "coordinator", "broker-config", "mosquitto"]
    assert broker_config(tmp_path, "mosquitto", *tls, *BOARDS).returncode == 0
    config = ["--config", tmp_path / "fleet.yaml"]
    with Child([*command, *config, *tls, *BOARDS, *words, "--port", port], tmp_path / "log") as broker:
        wait_until(lambda: listens(int(port)), "the broker")
        before = {file: file.read_bytes() for file in (tmp_path / "broker").glob("*.*")}
        second = broker_config(tmp_path, "mosquitto", *tls, "--board", "loft", *words)
        assert (second.returncode, f"process {broker.process.pid}" in second.stderr) == (
            ExitCode.BROKER,
            True,
        )
        assert {file: file.read_bytes() for file in (tmp_path / "broker").glob("*.*")} == before
        assert broker.is_running()
