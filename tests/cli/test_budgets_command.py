"""``dpagent coordinator budgets …``, and who takes part in ``dpagent coordinator status``."""

from __future__ import annotations

import base64
import contextlib
import json
import math
import sqlite3
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from commands import Result, dpagent
from cryptography import x509
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.asymmetric.utils import encode_dss_signature
from cryptography.hazmat.primitives.serialization import Encoding
from fleets import write_fleet, write_job, write_shared
from requests_for_tokens import ask_for
from token_desks import FLEET, JOB, Desk

from coordinator.budget_export import BudgetsDigest
from coordinator.keys import load_signer
from coordinator.participation import participation, totals
from coordinator.registry import Entry, RegistryReader, Spent
from dpagent.errors import ExitCode
from dpagent.protocol.issuing import Verdict, Wish
from dpagent.protocol.signing import Signer


@pytest.fixture
def desk(tmp_path: Path) -> Iterator[Desk]:
    desk = Desk(tmp_path / "members", load_signer(tmp_path / "keys", FLEET), device_epsilon=2.0)
    yield desk
    desk.close()


def budgets(directory: Path, *words: str) -> Result:
    file = write_fleet(directory, None, linkability="fragment")
    return dpagent("coordinator", "budgets", *words, "--config", file)


def test_columns_and_jobs_are_listed_and_shown(desk: Desk, tmp_path: Path) -> None:
    first, second, third = (desk.member() for _ in range(3))
    assert ask_for(desk, first, 1) is ask_for(desk, first, 2) is Verdict.GRANTED
    assert ask_for(desk, first, 3) is Verdict.OVER_LIMIT
    assert ask_for(desk, second, 1, wish=Wish.BUDGET) is Verdict.NOTED
    successor = desk.member(replaces=first.device_id)
    listed = json.loads(budgets(tmp_path, "list", "--json").stdout)
    by_device = {each["device"]: each for each in listed}
    (column,) = by_device[first.device_id]["granted"]
    assert (column["epsilon"], column["delta"], column["trust"]) == (2.0, 1e-5, "none")
    assert by_device[successor.device_id]["granted"] == [column]
    assert by_device[second.device_id]["granted"] == by_device[third.device_id]["granted"] == []
    text = budgets(tmp_path, "list").stdout
    assert text.count("2.000") == 2
    assert "2 devices never granted anything" in text
    shown = budgets(tmp_path, "show", successor.device_id[:8])
    assert f"Took the place of {first.device_id}" in shown.stdout
    assert "Granted in all: ε = 2.000" in shown.stdout
    values = json.loads(budgets(tmp_path, "show", first.device_id, "--json").stdout)
    assert [each["verdict"] for each in values["requests"]] == ["granted", "granted", "over_limit"]
    assert [(each["job"], each["rounds"]) for each in values["jobs"]] == [(JOB.hex(), 2)]


def test_an_auditor_checks_the_export_with_nothing_but_a_library(desk: Desk, tmp_path: Path) -> None:
    boards = [desk.member() for _ in range(3)]
    for board in boards:
        ask_for(desk, board, 1)
    target = tmp_path / "export.json"
    assert budgets(tmp_path, "export", str(target)).returncode == 0
    exported = json.loads(target.read_text())
    digests = set()
    for device in exported["devices"]:
        certificate = x509.load_pem_x509_certificate(device["certificate"].encode())
        key = certificate.public_key()
        assert isinstance(key, ec.EllipticCurvePublicKey)
        (statement,) = device["statements"]
        said, signature = bytes.fromhex(statement["statement"]), bytes.fromhex(statement["signature"])
        numbers = (int.from_bytes(signature[:32], "big"), int.from_bytes(signature[32:], "big"))
        signed = b"dpagent v1 device\0" + b"token statement\0" + said
        key.verify(encode_dss_signature(*numbers), signed, ec.ECDSA(hashes.SHA256()))
        assert said[:16].hex() == device["device"]
        digests.add(statement["key_digest"])
    assert len(digests) == 1, "all were shown one key"
    assert [each["modulus"] for each in exported["keys"]] == [each.hex() for each in desk.keys.moduli]
    # What would tell a fragment: no blinded message, and no signature of one.
    assert "blinded" not in target.read_text()


@pytest.fixture
def exported(desk: Desk, tmp_path: Path) -> Path:
    """Of three boards and one that took the place of the first."""
    first, second, third = (desk.member() for _ in range(3))
    assert ask_for(desk, first, 1) is ask_for(desk, first, 2) is Verdict.GRANTED
    assert ask_for(desk, second, 1) is Verdict.GRANTED
    assert ask_for(desk, third, 1, wish=Wish.BUDGET) is Verdict.NOTED
    desk.member(replaces=first.device_id)
    target = tmp_path / "export.json"
    result = budgets(tmp_path, "export", str(target))
    assert result.returncode == 0, result.stderr
    return target


