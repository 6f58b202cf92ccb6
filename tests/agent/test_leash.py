"""Programs that the agent has started end with it, also those that stand still, wherever it runs."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import textwrap
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from brokers import wait_until
from fleets import write_agent
from orphans import adopted, is_reaped

from agent.owners_command import OwnersCommand
from dpagent.protocol.signing import Signer

COMMAND = """
    import time
    from agent.owners_command import OwnersCommand

    running = OwnersCommand(["/bin/sh", "-c", "sleep 600 & wait"])
    time.sleep(0.3)
    running.hold(is_held=True)
    print(running.process, flush=True)
    time.sleep(600)
"""
TRAINING = """
    import sys, time
    from pathlib import Path
    from devices import WEIGHTS, worker_of
    from fleets import make_plan
    from neighbours import decode_here
    from agent.settings import load_agent_settings
    from agent.training_messages import Order

    settings = load_agent_settings(Path(sys.argv[1]))
    settings.state_dir.mkdir(exist_ok=True)
    worker = worker_of(settings)
    worker.prepare(Order(make_plan(), WEIGHTS, {})).result()
    worker.pause()
    print(worker._running._process.pid, flush=True)
    time.sleep(600)
"""
LOOK = """
    import sys, time
    from pathlib import Path
    import hostile_files as hostile
    from pictures import write
    from agent.data_settings import DataSettings
    from agent.looks import Looks

    folder = Path(sys.argv[1]).parent
    write(folder / "photos" / "0" / "slow.jpg", hostile.slow_jpeg())
    values = {"name": "mine", "path": folder / "photos", "kind": "images", "classes": 2, "max_records": 4}
    values["images"] = {"size": [8, 8], "mode": "grey", "folder": "."}
    looks = Looks(DataSettings.checked(values), folder, niceness=0)
    looks.begin()
    time.sleep(DELAY)
    looks.hold()
    print(looks._look.group, flush=True)
    time.sleep(600)
"""
STANDS_STILL = {
    "the owner's command": COMMAND,
    "training": TRAINING,
    "a look that decodes": LOOK.replace("DELAY", "2.0"),
    "a look that has just begun": LOOK.replace("DELAY", "0.0"),  # It could not ask for its end itself.
}


@pytest.fixture
def _adopting() -> Iterator[None]:
    with adopted():
        yield


def state_of(process: int) -> str:
    return Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[0]


@pytest.mark.usefixtures("executed", "_adopting")
@pytest.mark.parametrize("program", STANDS_STILL.values(), ids=STANDS_STILL)
def test_what_stands_still_ends_with_the_agent_in_a_container_too(tmp_path: Path, program: str) -> None:
    """Before, it stood still for ever, and a restarted agent began another beside it; a look with the lock of
    the rows, for which the next one waited."""
    config = write_agent(tmp_path, None, Signer(bytes(range(32)), "testers").public_key, engine="numpy")
    arguments = [sys.executable, "-c", textwrap.dedent(program), str(config)]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}
    with subprocess.Popen(arguments, stdout=subprocess.PIPE, text=True, env=environment) as agent:
        assert agent.stdout is not None
        group = int(agent.stdout.readline())
        wait_until(lambda: state_of(group) == "T", "it stands still")
        agent.kill()
    try:
        wait_until(lambda: state_of(group) == "Z", "its end")
    finally:
        os.killpg(group, signal.SIGKILL)
        wait_until(lambda: is_reaped(group), "an orphan")
        while is_reaped(-group):
            pass


@pytest.mark.usefixtures("executed")
def test_what_a_command_leaves_running_goes_on_when_it_has_ended(tmp_path: Path) -> None:
    noted = tmp_path / "noted"
    command = OwnersCommand(["/bin/sh", "-c", f"sleep 600 & echo $! > {noted}"])
    wait_until(lambda: command.code() == 0, "the command")
    left = int(noted.read_text())
    time.sleep(0.2)
    assert state_of(left) == "S"
    os.kill(left, signal.SIGKILL)


@pytest.mark.usefixtures("executed", "_adopting")
def test_what_a_command_has_left_is_over_when_it_has_ended_in_a_container_too() -> None:
    """There it stays on the system's list until this process waits for it."""
    command = OwnersCommand(["/bin/sh", "-c", "sleep 0.5 &"])
    wait_until(lambda: command.code() == 0, "the command")
    assert not command.is_over()
    wait_until(command.is_over, "the end of what it has left")


LEAVES = """
    import time
    from agent.owners_command import OwnersCommand

    command = OwnersCommand(["/bin/sh", "-c", "sleep 0.5 & echo $!"], output=1)
    while command.code() is None:
        time.sleep(0.01)
    print(command.is_over(), flush=True)
    input()
    print(command.is_over(), flush=True)
"""


@pytest.mark.usefixtures("executed", "_adopting")
def test_what_a_command_has_left_is_over_when_it_has_ended_where_nobody_waits_for_it() -> None:
    """As in a container whose first process waits for no child of others. Before, it was held and killed when
    it had long ended, and the owner was told that the command had taken more than its time."""
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}
    with subprocess.Popen(
        [sys.executable, "-c", textwrap.dedent(LEAVES)],
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment,
    ) as agent:  # fmt: skip
        assert agent.stdin is not None
        assert agent.stdout is not None
        left = int(agent.stdout.readline())
        assert agent.stdout.readline() == "False\n"
        wait_until(lambda: state_of(left) == "Z", "the end of what it has left")
        said, _ = agent.communicate("\n")
    assert is_reaped(left)
    assert said == "True\n"


OF_ANOTHER_USER = """
    import os
    from agent.owners_command import OwnersCommand

    running = OwnersCommand(["/bin/sleep", "600"])
    os.setuid(65_534)  # As if the command had been given to another user by `sudo`.
    print(running.process, flush=True)
    running.hold(is_held=True)
    running.hold(is_held=False)
    print(running.is_over(), running.end(), flush=True)
"""


@pytest.mark.skipif(os.geteuid() != 0, reason="needs root, to be somebody else")
def test_a_command_of_another_user_ends_nothing() -> None:
    """Before, the agent ended where a round began while it went on."""
    arguments = [sys.executable, "-c", textwrap.dedent(OF_ANOTHER_USER)]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}
    agent = subprocess.run(arguments, capture_output=True, text=True, env=environment, check=False)
    process, *rest = agent.stdout.split()
    with contextlib.suppress(ProcessLookupError):
        os.kill(int(process), signal.SIGKILL)
    assert agent.returncode == 0, agent.stderr
    assert rest == ["False", "False"]


def test_no_descriptor_is_left(tmp_path: Path) -> None:
    before = len(list(Path("/proc/self/fd").iterdir()))
    for arguments in (["/bin/true"], [str(tmp_path / "none")], ["/bin/sleep", "600"]):
        command = OwnersCommand(arguments)
        if "sleep" not in arguments[0]:
            wait_until(lambda command=command: command.code() is not None, "its end")
        assert command.end()
    assert len(list(Path("/proc/self/fd").iterdir())) == before
