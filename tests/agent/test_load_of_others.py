"""What other programs take of the processor, as the governor measures it, whatever ends meanwhile."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from boards import BoardTree
from brokers import wait_until
from clocks import MovableClock
from fleets import write_agent

from agent.daemon import Agent
from agent.governor import Governor
from agent.governor_settings import GovernorSettings
from agent.sensors import Sensors
from agent.settings import load_agent_settings
from dpagent.protocol.chunks import content_digest
from dpagent.protocol.messages import AssetTerms
from dpagent.protocol.signing import Signer, new_signing_secret

CHILD, FORK, FOLLOWING = 5_000_001, 5_000_002, 5_000_003
"""No process of a system has so high a number."""


class Load:
    """A governor on a board that a test writes, and whether it has held training back so far."""

    def __init__(self, root: Path, highest_load: float, **options: Any) -> None:
        self.tree, self._clock = BoardTree(root), MovableClock(unix=5_000.0)
        settings = GovernorSettings(highest_load=highest_load)
        self._governor = Governor(settings, root, Sensors(root), self._clock, **options)
        self.held: list[bool] = []
        self.agent = os.getpid()  # The tests' process forks before they run.

    def compute(self, ticks: int) -> None:
        """Let 2 s pass, in which all programs take so many of 400 ticks."""
        self.tree.compute(ticks / 400, 2.0)
        self._clock.advance(2.0)
        self.held.append(self._governor.why_not(begins=True) is not None)


@pytest.mark.parametrize("forked", [0, 40, 120, 145, 160, 190])
def test_what_a_fork_took_is_no_load_of_others_when_the_training_process_ends(
    tmp_path: Path, forked: int
) -> None:
    """Nobody waits for a fork whose parent is ended; before, a round began later, or not, by how long it had
    computed."""
    load = Load(tmp_path, 0.15)
    load.tree.run(load.agent, 1, 0)
    load.tree.run(CHILD, load.agent, 100)
    load.compute(8)
    load.tree.run(FORK, CHILD, forked)
    load.compute(8 + forked)
    load.tree.run(load.agent, 1, 100)
    for ended in (CHILD, FORK):
        load.tree.remove(f"proc/{ended}/stat")
    load.tree.run(FOLLOWING, load.agent, 150)
    load.compute(158)
    load.tree.run(FOLLOWING, load.agent, 250)
    load.compute(108)
    assert load.held == [True, False, False, False]


@pytest.mark.parametrize("is_over", [False, True])
def test_the_end_of_a_look_changes_no_load(tmp_path: Path, *, is_over: bool) -> None:
    """The agent waits for a look that has ended when the next round is decided on. A time in which it did so
    did not count: whether training paused for others then told whether the look had ended by then."""
    load = Load(tmp_path, 0.3, readers=lambda: (None, CHILD))
    load.tree.run(load.agent, 1, 0)
    load.tree.run(CHILD, load.agent, 100)
    load.compute(100)
    load.tree.run(CHILD, load.agent, 200)
    load.compute(100)
    if is_over:
        load.tree.remove(f"proc/{CHILD}/stat")
        load.tree.run(load.agent, 1, 300)
    else:
        load.tree.run(CHILD, load.agent, 300)
    load.compute(400)
    assert load.held == [True, False, True]


def test_an_agents_governor_knows_what_reads_records_and_what_writes_a_model(tmp_path: Path) -> None:
    key = Signer(new_signing_secret(), "testers").public_key
    agent = Agent(load_agent_settings(write_agent(tmp_path, None, key, engine="numpy")))
    try:
        readers = agent._governor._load._readers
        assert [*readers()] == [None]
        agent._looks.begin()
        assert [*readers()] == [agent._looks.process] != [None]
        # So that it does not show when a model was written, or found no room.
        agent._latest_model.take(AssetTerms(role="model", digest=content_digest(b"m"), size=1), b"m")
        wait_until(lambda: len([*readers()]) == 2, "a process that writes a model")
        assert not agent._latest_model.processes
    finally:
        agent.close()


@contextmanager
def agent_with_command(directory: Path, *, is_over: bool, **governor: Any) -> Iterator[tuple[Agent, int]]:
    """An agent on a board that a test writes, whose owner's command has just ended, or goes on, and that
    command's id."""
    clock, tree = MovableClock(unix=5_000.0), BoardTree(directory / "board")
    data, noted = b"model", directory / "id"
    key = Signer(new_signing_secret(), "testers").public_key
    script = f"echo $$ > {noted}" + ("" if is_over else "; sleep 600; true")
    model = {"command": ["/bin/sh", "-c", script]}
    file = write_agent(directory, None, key, engine="numpy", governor=governor, model=model)
    agent = Agent(load_agent_settings(file), clock=clock, sensors=Sensors(tree.root))
    latest = agent._latest_model
    try:
        latest.take(AssetTerms(role="model", digest=content_digest(data), size=len(data)), data)
        wait_until(lambda: latest.tend() or (noted.exists() and noted.read_text()), "the command")
        command = int(noted.read_text())
        if is_over:
            wait_until(lambda: latest.tend() or not Path(f"/proc/{command}").exists(), "its end")
        yield agent, command
    finally:
        agent.close()


@pytest.mark.parametrize("is_over", [False, True])
def test_whether_the_owners_command_takes_all_of_its_time_changes_no_load(
    tmp_path: Path, *, is_over: bool
) -> None:
    """Nobody waits for what a script has started when its time is over: before, what was measured then did
    not count, or was too high, and a board paused for others, or not, by how long the command took."""
    held = []
    with agent_with_command(tmp_path, is_over=is_over, highest_load=0.3) as (agent, command):
        clock, tree = agent._clock, BoardTree(tmp_path / "board")
        assert isinstance(clock, MovableClock)
        # Nor does its end change what is measured, whenever it ends by itself.
        assert (command in agent._governor._load._readers()) is not is_over
        for step in range(1, 56):
            is_there, others = not is_over and step < 46, 320 if step == 46 else 80
            if is_there:
                tree.run(command, os.getpid(), 1)
                tree.run(FORK, command, 100 * step)
            elif not is_over and step == 46:
                for ended in (command, FORK):
                    tree.remove(f"proc/{ended}/stat")
            tree.run(os.getpid(), 1, 40 * step)
            tree.compute((others + 40 + 100 * is_there) / 400, 2.0)
            clock.advance(2.0)
            held.append(agent._governor.why_not(begins=True) is not None)
            agent._latest_model.tend()
    assert held[4:] == [False] * 51


@pytest.mark.parametrize("is_over", [False, True])
def test_whether_the_owners_command_takes_all_of_its_time_changes_no_memory(
    disk: Path, *, is_over: bool
) -> None:
    """What it had is the system's again half a second after its end: before, a board to which a round was
    announced just then began with it later, if the command had gone on."""
    with agent_with_command(disk, is_over=is_over, least_free_memory_mib=1) as (agent, _):
        clock, held = agent._clock, []
        assert isinstance(clock, MovableClock)
        for _ in range(100):
            clock.advance(1.0)
            held.append(agent._governor.why_not(begins=True))
            agent._latest_model.tend()
    assert held[10:88] == held[98:] + [None] * 76
    assert "the owner's command" in (held[92] or "")
