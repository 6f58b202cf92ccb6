"""The checker finds what it is there to find, and shares no code with the programs that it checks."""

from __future__ import annotations

import ast
import hashlib
import json
import shutil
import sqlite3
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path

import cbor2
import numpy as np
import pytest
from crash.checker import Checker
from crash.fleet_under_fire import DEVICES, MIXER, NAME, ROUNDS, FleetUnderFire, launcher, places
from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey
from protocol import second_client

pytestmark = pytest.mark.heavy
DEVICE = DEVICES[0]


@pytest.fixture(scope="module")
def done(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The directory of a fleet whose job is done without a kill."""
    directory = tmp_path_factory.mktemp("done")
    with launcher() as programs, FleetUnderFire(directory, programs) as fleet:
        outcome = fleet.run(lambda _name: None)
    assert outcome.broken == []
    return directory


@contextmanager
def database(file: Path) -> Iterator[sqlite3.Connection]:
    with closing(sqlite3.connect(file)) as connection, connection:
        yield connection


def ledger(fleet: Path) -> Path:
    return fleet / DEVICE / "state" / "ledger.db"


def counts(fleet: Path) -> Path:
    return fleet / "coordinator" / "state" / "coordinator.db"


def seen(fleet: Path) -> Checker:
    checker = Checker(places(fleet))
    checker.look()
    return checker


def publish(fleet: Path, sender: str, topic: str, payload: bytes) -> None:
    """Add a message to the capture."""
    record = cbor2.dumps({"sender": sender, "topic": f"dpagent/v1/{NAME}/{topic}", "payload": payload})
    with (fleet / "capture").open("ab") as stream:
        stream.write(len(record).to_bytes(4, "big") + record)


def send(fleet: Path, message: bytes, ephemeral: bytes) -> None:
    key = seen(fleet).capture.plans[1]["sealing_key"]
    (job,) = seen(fleet).capture.jobs
    info = second_client.info_of(NAME, job)
    publish(fleet, DEVICE, "fragments", second_client.seal(message, info, key, ephemeral))


def a_charge_is_missing(fleet: Path) -> None:
    """The chain is whole: it is a ledger that was never charged for the last round."""
    with database(ledger(fleet)) as connection:
        connection.execute("DROP TRIGGER no_delete")
        connection.execute("DELETE FROM entries WHERE number = (SELECT max(number) FROM entries)")
        connection.execute("UPDATE rounds SET state = 'offered' WHERE round = ?", (ROUNDS,))
    (fleet / DEVICE / "state" / "ledger.head").unlink()


def a_round_is_charged_twice(fleet: Path) -> None:
    with database(ledger(fleet)) as connection:
        connection.execute("DROP TRIGGER no_second_charge")
        connection.execute("DROP INDEX one_charge_a_round")
        last, kind, body, digest = connection.execute(
            "SELECT * FROM entries ORDER BY number DESC LIMIT 1"
        ).fetchone()
        linked = digest + (last + 1).to_bytes(8, "big") + kind.encode() + b"\0" + body.encode()
        entry = (last + 1, kind, body, hashlib.sha256(linked).digest())
        connection.execute("INSERT INTO entries VALUES (?, ?, ?, ?)", entry)


def an_entry_is_altered(fleet: Path) -> None:
    with database(ledger(fleet)) as connection:
        connection.execute("DROP TRIGGER no_update")
        connection.execute("UPDATE entries SET body = replace(body, '0', '1') WHERE number = 2")


def the_head_leads(fleet: Path) -> None:
    file = fleet / DEVICE / "state" / "ledger.head"
    head = json.loads(file.read_text())
    file.write_text(json.dumps(head | {"entries": head["entries"] + 1}))


def a_second_noisy_sum_leaves(fleet: Path) -> None:
    fragment = next(each for each in seen(fleet).capture.fragments.values() if each.device == DEVICE)
    send(fleet, fragment.message[:8] + b"n" * 16 + fragment.message[24:], b"e" * 32)


def a_fragment_leaves_with_another_content(fleet: Path) -> None:
    fragment = next(each for each in seen(fleet).capture.fragments.values() if each.device == DEVICE)
    send(fleet, fragment.message[:24].ljust(len(fragment.message), b"\0"), b"e" * 32)


def a_ciphertext_leaves_twice(fleet: Path) -> None:
    fragment = next(each for each in seen(fleet).capture.fragments.values() if each.device == DEVICE)
    for _ in range(2):
        send(fleet, fragment.message, b"e" * 32)


def dummies_leave_beside_fragments(fleet: Path) -> None:
    fragment = next(each for each in seen(fleet).capture.fragments.values() if each.device == DEVICE)
    dummy = fragment.message[:8] + b"n" * 16 + b"\xff"
    send(fleet, dummy.ljust(len(fragment.message), b"\0"), b"e" * 32)


def a_dummy_has_values(fleet: Path) -> None:
    dummy = next(iter(seen(fleet).capture.dummies.values()))
    other = dummy.message[:8] + b"n" * 16 + b"\xff"
    send(fleet, other.ljust(len(dummy.message), b"v"), b"e" * 32)


def a_round_is_announced_with_another_plan(fleet: Path) -> None:
    checker = seen(fleet)
    body = second_client.encode(checker.capture.plans[ROUNDS] | {"delta": 0.5})
    secret = (fleet / "coordinator" / "keys" / "signing.key").read_bytes()
    publish(fleet, "coordinator", "plan", second_client.sign(body, "plan", NAME, secret))


def a_receipted_fragment_is_not_counted(fleet: Path) -> None:
    with database(counts(fleet)) as connection:
        connection.execute("DELETE FROM fragments WHERE id = (SELECT min(id) FROM fragments)")


def something_is_counted_that_nobody_sent(fleet: Path) -> None:
    with database(counts(fleet)) as connection:
        connection.execute(
            "INSERT INTO fragments VALUES (?, 1, 1, 0, ?, 1, ?, 0.0)", (b"n" * 16, b"t" * 16, b"d" * 8)
        )


def a_fragment_is_summed_twice(fleet: Path) -> None:
    """The model after the last round steps once more by one fragment's part."""
    checker = seen(fleet)
    plan = checker.capture.plans[ROUNDS]
    fragment = next(each for each in checker.capture.fragments.values() if each.round == ROUNDS)
    with database(counts(fleet)) as connection:
        (raw,) = connection.execute("SELECT weights FROM models").fetchone()
        weights = np.frombuffer(raw, "<f4")
        extra = checker._mean(plan, [fragment])[: len(weights)] / len(DEVICES)
        stepped = (weights - 0.5 * extra).astype("<f4")
        connection.execute("UPDATE models SET weights = ?", (stepped.tobytes(),))


def reopened(fleet: Path, connection: sqlite3.Connection) -> None:
    """The last round is open again, with a partial sum for each of its fragments."""
    checker = seen(fleet)
    connection.execute("UPDATE rounds SET closed_at = NULL WHERE number = ?", (ROUNDS,))
    for number, (identity, each) in enumerate(checker.capture.fragments.items()):
        if each.round == ROUNDS:
            units = each.values(checker.capture.plans[ROUNDS]).astype("<i4").tobytes()
            row = (number, ROUNDS, each.position, 1, units, "<i4", identity, units, "<i4")
            connection.execute("INSERT INTO partial_sums VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?)", row)
            connection.execute("INSERT INTO tallies VALUES (?, ?, ?, 1)", (ROUNDS, each.position, number))


def a_value_changes_on_its_way_to_the_sum(fleet: Path) -> None:
    with database(counts(fleet)) as connection:
        reopened(fleet, connection)
        (kept,) = connection.execute("SELECT kept FROM partial_sums WHERE rowid = 1").fetchone()
        values = np.frombuffer(kept, "<i4").copy()
        values[0] += 1
        changed = values.tobytes()
        connection.execute("UPDATE partial_sums SET units = ?, kept = ? WHERE rowid = 1", (changed, changed))


def a_batch_is_added_up_wrongly(fleet: Path) -> None:
    with database(counts(fleet)) as connection:
        reopened(fleet, connection)
        (units,) = connection.execute("SELECT units FROM partial_sums WHERE rowid = 1").fetchone()
        values = np.frombuffer(units, "<i4") + 1
        connection.execute(
            "UPDATE partial_sums SET units = ? WHERE rowid = 1", (values.astype("<i4").tobytes(),)
        )


def a_batch_is_lost_after_it_was_counted(fleet: Path) -> None:
    with database(counts(fleet)) as connection:
        reopened(fleet, connection)
        connection.execute("DELETE FROM partial_sums WHERE rowid = 1")


def a_fragment_is_dropped_without_being_counted(fleet: Path) -> None:
    with database(ledger(fleet)) as connection:
        connection.execute("UPDATE fragments SET state = 'expired' WHERE round = 1")


def own_receipt(fleet: Path, sender: str, topic_of: bytes, digest_of: bytes) -> None:
    topic = second_client.receipt_topic(topic_of, NAME).removeprefix(f"dpagent/v1/{NAME}/")
    publish(fleet, sender, topic, second_client.receipt(digest_of))


def a_receipt_of_its_own_is_of_nothing(fleet: Path) -> None:
    own_receipt(fleet, "coordinator", bytes(16), bytes(16))


def a_receipt_comes_on_another_fragments_topic(fleet: Path) -> None:
    one, another, *_ = seen(fleet).capture.fragments
    own_receipt(fleet, "coordinator", one, another)


def a_device_publishes_a_receipt(fleet: Path) -> None:
    one, *_ = seen(fleet).capture.fragments
    own_receipt(fleet, DEVICE, one, one)


BREAKS = [
    (a_charge_is_missing, "published and not charged"),
    (a_round_is_charged_twice, "was charged 2 times"),
    (an_entry_is_altered, "chain is broken at entry 2"),
    (the_head_leads, "not on the chain"),
    (a_second_noisy_sum_leaves, "2 noisy sums"),
    (a_fragment_leaves_with_another_content, "two fragments with the id"),
    (a_ciphertext_leaves_twice, "one ciphertext twice"),
    (dummies_leave_beside_fragments, "has dummies and fragments"),
    (a_dummy_has_values, "a dummy that has values"),
    (a_round_is_announced_with_another_plan, "another plan"),
    (a_receipted_fragment_is_not_counted, "1 receipts for what is not counted"),
    (a_receipt_of_its_own_is_of_nothing, "1 receipts of their own for what is not counted"),
    (a_receipt_comes_on_another_fragments_topic, "1 receipts of their own for what is not counted"),
    (a_device_publishes_a_receipt, f"{DEVICE} published on"),
    (something_is_counted_that_nobody_sent, "nobody sent"),
    (a_fragment_is_summed_twice, "its model is not that of the captured fragments"),
    (a_value_changes_on_its_way_to_the_sum, "the values of"),
    (a_batch_is_added_up_wrongly, "a partial sum is not that of its values"),
    (a_batch_is_lost_after_it_was_counted, "the sums are not those of the counted fragments"),
    (a_fragment_is_dropped_without_being_counted, "has uncounted fragments"),
]


def test_each_planted_break_is_found(done: Path, tmp_path: Path) -> None:
    """One test: each worker that runs one of them would have to run a job."""
    assert Checker(places(done)).look() == []
    for plant, finding in BREAKS:
        fleet = Path(shutil.copytree(done, tmp_path / plant.__name__))
        plant(fleet)
        found = Checker(places(fleet)).look()
        assert any(finding in broken for broken in found), f"{plant.__name__}: {found}"


@pytest.fixture(scope="module")
def done_mixed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same through a mixer."""
    directory = tmp_path_factory.mktemp("mixed")
    with launcher() as programs, FleetUnderFire(directory, programs, is_mixed=True) as fleet:
        outcome = fleet.run(lambda _name: None)
    assert outcome.broken == []
    return directory


def departures(fleet: Path) -> list[bytes]:
    """What the mixer has published, in order."""
    checker = Checker(places(fleet, is_mixed=True))
    checker.look()
    return sorted(checker.capture.left)


def a_message_leaves_the_mixer_twice(fleet: Path) -> None:
    publish(fleet, MIXER, "fragments", departures(fleet)[0])


def the_mixer_publishes_its_own(fleet: Path) -> None:
    publish(fleet, MIXER, "fragments", bytes(100))


def a_device_publishes_past_the_mixer(fleet: Path) -> None:
    publish(fleet, DEVICE, "fragments", departures(fleet)[0])


def a_device_answers_another_plan(fleet: Path) -> None:
    key = X25519PrivateKey.from_private_bytes((fleet / MIXER / "keys/mixer.key").read_bytes())
    message = second_client.seal_to_mixer(
        departures(fleet)[0], bytes(32), NAME, key.public_key().public_bytes_raw(), b"e" * 32
    )
    publish(fleet, DEVICE, "mixer", message)


BREAKS_OF_A_MIXER = [
    (a_message_leaves_the_mixer_twice, "published a message twice"),
    (the_mixer_publishes_its_own, "published what nobody sent"),
    (a_device_publishes_past_the_mixer, "published past the mixer"),
    (a_device_answers_another_plan, "names another plan"),
]


@pytest.mark.slow
def test_each_planted_break_of_a_mixer_is_found(done_mixed: Path, tmp_path: Path) -> None:
    assert Checker(places(done_mixed, is_mixed=True)).look() == []
    for plant, finding in BREAKS_OF_A_MIXER:
        fleet = Path(shutil.copytree(done_mixed, tmp_path / plant.__name__))
        plant(fleet)
        found = Checker(places(fleet, is_mixed=True)).look()
        assert any(finding in broken for broken in found), f"{plant.__name__}: {found}"


def test_the_checker_shares_no_code_with_the_programs() -> None:
    tests = Path(__file__).parents[1]
    own = [tests / "crash" / f"{name}.py" for name in ("capture", "checker", "databases", "wiretap")]
    client = [*(tests / "protocol" / "second_client").glob("*.py")]
    assert client
    for file in (*own, *client):
        imported = set()
        for node in ast.walk(ast.parse(file.read_text())):
            if isinstance(node, ast.Import):
                imported |= {alias.name.partition(".")[0] for alias in node.names}
            elif isinstance(node, ast.ImportFrom):
                imported.add(str(node.module).partition(".")[0])
        assert not imported & {"dpagent", "agent", "coordinator", "mixer", "cli", "simulation"}, file