def test_an_export_that_a_grant_comes_between_fits_together(
    desk: Desk, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The coordinator goes on meanwhile: nobody is to find it in the wrong for that."""
    board = desk.member()
    assert ask_for(desk, board, 1) is Verdict.GRANTED
    read = RegistryReader.entries

    def granted_just_before(reader: RegistryReader, device: str | None = None) -> list[Entry]:
        ask_for(desk, board, 2)
        return read(reader, device)

    monkeypatch.setattr(RegistryReader, "entries", granted_just_before)
    target = tmp_path / "export.json"
    assert budgets(tmp_path, "export", str(target)).returncode == 0
    result = verified(target)
    assert (result.returncode, "2 statements" in result.stdout) == (0, True), result.stderr


def test_nothing_is_exported_where_the_coordinators_key_is_not(desk: Desk, tmp_path: Path) -> None:
    """It would be signed by another, which a coordinator that is begun there later would take for its own."""
    desk.member()
    (tmp_path / "keys").rename(tmp_path / "keys of the other machine")
    result = budgets(tmp_path, "export", str(tmp_path / "export.json"))
    assert (result.returncode, "has no signing.key" in result.stderr) == (ExitCode.STORAGE, True)
    assert not (tmp_path / "keys").exists()


def verified(file: Path, *options: str) -> Result:
    """On another machine: without the fleet's files."""
    return dpagent("coordinator", "budgets", "verify", file, *options)


def test_an_auditor_verifies_the_export_by_one_command(exported: Path, desk: Desk, tmp_path: Path) -> None:
    by_file = verified(exported)
    assert by_file.returncode == 0, by_file.stderr
    assert "4 devices, 4 statements, each signed by its device" in by_file.stdout
    assert "that the file names: compare it with what `dpagent coordinator key` prints" in by_file.stdout
    key = desk.signer.public_key
    found = json.loads(verified(exported, "--key", key, "--json").stdout)
    assert (found["problems"], found["coordinator_key"]) == ([], key)
    granted = {each["device"]: (each["rounds"], each["granted"]) for each in found["devices"]}
    listed = {
        each["device"]: each["granted"] for each in json.loads(budgets(tmp_path, "list", "--json").stdout)
    }
    assert {device: columns for device, (_, columns) in granted.items()} == listed
    assert sorted(rounds for rounds, _ in granted.values()) == [0, 1, 2, 2]
    other = verified(exported, "--key", Signer(bytes(32), FLEET).public_key)
    assert (other.returncode, "It names the coordinator key" in other.stderr) == (ExitCode.LEDGER, True)


def test_a_fleet_whose_jobs_are_all_files_of_their_own_has_budgets(desk: Desk, tmp_path: Path) -> None:
    board = desk.member()
    assert ask_for(desk, board, 1) is Verdict.GRANTED
    with_job = [
        json.loads(budgets(tmp_path, *words, "--json").stdout)
        for words in (["list"], ["show", board.device_id])
    ]
    fleet, target = write_shared(tmp_path, None), tmp_path / "export.json"
    for words, expected in zip((["list"], ["show", board.device_id]), with_job, strict=True):
        result = dpagent("coordinator", "budgets", *words, "--json", "--config", fleet)
        assert result.returncode == 0, result.stderr
        assert json.loads(result.stdout) == expected
    assert dpagent("coordinator", "budgets", "export", target, "--config", fleet).returncode == 0
    assert verified(target).returncode == 0


def test_a_job_without_tokens_is_told_to_who_adds_it_and_to_the_auditor(
    exported: Path, desk: Desk, tmp_path: Path
) -> None:
    fleet = write_fleet(tmp_path, None, linkability="fragment")
    for linkability in ("none", "fragment"):
        file = write_job(tmp_path / f"with-{linkability}.yaml", linkability=linkability)
        said = dpagent("coordinator", "job", "add", file, "--config", fleet)
        assert said.returncode == 0, said.stderr
        assert ("It has no tokens" in said.stdout) is (linkability == "none")
    assert "Not in these figures" not in verified(exported).stdout
    # A job that has not begun has cost nobody anything.
    assert budgets(tmp_path, "export", str(exported)).returncode == 0
    assert json.loads(verified(exported, "--json").stdout)["without_tokens"] == []
    with contextlib.closing(sqlite3.connect(tmp_path / "state" / "coordinator.db")) as database, database:
        database.execute("UPDATE jobs SET begun_at = 1.0")
    assert budgets(tmp_path, "export", str(exported)).returncode == 0
    found = verified(exported, "--key", desk.signer.public_key)
    assert found.returncode == 0, found.stderr
    (line,) = [each for each in found.stdout.splitlines() if each.startswith("Not in these figures")]
    assert "job with-none (" in line
    assert "ε = 4.000 at most for each record, trusts none" in line


def test_where_boards_enrol_a_job_has_to_say_whose_fragments_count(tmp_path: Path) -> None:
    """By a default, the next job of a fleet of members would count anybody's, without a word."""
    fleet = write_fleet(tmp_path, None, enrolment={"address": "127.0.0.1:1"}, linkability="none")
    job = write_job(tmp_path / "job.yaml")
    assert dpagent("coordinator", "ca", "init", "--config", fleet).returncode == 0
    added = dpagent("coordinator", "job", "add", job, "--name", "before", "--config", fleet)
    assert added.returncode == 0, added.stderr
    assert dpagent("coordinator", "invite", "--config", fleet).returncode == 0
    refused = dpagent("coordinator", "job", "add", job, "--config", fleet)
    assert refused.returncode == ExitCode.CONFIGURATION
    assert f"{job}: linkability is not set, and boards enrol in this fleet" in refused.stderr
    said = ("--set", "linkability=fragment")
    assert dpagent("coordinator", "job", "add", job, *said, "--config", fleet).returncode == 0


def test_whatever_is_changed_in_an_export_is_found_even_if_it_is_signed_anew(
    exported: Path, desk: Desk, tmp_path: Path
) -> None:
    values = json.loads(exported.read_text())
    first = next(each for each in values["devices"] if len(each["statements"]) == 2)
    place = values["devices"].index(first)
    job = first["statements"][0]["job"]

    def changed(change: Callable[[dict[str, Any]], object], *, is_signed: bool) -> str:
        other = json.loads(exported.read_text())
        change(other)
        if is_signed:
            other["signature"] = desk.signer.sign(BudgetsDigest.of(other), "budgets").hex()
        file = tmp_path / "changed.json"
        file.write_text(json.dumps(other))
        result = verified(file)
        assert result.returncode == ExitCode.LEDGER, result.stdout
        return result.stderr

    def lessen(values: dict[str, Any]) -> None:
        values["devices"][place]["granted"][0]["epsilon"] /= 2

    assert "something was changed" in changed(lessen, is_signed=False)
    assert "the figures shown are not those" in changed(lessen, is_signed=True)

    def say_that_a_job_is_left_out(values: dict[str, Any]) -> None:
        values["devices"][place]["granted"][0]["jobs_left_out"] += 1

    assert "the figures shown are not those" in changed(say_that_a_job_is_left_out, is_signed=True)

    def other_round(values: dict[str, Any]) -> None:
        values["devices"][place]["statements"][1]["round"] = 3

    assert "is not what it says" in changed(other_round, is_signed=True)

    def forge(values: dict[str, Any]) -> None:
        entry = values["devices"][place]["statements"][0]
        entry["signature"] = "00" * 64

    assert "not signed by its key" in changed(forge, is_signed=True)

    def another_key(values: dict[str, Any]) -> None:
        entry = values["devices"][place]["statements"][0]
        entry["key_digest"] = "11" * 32

    said = changed(another_key, is_signed=True)
    assert f"Round 1 of job {job[:8]}: boards were shown 2 different keys" in said

    def unpriced(values: dict[str, Any]) -> None:
        values["prices"] = [each for each in values["prices"] if each["round"] != 2]

    assert "what it costs is not there" in changed(unpriced, is_signed=True)

    def without_the_one_before(values: dict[str, Any]) -> None:
        del values["devices"][place]

    assert "which is not there" in changed(without_the_one_before, is_signed=True)

    def lessen_a_job(values: dict[str, Any]) -> None:
        values["devices"][place]["jobs"][0]["epsilon"] /= 2

    assert "its jobs are not shown as they follow" in changed(lessen_a_job, is_signed=True)

    def show_two_figures(values: dict[str, Any]) -> None:
        shown = values["devices"][place]["granted"]
        shown.insert(0, shown[0] | {"epsilon": 0.01})

    assert "the figures shown are not those" in changed(show_two_figures, is_signed=True)

    def twice(values: dict[str, Any]) -> None:
        statements = values["devices"][place]["statements"]
        statements.append(statements[0] | {"verdict": "over_limit"})

    assert f"the statement for round 1 of job {job[:8]} is there 2 times" in changed(twice, is_signed=True)

    def call_it_declined(values: dict[str, Any]) -> None:
        values["devices"][place]["statements"][1]["verdict"] = "noted"

    assert "its wish was 'takes_part', and the verdict is 'noted'" in changed(
        call_it_declined, is_signed=True
    )

    def without_keys(values: dict[str, Any]) -> None:
        values["keys"] = []

    assert "its key is not there" in changed(without_keys, is_signed=True)

    def free_the_successor(values: dict[str, Any]) -> None:
        """Of what the board before it was granted: the two would have a budget each."""
        after = next(each for each in values["devices"] if each["replaces"])
        after |= {"replaces": None, "granted": [], "jobs": []}

    assert f"Device {first['device']} is replaced, and 0 devices took its place" in changed(
        free_the_successor, is_signed=True
    )

    def keep_the_one_before(values: dict[str, Any]) -> None:
        values["devices"][place]["state"] = "enrolled"

    assert "is enrolled, and 1 device took its place" in changed(keep_the_one_before, is_signed=True)

    def change_a_key(key: str, value: object) -> Callable[[dict[str, Any]], None]:
        def change(values: dict[str, Any]) -> None:
            values["keys"][0][key] = value

        return change

    modulus = values["keys"][0]["modulus"]
    for key, value in (
        ("modulus", values["keys"][1]["modulus"]), ("linkability", "round"), ("tokens", 3),
        ("sealing_key", "11" * 32), ("modulus", f"{modulus[:-1]}{'3' if modulus[-1] != '3' else '5'}"),
    ):  # fmt: skip
        said = changed(change_a_key(key, value), is_signed=True)
        wanted = (
            "what is there for its key is none" if key == "linkability"
            else "the key that is there is not the one that boards were shown"
        )  # fmt: skip
        assert f"Round 1 of job {job[:8]}: {wanted}" in said
    even = changed(change_a_key("modulus", f"{modulus[:-1]}2"), is_signed=True)
    assert f"Round 1 of job {job[:8]}: what is there for its key is none" in even

    def call_it_without_tokens(values: dict[str, Any]) -> None:
        untold = {"job": job, "name": "meters", "columns": values["prices"][0]["columns"]}
        values["without_tokens"] = [untold, untold]

    said = changed(call_it_without_tokens, is_signed=True)
    assert f"Job meters ({job[:8]}) is said to be without tokens, and keys, prices or statements" in said
    assert f"Job {job[:8]} without tokens is there 2 times" in said

    def in_a_circle(values: dict[str, Any]) -> None:
        after = next(each for each in values["devices"] if each["replaces"] == first["device"])
        values["devices"][place]["replaces"] = after["device"]

    assert "took its own place" in changed(in_a_circle, is_signed=True)


def test_a_price_that_falls_bounds_nothing_and_is_found(exported: Path, desk: Desk, tmp_path: Path) -> None:
    values = json.loads(exported.read_text())
    (cheaper,) = [each for each in values["prices"] if each["round"] == 2]
    cheaper["columns"][0]["epsilon"] = 0.1
    for device in values["devices"]:
        for figure in [*device["granted"], *device["jobs"]]:
            figure["epsilon"] = min(figure["epsilon"], 0.1) if figure["epsilon"] > 1 else figure["epsilon"]
    values["signature"] = desk.signer.sign(BudgetsDigest.of(values), "budgets").hex()
    exported.write_text(json.dumps(values))
    result = verified(exported)
    assert (result.returncode, "1 problem. Round 2 of job" in result.stderr) == (ExitCode.LEDGER, True)
    assert "brings it to less than round 1 does" in result.stderr


@pytest.mark.parametrize(
    "part", [b"\x2a\x86\x48\xce\x3d\x02\x01", b"\x2a\x86\x48\xce\x3d\x03\x01\x07", b"\x03\x42\x00\x04"]
)
def test_a_certificate_that_can_be_read_and_not_used_is_a_problem_and_no_error(
    exported: Path, part: bytes
) -> None:
    values = json.loads(exported.read_text())
    certificate = x509.load_pem_x509_certificate(values["devices"][0]["certificate"].encode())
    der = certificate.public_bytes(Encoding.DER)
    assert part in der
    # Another kind of key, another curve, no point of the curve.
    broken = base64.encodebytes(der.replace(part, part[:-1] + bytes([part[-1] ^ 1])))
    values["devices"][0]["certificate"] = (
        f"-----BEGIN CERTIFICATE-----\n{broken.decode()}-----END CERTIFICATE-----\n"
    )
    exported.write_text(json.dumps(values))
    result = verified(exported)
    assert result.returncode == ExitCode.LEDGER, result.stderr
    assert "what is there for its certificate is none of a device" in result.stderr


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("exported_at", "2026-11-26T12:00:00+00:00\x1b]0;all is well\x07"),
        ("exported_at", "yesterday"),
        ("exported_at", "\ud800"),
    ],
)
def test_what_no_coordinator_writes_is_not_repeated_to_the_terminal(
    exported: Path, desk: Desk, key: str, value: str
) -> None:
    values = json.loads(exported.read_text()) | {key: value}
    with contextlib.suppress(UnicodeEncodeError):
        values["signature"] = desk.signer.sign(BudgetsDigest.of(values), "budgets").hex()
    exported.write_text(json.dumps(values))
    result = verified(exported)
    assert (result.returncode, key in result.stderr) == (ExitCode.DATA, True), result.stderr
    assert "\x1b" not in result.stdout + result.stderr


