"""``dpagent coordinator ca|invite|devices`` and ``dpagent enrol``: empty states, bad input, output."""

from __future__ import annotations

import json
import stat
from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path

import pytest
import yaml
from brokers import wait_until
from commands import Result, dpagent
from cryptography import x509
from cryptography.hazmat.primitives.asymmetric import ec
from enrolments import EnrolmentFleet, enrol
from fleets import write_fleet
from members import certified, enrolled, key_pem

from agent.settings import load_agent_settings
from coordinator.authority import load_authorities
from dpagent.errors import ExitCode
from dpagent.protocol.enrolment import Invitation

URL = "mqtts://127.0.0.1:1"


def coordinator(file: Path, *words: str) -> Result:
    return dpagent("coordinator", *words, "--config", file)


def test_without_an_authority_every_command_says_how_to_make_one(tmp_path: Path) -> None:
    file = write_fleet(tmp_path, None, enrolment={"address": "fleet.example"})
    for words in (
        ("invite",), ("devices", "list"), ("devices", "revoke", "abcd"), ("ca", "show"),
        ("ca", "server", "b.example"), ("ca", "client", "coordinator"), ("enrolment",),
    ):  # fmt: skip
        result = coordinator(file, *words)
        assert (result.returncode, "dpagent coordinator ca init" in result.stderr) == (3, True), words
    assert not (tmp_path / "members").exists()


def test_without_an_address_nobody_is_invited(tmp_path: Path) -> None:
    file = write_fleet(tmp_path, None)
    assert coordinator(file, "ca", "init").returncode == 0
    for words in (("invite",), ("enrolment",)):
        result = coordinator(file, *words)
        assert (result.returncode, "enrolment.address is not set" in result.stderr) == (3, True), words
    empty = coordinator(file, "devices", "list")
    assert empty.stdout.strip() == "0 members; open invitations for 0 boards."
    assert json.loads(coordinator(file, "devices", "list", "--json").stdout) == {
        "devices": [], "invitations": [],
    }  # fmt: skip
    again = coordinator(file, "ca", "init")
    assert (again.returncode, "exists" in again.stderr) == (2, True)


@pytest.mark.parametrize("address", ["", "a b", "host:0", "host:70000", "https://host", "[::1", "host:x"])
def test_an_address_that_is_none_is_refused(tmp_path: Path, address: str) -> None:
    file = write_fleet(tmp_path, None, enrolment={"address": address})
    result = coordinator(file, "ca", "init")
    assert (result.returncode, "enrolment.address" in result.stderr) == (3, True)


@pytest.fixture
def fleet(tmp_path: Path) -> Iterator[EnrolmentFleet]:
    fleet = EnrolmentFleet(tmp_path / "fleet", URL)
    yield fleet
    fleet.stop()


def test_codes_come_a_line_each_as_files_and_as_pictures(fleet: EnrolmentFleet, tmp_path: Path) -> None:
    codes = fleet.invite("--count", "50", "--out", str(tmp_path / "codes"), "--qr", "svg")
    assert len(set(codes)) == 50
    authority = load_authorities(fleet.members, now=datetime.now(UTC)).issuing
    for code in codes:
        invitation = Invitation.read(code)
        assert (invitation.host, invitation.port) == ("127.0.0.1", fleet.port)
        assert invitation.authority == authority.fingerprint
    texts = sorted((tmp_path / "codes").glob("*.txt"))
    assert [file.read_text().strip() for file in texts] == codes
    assert {stat.S_IMODE(file.stat().st_mode) for file in (tmp_path / "codes").iterdir()} == {0o600}
    assert (tmp_path / "codes/code-0001.svg").read_text().startswith("<?xml")
    assert "▄" in fleet.run("invite", "--qr", "text").stdout
    values = json.loads(fleet.run("invite", "--json").stdout)
    assert len(values["codes"]) == 1
    assert "51 boards" not in fleet.run("devices", "list").stdout
    assert "open invitations for 52 boards" in fleet.run("devices", "list").stdout


