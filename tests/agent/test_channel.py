"""A channel brings messages in whole and in order, and says when nobody is at its other end."""

from __future__ import annotations

import resource
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator

import pytest
from brokers import PATIENCE_S

from agent.channel import Channel


@pytest.fixture
def ends() -> Iterator[tuple[Channel, Channel]]:
    ours, theirs = socket.socketpair()
    with Channel(ours.detach()) as one, Channel(theirs.detach()) as other:
        yield one, other


def test_messages_come_whole_and_in_order_both_ways_at_once(ends: tuple[Channel, Channel]) -> None:
    """More than the system takes in at once, in each direction."""
    messages = [b"", b"a" * 3_000_000, {"b": [1, None]}, b"c" * 1_000_000]
    found: list[list[object]] = [[], []]

    def take(end: int) -> None:
        found[end].extend(ends[end].receive() for _ in messages)

    def give(end: int) -> None:
        for message in messages:
            ends[end].send(message)

    threads = [threading.Thread(target=work, args=[end]) for work in (take, give) for end in (0, 1)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert found == [messages, messages]


@pytest.mark.parametrize("part", [0, 3, 8, 20])
def test_whoever_waits_learns_that_the_other_end_has_hung_up(part: int) -> None:
    """Before a message, and in the midst of its length, or of the rest."""
    ours, theirs = socket.socketpair()
    theirs.sendall(((100).to_bytes(8, sys.byteorder) + b"x" * 50)[:part])
    theirs.close()
    with Channel(ours.detach()) as channel, pytest.raises(EOFError):
        channel.receive()


def test_whoever_sends_learns_that_the_other_end_has_hung_up(ends: tuple[Channel, Channel]) -> None:
    ends[1].close()
    with pytest.raises(OSError, match="pipe"):
        ends[0].send(b"")


def test_whoever_waits_at_either_end_learns_that_this_one_hangs_up(ends: tuple[Channel, Channel]) -> None:
    """A thread of this program too."""
    errors: list[str] = []

    def wait(end: Channel) -> None:
        try:
            end.receive()
        except EOFError:
            errors.append("no more")

    threads = [threading.Thread(target=wait, args=[end]) for end in ends]
    for thread in threads:
        thread.start()
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (3, limits[1]))  # No program can open anything more.
        ends[0].hang_up()
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, limits)
    for thread in threads:
        thread.join(PATIENCE_S)
    assert errors == ["no more"] * 2


def test_what_cannot_be_pickled_sends_nothing(ends: tuple[Channel, Channel]) -> None:
    with pytest.raises(Exception, match="pickle"):
        ends[0].send([b"before", threading.Lock()])
    ends[0].send("after")
    assert ends[1].receive() == "after"


def _with_little_memory(descriptor: int) -> None:
    """Of a program of its own: its answers are the names of what it could not take in."""
    resource.setrlimit(resource.RLIMIT_AS, (256 << 20, 256 << 20))
    channel = Channel(descriptor)
    while True:
        try:
            channel.send(channel.receive())
        except MemoryError:
            channel.send("no memory")
        except EOFError:
            return


def test_a_message_for_which_there_is_no_memory_costs_no_other() -> None:
    ours, theirs = socket.socketpair()
    with theirs:
        program = f"import {__name__} as here; here._with_little_memory({theirs.fileno()})"
        process = subprocess.Popen(
            [sys.executable, "-c", program],
            pass_fds=[theirs.fileno()],
            env={"PYTHONPATH": ":".join(sys.path)},
        )
    with process, Channel(ours.detach()) as channel:
        for message in (b"x", b"x" * (300 << 20), b"y"):
            channel.send(message)
        assert [channel.receive() for _ in range(3)] == [b"x", "no memory", b"y"]