def test_an_epsilon_of_no_mechanism_is_no_internal_error(exported: Path) -> None:
    values = json.loads(exported.read_text())
    values["prices"][1]["columns"][0]["epsilon"] = 1.7e308
    exported.write_text(json.dumps(values))
    result = verified(exported)
    assert (result.returncode, "prices.1.columns.0.epsilon" in result.stderr) == (ExitCode.DATA, True)


def test_two_values_for_one_key_are_no_export(exported: Path) -> None:
    """Another program would show the auditor the other one."""
    exported.write_text(exported.read_text().replace("{", '{"devices": [],', 1))
    result = verified(exported)
    assert (result.returncode, "two values for one key: 'devices'" in result.stderr) == (ExitCode.DATA, True)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("no JSON", "is no JSON"), ("[1]", "holds no object"), ("{}", "version"),
        ('{"version": 9}', "version"), ("[" * 100_000, "is no JSON"),
        ('{"version": 1, "fleet": "a"}', "version: expected 2"),
    ],
)  # fmt: skip
def test_what_is_no_export_is_said_to_be_none(tmp_path: Path, text: str, expected: str) -> None:
    file = tmp_path / "export.json"
    file.write_text(text)
    result = verified(file)
    assert (result.returncode, expected in result.stderr) == (ExitCode.DATA, True), result.stderr
    wrong = verified(file, "--key", "x")
    assert (wrong.returncode, "--key 'x'" in wrong.stderr) == (ExitCode.USAGE, True)