@pytest.mark.parametrize(
    "words",
    [
        ("--count", "0"), ("--hours", "0"), ("--qr", "svg"), ("--qr", "png"),
        ("--image", "x", "--out", "y"), ("--count", "many"),
    ],
)  # fmt: skip
def test_invitations_that_cannot_be_are_refused(fleet: EnrolmentFleet, words: tuple[str, ...]) -> None:
    result = fleet.run("invite", *words)
    assert result.returncode in (ExitCode.USAGE, ExitCode.PLAN)
    assert "Traceback" not in result.stderr
    assert "for 0 boards" in fleet.run("devices", "list").stdout


def test_a_device_is_shown_revoked_and_not_twice_replaced(fleet: EnrolmentFleet) -> None:
    authority = load_authorities(fleet.members, now=datetime.now(UTC)).issuing
    with fleet.devices() as devices:
        _, first = enrolled(authority, devices)
        _, second = enrolled(authority, devices, replaces=first.id)
    assert f"Took the place of {first.id}" in fleet.run("devices", "show", second.id[:6]).stdout
    assert f"Replaced by {second.id}" in fleet.run("devices", "show", first.id).stdout
    replaced = fleet.run("devices", "replace", first.id)
    assert (replaced.returncode, replaced.stdout) == (ExitCode.USAGE, "")
    for _ in range(2):  # Twice is as once.
        assert fleet.run("devices", "revoke", second.id).returncode == 0
    assert "0 members" in fleet.run("devices", "list").stdout
    for word in ("show", "revoke", "replace"):
        unknown = fleet.run("devices", word, "ffff0000")
        assert (unknown.returncode, "names no device" in unknown.stderr) == (ExitCode.USAGE, True)


def test_a_url_in_capitals_asks_for_the_certificate_all_the_same(tmp_path: Path) -> None:
    fleet = EnrolmentFleet(tmp_path / "fleet", URL.replace("mqtts", "MQTTS")).start()
    try:
        result = enrol(*fleet.invite(), tmp_path / "board", "--no-connect")
    finally:
        fleet.stop()
    assert result.returncode == 0, result.stderr
    settings = load_agent_settings(tmp_path / "board/agent.yaml")
    assert settings.mqtt.tls
    assert settings.mqtt.cert_file is not None


def test_codes_that_are_withdrawn_let_nobody_in(fleet: EnrolmentFleet, tmp_path: Path) -> None:
    first, second = fleet.invite("--count", "2")
    fleet.start()
    assert enrol(first, tmp_path / "board", "--no-connect").returncode == 0
    withdrawn = fleet.run("devices", "withdraw")
    assert (withdrawn.returncode, withdrawn.stdout.strip()) == (0, "1 code can be used no more.")
    refused = enrol(second, tmp_path / "other", "--no-connect")
    assert (refused.returncode, "has expired" in refused.stderr) == (ExitCode.USAGE, True)
    assert "1 member; open invitations for 0 boards." in fleet.run("devices", "list").stdout


def test_a_broker_that_cannot_be_told_is_an_error_after_the_revocation(tmp_path: Path) -> None:
    fleet = EnrolmentFleet(tmp_path / "fleet", URL, enrolment={"on_members_change": ["false"]})
    authority = load_authorities(fleet.members, now=datetime.now(UTC)).issuing
    with fleet.devices() as devices:
        _, device = enrolled(authority, devices)
    result = fleet.run("devices", "revoke", device.id)
    assert (result.returncode, "the broker reads is written" in result.stderr) == (ExitCode.BROKER, True)
    assert "revoked" in fleet.run("devices", "show", device.id).stdout
    fleet.stop()


@pytest.mark.parametrize(
    "code", ["", "DP1-", "DP1-AAAA", "hello", "DP1-" + "A" * 90, "DP2-" + "A" * 90, "ä", "DP1-\0"]
)
def test_a_code_that_is_none_is_refused_before_anything_is_written(tmp_path: Path, code: str) -> None:
    result = enrol(code, tmp_path / "board")
    assert (result.returncode, "The code cannot be read" in result.stderr) == (ExitCode.USAGE, True)
    assert [file.name for file in (tmp_path / "board").iterdir()] == ["data.npz"]


