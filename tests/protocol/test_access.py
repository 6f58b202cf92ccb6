"""Who may do what with the topics of a fleet."""

from __future__ import annotations

from dpagent.protocol.access import Role, rights_of
from dpagent.protocol.topics import Topics

TOPICS = Topics("porch")


def test_every_topic_is_written_by_one_side_and_read_by_another() -> None:
    for mixed in (False, True):
        rights = rights_of(TOPICS, mixed=mixed)
        for topic in {right.topics for right in rights}:
            writers = {right.role for right in rights if right.topics == topic and right.may == "write"}
            readers = {right.role for right in rights if right.topics == topic and right.may == "read"}
            assert readers
            assert writers
            assert readers - writers


def test_a_board_writes_fragments_alone_and_reads_nobodys() -> None:
    rights = [right for right in rights_of(TOPICS, mixed=False) if right.role is Role.BOARD]
    assert [right.topics for right in rights if right.may == "write"] == [TOPICS.fragments]
    assert TOPICS.fragments not in [right.topics for right in rights if right.may == "read"]


def test_without_a_mixer_nobody_has_to_do_with_its_topic() -> None:
    rights = rights_of(TOPICS, mixed=False)
    assert TOPICS.mixer not in {right.topics for right in rights}
    assert Role.MIXER not in {right.role for right in rights}