def test_a_job_without_a_guarantee_has_no_figure_in_any_sum() -> None:
    nothing = {"unit": "record", "adjacency": "a", "trust": "none", "epsilon": None, "delta": None}
    (total,) = totals([Spent("j", 1, nothing)])
    assert (total.epsilon, total.delta) == (math.inf, 1.0)
    assert total.sentence().startswith("no guarantee")


def test_who_takes_part_is_counted_by_public_reasons(desk: Desk) -> None:
    boards = [desk.member() for _ in range(6)]
    for board, wish in zip(boards, [0, 0, 0, Wish.BUDGET, Wish.LIMITS], strict=False):
        ask_for(desk, board, 1, wish=Wish(wish))
    with desk.devices.transaction():
        desk.devices.revoke(boards[0].device_id, at=1.0)
    found = participation(desk.entries(), desk.devices.all())
    assert found.sentence() == (
        "2 of 5 take part, 1 declined (beyond the owner's limits), 1 declined (budget used up), 1 not seen"
    )


def test_a_round_that_too_few_may_still_send_for_is_said_to_be_a_dead_end(desk: Desk) -> None:
    boards = [desk.member() for _ in range(3)]
    for board in boards[:2]:
        ask_for(desk, board, 1, wish=Wish.LIMITS)
    found = participation(desk.entries(), desk.devices.all())
    assert found.dead_end(1, 1, 0) is None, "one may still come"
    words = found.dead_end(1, 2, 0)
    assert words is not None
    assert "Round 1 cannot close: 1 member may still send for it, and it needs 2." in words
    assert "it is given up, and the job is paused" in words
    assert participation([], desk.devices.all()).dead_end(1, 3, 0) is None, "nobody has declined"
    assert found.dead_end(1, 4, 0) is None, "others may enrol"


def test_without_a_registry_the_commands_say_so(tmp_path: Path) -> None:
    for words in (("list",), ("show", "abcd"), ("export", "-")):
        result = budgets(tmp_path, *words)
        assert (result.returncode, "does not exist" in result.stderr) == (ExitCode.STORAGE, True)
