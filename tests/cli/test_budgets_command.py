"""``dpagent coordinator budgets …``, and who takes part in ``dpagent coordinator status``."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest
from commands import Result, dpagent
from cryptography import x509
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.asymmetric.utils import encode_dss_signature
from fleets import write_fleet
from requests_for_tokens import ask_for
from token_desks import FLEET, JOB, Desk

from coordinator.keys import load_signer
from coordinator.participation import participation
from dpagent.errors import ExitCode
from dpagent.protocol.issuing import Verdict, Wish


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
    assert found.dead_end(1, 1) is None, "one may still come"
    words = found.dead_end(1, 2)
    assert words is not None
    assert "Round 1 cannot close: 1 member may still send for it, and it needs 2." in words
    assert "it is given up, and the job is paused" in words
    assert participation([], desk.devices.all()).dead_end(1, 3) is None, "nobody has declined"
    assert found.dead_end(1, 4) is None, "others may enrol"


def test_without_a_registry_the_commands_say_so(tmp_path: Path) -> None:
    for words in (("list",), ("show", "abcd"), ("export", "-")):
        result = budgets(tmp_path, *words)
        assert (result.returncode, "does not exist" in result.stderr) == (ExitCode.STORAGE, True)
