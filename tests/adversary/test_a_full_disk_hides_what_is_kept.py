"""Whoever issues a board's certificates chooses how long they are, and how long they last; the board comes
for the next one by name. Its records lie on the same disk as its certificate, as on most boards.

**Claim.** The board keeps the next certificate, and asks for no other, however full the disk is. **Before**,
one that found no room, as one picture more decided, was asked for again every few minutes, and in the end the
board fell silent: certificates of other lengths measured the free room to a block, at no ε. **Power**:
certainty, with certificates of all lengths that an answer may have.

The same, of what it has found out about engines (``engine.json``): a board that could not keep that tried
them again whenever its training process was a new one, so the next answer came seconds later.

And of its status (``status.json``), where no directory in memory is given for it. The board's metrics and
Home Assistant show what it says, to others than its owner: where there was no room for it, they went on to
show the round of before.

And of its ledger, while the agent is not running, as when a broker has refused it: a reader found no room for
what it shares with a writer, so that metrics and Home Assistant said that the ledger could not be read, and
named no budget, where one picture more lay on the disk (before).
"""

from __future__ import annotations

import json
import os
import ssl
from datetime import UTC, datetime, timedelta
from pathlib import Path

from brokers import wait_until
from clocks import MovableClock
from cryptography import x509
from cryptography.hazmat.primitives import hashes
from endpoints import played, said
from fleets import agent_values
from members import certified, new_authority, written
from small_disks import fill, on_disks_of_their_own

from agent.custody import begin_ledger
from agent.disclosed import disclosed
from agent.engine_file import EngineFile, KeptChoice
from agent.identity import read_certificate
from agent.overview import overview_of
from agent.renewal import Renewal
from agent.sensors import Sensors
from agent.settings import AgentSettings
from agent.status import Link, Status, StatusFile, read_status
from coordinator.authority import Authority, pem_of
from dpagent.protocol.signing import Signer

LONGEST = 11_000
"""Of what may be added to a certificate whose PEM an answer may have: 16 KiB."""


def issued(authority: Authority, like: x509.Certificate, more: int) -> bytes:
    """A certificate for the same board and key, so many bytes longer."""
    now = datetime.now(UTC)
    builder = (
        x509.CertificateBuilder().subject_name(like.subject).issuer_name(authority.certificate.subject)
        .public_key(like.public_key()).serial_number(x509.random_serial_number())
        .not_valid_before(now - timedelta(days=80)).not_valid_after(now + timedelta(days=65))
        .add_extension(
            x509.UnrecognizedExtension(x509.ObjectIdentifier("1.3.6.1.4.1.55555.1"), os.urandom(more)), False
        )
    )  # fmt: skip
    return pem_of([builder.sign(authority._key, hashes.SHA256())])


def a_board_takes_each_certificate_at_once(disk: Path, elsewhere: Path) -> None:
    authority = new_authority(elsewhere / "ca")
    identity = certified(authority, days=90)
    cert_file, key_file = written(disk, "device", identity.certificate, identity.private_key)
    ca_file = disk / "ca.crt"
    ca_file.write_bytes(pem_of(authority.chain))
    others = [new_authority(elsewhere / f"other-{number}").certificate for number in range(3)]
    asked: list[bytes] = []

    def answer(connection: ssl.SSLSocket) -> None:
        asked.append(lengths[min(len(asked), len(lengths) - 1)])
        trusted = [*authority.chain, *others[: len(asked) - 1]]
        values = {"certificate": asked[-1].decode(), "authorities": pem_of(trusted).decode()}
        connection.sendall(said(json.dumps(values).encode()))

    lengths = [issued(authority, identity.certificate, more) for more in (3_500, LONGEST, 10, 7_000)]
    with played(authority, elsewhere, answer) as code:
        settings = AgentSettings.checked(
            agent_values(
                None, Signer(bytes(32), "testers").public_key,
                mqtt={"url": "mqtts://h", "cert_file": cert_file, "key_file": key_file},
                enrolment={"url": code.url, "ca_file": ca_file},
            )
        )  # fmt: skip
        clock = MovableClock(identity.renews_at.timestamp())
        renewal = Renewal(settings, clock)
        fill(disk)
        for number, expected in enumerate(lengths, start=1):
            renewal.tend()
            wait_until(lambda number=number: len(asked) >= number, "a request")
            thread = renewal._thread
            assert thread is not None
            thread.join()
            found = read_certificate(cert_file)
            assert pem_of([found]) == expected, f"certificate {number} is not kept"
            assert ca_file.read_bytes().count(b"BEGIN") == number, "what the fleet trusts is not kept"
            clock.advance(7_200)
    assert len(asked) == len(lengths)


def test_a_board_on_a_full_disk_renews_its_certificate_like_another(tmp_path: Path) -> None:
    disks = {tmp_path / "disk": "1m", tmp_path / "elsewhere": "1m"}
    on_disks_of_their_own(a_board_takes_each_certificate_at_once, disks)


def what_is_found_out_is_kept(disk: Path) -> None:
    file = EngineFile(disk)
    file.take_room()
    assert file.load("a" * 64) is None
    fill(disk)
    for number in range(1, 4):
        file.save(f"{number}" * 64, KeptChoice("onnx", 64))
        assert EngineFile(disk).load(f"{number}" * 64) == KeptChoice("onnx", 64)
    file.take_room()
    assert EngineFile(disk).load("3" * 64) == KeptChoice("onnx", 64)


def test_a_board_on_a_full_disk_tries_no_engine_twice(tmp_path: Path) -> None:
    on_disks_of_their_own(what_is_found_out_is_kept, {tmp_path / "disk": "1m"})


def what_it_does_is_kept(disk: Path) -> None:
    clock = MovableClock(unix=5_000.0)
    file = StatusFile(disk, clock, {})
    file.note(Status(Link.STARTING, "mqtt://h", "plan"))
    fill(disk)
    for link in (Link.CONNECTED, Link.DISCONNECTED, Link.CONNECTED):
        clock.advance(60.0)
        file.note(Status(link, "mqtt://h", "plan"))
        found = read_status(disk)
        assert found is not None
        assert (found.link, found.written_at) == (link, clock.unix())


def its_ledger_is_read(disk: Path) -> None:
    values = agent_values(None, Signer(bytes(32), "testers").public_key, state_dir=str(disk / "state"))
    settings = AgentSettings.checked(values | {"mqtt": {"url": "mqtts://broker.example"}})
    begin_ledger(settings.ledger_files, settings.lifetime_budgets)
    fill(disk)
    told = disclosed(settings, overview_of(settings, Sensors()))
    assert (told.is_ledger_readable, len(told.accounts)) == (True, 1)


def test_a_board_on_a_full_disk_tells_of_its_ledger_like_another(tmp_path: Path) -> None:
    on_disks_of_their_own(its_ledger_is_read, {tmp_path / "disk": "64m"})


def test_a_board_on_a_full_disk_tells_what_it_does_like_another(tmp_path: Path) -> None:
    on_disks_of_their_own(what_it_does_is_kept, {tmp_path / "disk": "1m"})