def test_what_the_owner_chose_is_refused_before_the_code_is_used(
    fleet: EnrolmentFleet, tmp_path: Path
) -> None:
    (code,) = fleet.invite()  # The endpoint is not even there.
    for options in (("--name", "a@b"), ("--profile", "no-such-board")):
        result = enrol(code, tmp_path / "board", *options)
        assert result.returncode in (ExitCode.USAGE, ExitCode.CONFIGURATION), options
    result = dpagent("enrol", code, "--config", tmp_path / "a.yaml")
    assert (result.returncode, "Missing: --data, --epsilon" in result.stderr) == (ExitCode.USAGE, True)
    away = enrol(code, tmp_path / "board")
    assert (away.returncode, "No enrolment endpoint answers" in away.stderr) == (ExitCode.BROKER, True)
    assert not (tmp_path / "board/agent.yaml").exists()
    both = dpagent("enrol", code, "--code-file", tmp_path / "x")
    assert both.returncode == ExitCode.USAGE
    assert dpagent("enrol", "--code-file", tmp_path / "missing").returncode == ExitCode.STORAGE


def test_a_configuration_that_no_enrolment_wrote_is_left_alone(fleet: EnrolmentFleet, tmp_path: Path) -> None:
    fleet.start()
    (code, other) = fleet.invite("--count", "2")
    assert enrol(code, tmp_path / "board", "--no-connect").returncode == 0
    file = tmp_path / "board/agent.yaml"
    values = yaml.safe_load(file.read_text())
    assert load_agent_settings(file).enrolment is not None
    file.write_text(yaml.safe_dump({**values, "enrolment": None}))
    text = file.read_text()
    result = enrol(other, tmp_path / "board", "--no-connect")
    assert (result.returncode, "no enrolment wrote it" in result.stderr) == (ExitCode.USAGE, True)
    assert file.read_text() == text
    # Of another fleet: the code is used up, and nothing of this board changes.
    file.write_text(yaml.safe_dump({**values, "fleet": "another"}))
    certificate = (tmp_path / "board/identity/device.crt").read_bytes()
    result = enrol(other, tmp_path / "board", "--no-connect")
    assert (result.returncode, "Give another --config" in result.stderr) == (ExitCode.CONFIGURATION, True)
    assert (tmp_path / "board/identity/device.crt").read_bytes() == certificate


def test_a_brokers_own_authority_and_its_demands_reach_the_board(tmp_path: Path) -> None:
    fleet = EnrolmentFleet(
        tmp_path / "fleet", URL,
        enrolment={"broker_authority": "broker-ca.pem", "client_id": "board-{cn}"},
        mqtt={"topic_prefix": "tenant/7", "protocol": "3.1.1", "keepalive_s": 60},
    )  # fmt: skip
    (tmp_path / "fleet/broker-ca.pem").write_bytes((fleet.members / "ca.crt").read_bytes())
    fleet.start()
    (code,) = fleet.invite()
    assert enrol(code, tmp_path / "board", "--no-connect").returncode == 0
    mqtt = load_agent_settings(tmp_path / "board/agent.yaml").mqtt
    assert (mqtt.topic_prefix, mqtt.protocol, mqtt.keepalive_s) == ("tenant/7", "3.1.1", 60)
    assert mqtt.ca_file == tmp_path / "board/identity/broker-ca.crt"
    device = json.loads(fleet.run("devices", "list", "--json").stdout)["devices"][0]["device"]
    assert mqtt.new_client_id(None) == f"board-{device}"
    fleet.stop()


