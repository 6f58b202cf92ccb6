"""Who may do what with the topics of a fleet."""

from __future__ import annotations

import itertools

from dpagent.protocol.access import OWN, Role, rights_of
from dpagent.protocol.topics import Topics

TOPICS = Topics("porch")


def test_each_role_has_these_rights_and_no_others() -> None:
    """What brokers are held to, written down a second time."""
    announced = {TOPICS.plan, TOPICS.model_chunks, TOPICS.asset_chunks, TOPICS.receipts}
    compared, keys = {TOPICS.witness, TOPICS.evidence}, TOPICS.token_keys
    expected = {
        (Role.COORDINATOR, "read"): {TOPICS.fragments, TOPICS.plan, TOPICS.asks},
        (Role.COORDINATOR, "write"): {*announced, TOPICS.own_receipts, keys, TOPICS.answer("+")},
        (Role.BOARD, "read"): {*announced, *compared, TOPICS.own_receipts, keys, TOPICS.answer(OWN)},
        (Role.BOARD, "write"): {*compared, TOPICS.fragments, TOPICS.ask(OWN), TOPICS.mixer},
        (Role.MIXER, "read"): {TOPICS.plan, TOPICS.mixer},
        (Role.MIXER, "write"): {TOPICS.fragments},
        (Role.WORKER, "read"): {TOPICS.fragments},
        (Role.WORKER, "write"): {TOPICS.own_receipts},
        (Role.BRIDGE, "read"): {*announced, *compared, keys, TOPICS.answer("+")},
        (Role.BRIDGE, "write"): {*compared, TOPICS.asks},
    }
    rights = rights_of(TOPICS, mixed=True, enrolled=True)
    found = {key: {each.topics for each in rights if (each.role, each.may) == key} for key in expected}
    assert found == expected
    assert len(rights) == sum(map(len, expected.values()))


def test_every_topic_is_written_by_one_side_and_read_by_another() -> None:
    for mixed, enrolled in itertools.product((False, True), repeat=2):
        rights = rights_of(TOPICS, mixed=mixed, enrolled=enrolled)
        for topic in {right.topics.replace(OWN, "+") for right in rights} - {TOPICS.witness, TOPICS.evidence}:
            those = [right for right in rights if right.topics.replace(OWN, "+") == topic]
            writers = {right.role for right in those if right.may == "write"}
            readers = {right.role for right in those if right.may == "read"}
            assert readers
            assert writers
            assert readers - writers


def test_an_enrolled_board_asks_in_its_own_name_compares_keys_and_hears_receipts() -> None:
    without = rights_of(TOPICS, mixed=False, enrolled=False)
    more = set(rights_of(TOPICS, mixed=False, enrolled=True)) - set(without)
    own = {(right.may, right.topics) for right in more if right.role is Role.BOARD}
    assert own == {
        ("read", TOPICS.token_keys), ("read", TOPICS.answer(OWN)), ("write", TOPICS.ask(OWN)),
        ("read", TOPICS.witness), ("write", TOPICS.witness),
        ("read", TOPICS.evidence), ("write", TOPICS.evidence), ("read", TOPICS.own_receipts),
    }  # fmt: skip


def test_a_board_writes_fragments_alone_and_reads_nobodys() -> None:
    rights = [right for right in rights_of(TOPICS, mixed=False, enrolled=False) if right.role is Role.BOARD]
    assert [right.topics for right in rights if right.may == "write"] == [TOPICS.fragments]
    assert TOPICS.fragments not in [right.topics for right in rights if right.may == "read"]


def test_without_a_mixer_nobody_has_to_do_with_its_topic() -> None:
    rights = rights_of(TOPICS, mixed=False, enrolled=False)
    assert TOPICS.mixer not in {right.topics for right in rights}
    assert Role.MIXER not in {right.role for right in rights}
