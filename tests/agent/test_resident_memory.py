"""What agent, training and pricing have in memory stays there: what a look at the data takes moves none.

The attack takes a swap, and root, so it is not run here. With 600 MiB of memory, a look at one picture of
64 Mpixels had 112 and 116 MiB of the training process moved to the swap, and the trial of the next round came
to 0.64 and 0.52 s in place of 0.14 and 0.15, and so did its slots (on a disk that is fast).
"""

from __future__ import annotations

import shutil
import socket
import subprocess
import sys
from mmap import PAGESIZE
from pathlib import Path

import pytest
from brokers import Broker, wait_until
from devices import KEY, WEIGHTS, worker_of
from fleets import make_plan, run_agent, terms, write_agent
from neighbours import decode_here

from agent.errand import Errand
from agent.settings import load_agent_settings
from agent.training_messages import Order
from dpagent.learning.training.forks import end, forked
from dpagent.resident_memory import may_stay

pytestmark = [
    pytest.mark.usefixtures("executed"),
    pytest.mark.skipif(not may_stay(), reason="the system bounds what stays in memory (ulimit -l)"),
]


def stays(process: int) -> bool:
    """Whether a process keeps what it has in memory."""
    lines = Path(f"/proc/{process}/smaps_rollup").read_text().splitlines()[1:]
    kib = {name: int(rest.split()[0]) for name, _, rest in (line.partition(":") for line in lines)}
    return kib["Locked"] > 0.9 * kib["Pss"]


def test_root_of_users_of_its_own_is_not_above_the_bound() -> None:
    """As in a container without privileges: the kernel heeds the bound there, so that memory could fail."""
    said = """if True:
        import resource
        from dpagent.resident_memory import may_stay
        resource.setrlimit(resource.RLIMIT_MEMLOCK, (1 << 20, 1 << 20))
        print(may_stay())
    """
    inside = ["unshare", "--map-root-user", "--user"]
    if shutil.which("unshare") is None or subprocess.run([*inside, "true"], check=False).returncode:
        pytest.skip("this system lets nobody have users of its own")
    ended = subprocess.run([*inside, sys.executable, "-c", said], capture_output=True, text=True, check=True)
    assert ended.stdout.split() == ["False"]


def test_the_training_process_stays_in_memory(tmp_path: Path) -> None:
    settings = load_agent_settings(write_agent(tmp_path, None, KEY, engine="numpy"))
    settings.state_dir.mkdir(exist_ok=True)
    decode_here(settings.data, settings.state_dir)
    worker = worker_of(settings)
    try:
        worker.prepare(Order(make_plan(**terms(rate=1.0)), WEIGHTS, {})).result()
        assert worker._running is not None
        assert stays(worker._running.group)
    finally:
        worker.end()


def test_a_fork_of_the_training_process_stays_in_memory() -> None:
    ours, theirs = socket.socketpair()
    with theirs:
        process = forked(lambda: theirs.recv(1), theirs.fileno())
    try:
        wait_until(lambda: stays(process), "what stays in memory")
    finally:
        end(process, ours)


def test_the_pricing_process_stays_in_memory() -> None:
    errand = Errand("agent.pricing_program", stays=True)
    try:
        wait_until(lambda: stays(errand._process.pid), "what stays in memory")
    finally:
        errand.end()


def test_the_agent_stays_in_memory_with_the_rows_of_its_records(tmp_path: Path, mosquitto: Broker) -> None:
    """A look at a picture of 64 Mpixels had the rows thrown out, all 14 MiB of them; then training reads each
    from the disk, which its trial does not count."""
    file = write_agent(tmp_path, mosquitto, KEY, data={"features_mib": 1})
    with run_agent(file) as agent:
        wait_until(lambda: stays(agent.process.pid), "what stays in memory")
        maps = Path(f"/proc/{agent.process.pid}/smaps")
        for name in ("records.rows", "features.f32"):
            wait_until(lambda name=name: name in maps.read_text(), name)  # type: ignore[misc]
            size = (file.parent / "state" / name).stat().st_size
            lines = maps.read_text().partition(name)[2].splitlines()[1:]
            (rss,) = (line.split()[1] for line in lines[:5] if line.startswith("Rss:"))
            assert int(rss) << 10 == -(-size // PAGESIZE) * PAGESIZE