def test_members_are_left_out_and_let_in_again_by_name(fleet: EnrolmentFleet) -> None:
    authority = load_authorities(fleet.members, now=datetime.now(UTC)).issuing
    with fleet.devices() as devices:
        ids = [enrolled(authority, devices)[1].id for _ in range(4)]
    left_out = fleet.run("devices", "exclude", ids[0][:8], ids[1])
    assert (left_out.returncode, "2 members left out" in left_out.stdout) == (0, True)
    assert fleet.run("devices", "list").stdout.count("left out") == 2
    assert "Left out of rounds since" in fleet.run("devices", "show", ids[0]).stdout
    refused = fleet.run("devices", "exclude", ids[2])
    assert (refused.returncode, "at least half" in refused.stderr) == (ExitCode.USAGE, True)
    revoked = fleet.run("devices", "revoke", ids[2])
    assert "Of 3 members 1 can have tokens now" in revoked.stderr, (
        "a board that is lost is revoked all the same"
    )
    assert "1 member let in again" in fleet.run("devices", "include", ids[0]).stdout
    assert "can have tokens" not in fleet.run("devices", "revoke", ids[1]).stderr
    assert "1 member let in again" in fleet.run("devices", "include").stdout
    assert "left out" not in fleet.run("devices", "list").stdout
    assert "2 members" in fleet.run("devices", "list").stdout


def test_a_change_of_the_authority_is_begun_once_and_ended_once(fleet: EnrolmentFleet) -> None:
    early = fleet.run("ca", "retire")
    assert (early.returncode, "ca change" in early.stderr) == (ExitCode.USAGE, True)
    assert fleet.run("ca", "client", "worker").returncode == 0
    begun = fleet.run("ca", "change")
    assert (begun.returncode, "Have the broker read" in begun.stderr) == (0, True)
    again = fleet.run("ca", "change")
    assert (again.returncode, "under way" in again.stderr) == (ExitCode.USAGE, True)
    (fleet.members / "notes.crt").write_text("no certificate")
    shown = fleet.run("ca", "show").stdout
    assert "0 of 0 members have certificates of the new one" in shown
    for name in ("coordinator", "broker"):
        (fleet.members / f"{name}.key").unlink()
    # Nobody is left behind: a server's certificate is of the new one as well.
    assert fleet.run("ca", "client", "coordinator").returncode == 0
    assert fleet.run("ca", "server", "127.0.0.1").returncode == 0
    authorities = load_authorities(fleet.members, now=datetime.now(UTC))
    for name in ("coordinator", "broker"):
        made = x509.load_pem_x509_certificate((fleet.members / f"{name}.crt").read_bytes())
        assert authorities.issuing.has_issued(made)
    for name in ("notes.crt", "worker.crt"):
        refused = fleet.run("ca", "retire")
        assert (refused.returncode != 0, str(fleet.members / name) in refused.stderr) == (True, True)
        (fleet.members / name).unlink()
    assert fleet.run("ca", "retire").returncode == 0
    for words in (("--certificate", "x"), ("--key", "x")):
        half = fleet.run("ca", "change", *words)
        assert (half.returncode, "both --certificate and --key" in half.stderr) == (ExitCode.USAGE, True)


def test_a_member_whose_certificate_has_expired_is_none_that_has_the_new_one(fleet: EnrolmentFleet) -> None:
    """It is locked out already, and holds up nobody."""
    authority = load_authorities(fleet.members, now=datetime.now(UTC)).issuing
    expired = certified(authority, days=2 / 86_400)
    with fleet.devices() as devices:
        enrolled(authority, devices)
        with devices.transaction():
            devices.add(expired.certificate, at=0.0)
    assert fleet.run("ca", "change").returncode == 0
    wait_until(expired.has_expired, "the end of a certificate")
    shown = fleet.run("ca", "show").stdout
    assert "0 of 2 members have certificates of the new one" in shown
    assert f"makes codes for {expired.device_id[:8]}" in shown
    assert "1 member would be locked out" in fleet.run("ca", "retire").stderr


def test_a_board_enrols_with_a_key_that_is_there_already(fleet: EnrolmentFleet, tmp_path: Path) -> None:
    fleet.start()
    (code,) = fleet.invite()
    given = tmp_path / "own.pem"
    given.write_bytes(key_pem(ec.generate_private_key(ec.SECP256R1())))
    for mode, status in ((0o644, ExitCode.CONFIGURATION), (0o600, ExitCode.OK)):
        given.chmod(mode)
        assert enrol(code, tmp_path / "board", "--no-connect", "--key", str(given)).returncode == status
    assert (tmp_path / "board/identity/device.key").read_bytes() == given.read_bytes()
