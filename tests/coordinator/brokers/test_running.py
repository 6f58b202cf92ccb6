"""Which process is the broker of a directory, by a lock that passes to the program that takes its place."""

from __future__ import annotations

import fcntl
import os
import signal
import sys
import threading
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest
from brokers import wait_until
from children import Child

from coordinator.brokers.running import _holds, claim, send
from dpagent.errors import BrokerError

BROKER = """
import signal, time
signal.signal(signal.SIGHUP, lambda *_: print("read again", flush=True))
print("ready", flush=True)
while True: time.sleep(60)
"""
BEGIN = f"""
import os, sys
from pathlib import Path
from coordinator.brokers.running import claim
claim(Path(sys.argv[1]))
os.execv(sys.executable, [sys.executable, "-c", {BROKER!r}])
"""


@pytest.fixture
def broker(tmp_path: Path) -> Iterator[Child]:
    """A program that became another one, as `broker-config --run` does."""
    with Child([sys.executable, "-c", BEGIN, tmp_path], tmp_path / "log") as child:
        wait_until(lambda: "ready" in child.said(), "the broker")
        yield child


def test_the_program_that_took_its_place_gets_the_signal(tmp_path: Path, broker: Child) -> None:
    assert send(tmp_path, signal.SIGHUP)
    wait_until(lambda: "read again" in broker.said(), "the signal")


def test_a_second_broker_of_a_directory_is_refused_by_the_process_of_the_first(
    tmp_path: Path, broker: Child
) -> None:
    with pytest.raises(BrokerError, match=f"process {broker.process.pid}"):
        claim(tmp_path)


def test_nobody_is_signalled_when_it_has_ended_though_its_number_is_anothers_now(
    tmp_path: Path, broker: Child
) -> None:
    broker.kill()
    # As if the system had given the number to this very process.
    (tmp_path / "running.pid").write_text(f"{os.getpid()}\n")
    assert not send(tmp_path, signal.SIGKILL)
    assert not send(tmp_path / "elsewhere", signal.SIGKILL)


@pytest.mark.parametrize("number", ["own", "1\n", "-1\n", "0\n", "no number"])
def test_no_process_is_signalled_that_does_not_hold_the_file(
    tmp_path: Path, broker: Child, number: str
) -> None:
    """Whoever runs the broker may write there, and the operator's commands may be root's."""
    (tmp_path / "running.pid").write_text(f"{os.getpid()}\n" if number == "own" else number)
    with pytest.raises(BrokerError, match="does not name the process"):
        send(tmp_path, signal.SIGURG)  # which would harm nobody


@pytest.mark.skipif(not Path("/proc/locks").exists(), reason="It is not Linux.")
def test_a_broker_is_found_among_locks_that_come_and_go(tmp_path: Path) -> None:
    """The kernel's list is read in pieces, and what stands before an entry moves it."""
    over = threading.Event()
    with ExitStack() as held:
        files = [held.enter_context((tmp_path / f"{number}").open("w")) for number in range(300)]

        def come_and_go() -> None:
            while not over.is_set():
                for how in (fcntl.LOCK_UN, fcntl.LOCK_EX):
                    for file in files:
                        fcntl.flock(file, how)

        for file in files[:150]:
            fcntl.flock(file, fcntl.LOCK_EX)
        own = held.enter_context((tmp_path / "own").open("w"))
        fcntl.flock(own, fcntl.LOCK_EX)
        others = threading.Thread(target=come_and_go)
        others.start()
        try:
            found = [_holds(str(os.getpid()), os.fstat(own.fileno()).st_ino) for _ in range(3_000)]
        finally:
            over.set()
            others.join()
    assert all(found), f"{found.count(False)} of {len(found)} times it was not"
