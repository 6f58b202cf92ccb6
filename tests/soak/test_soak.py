"""The soak can tell a leak from noise, and a short one finds a leak that is planted in the agent."""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np
import pytest
from brokers import BrokerFactory
from soak.accelerated import program_of
from soak.flatness import PARTS, verdict
from soak.long import ALLOWED_BYTES, allowed_of, soak, write_files

from agent.settings import load_agent_settings
from coordinator.settings import load_fleet_settings

MIB = 1 << 20
ROUNDS = np.arange(1_440.0)[::6]
"""A simulated day's."""
MEMORY = "agent: anonymous"


def memory(growth_a_round: float, seed: int = 1) -> list[float]:
    """MiB that grow in the first rounds and then as said, with what the allocator makes of it: steps that go
    and come, and peaks."""
    generator = np.random.default_rng(seed)
    filling = 8 * MIB * (1 - np.exp(-ROUNDS / 60))
    steps = MIB * generator.integers(0, 2, len(ROUNDS))
    peaks = 30 * MIB * (generator.random(len(ROUNDS)) < 0.05)
    return list(70 * MIB + filling + steps + peaks + growth_a_round * ROUNDS)


@pytest.mark.parametrize("rounds", [ROUNDS, ROUNDS // 60], ids=["a day", "few rounds, many samples"])
def test_what_stays_the_same_is_flat(rounds: np.ndarray) -> None:
    allowed = allowed_of("agent: descriptors", 1_440)
    found = verdict("descriptors", list(rounds), [23.0] * len(rounds), allowed)
    assert found.is_flat
    assert not found.is_leak


@pytest.mark.parametrize("seed", range(20))
def test_memory_that_fills_its_caches_and_peaks_is_flat_and_a_leak_is_found_in_it(seed: int) -> None:
    allowed = allowed_of(MEMORY, 1_440)
    assert verdict(MEMORY, list(ROUNDS), memory(0.0, seed), allowed).is_flat
    leak = verdict(MEMORY, list(ROUNDS), memory(3 * ALLOWED_BYTES / 1_440, seed), allowed)
    assert leak.is_leak
    assert "GROWS" in str(leak)


def test_an_agent_goes_on_once_whatever_its_memory_is_set_to(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where a variable had another value, it was executed again and again."""
    started = list[dict[str, str]]()
    monkeypatch.setattr(sys, "argv", ["soak.accelerated", "run", "--config", "agent.yaml"])
    monkeypatch.setattr("os.execve", lambda *words: started.append(words[2]))
    monkeypatch.setenv("MALLOC_ARENA_MAX", "4")
    program_of("run")
    (environment,) = started
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    program_of("run")
    assert (len(started), environment["MALLOC_ARENA_MAX"]) == (1, "4")


def test_helpers_that_samples_meet_more_often_later_are_no_leak() -> None:
    """On a machine that is busy at first, a round waits, and what runs for a moment is met less often."""
    often = np.linspace(0.1, 0.9, len(ROUNDS))
    met = np.random.default_rng(3).random(len(ROUNDS)) < often
    allowed, kept = allowed_of("agent: processes", 1_440), ROUNDS // 100
    found, leak = (
        verdict("agent: processes", list(ROUNDS), list(values), allowed, comes_and_goes=True)
        for values in (2.0 + met, 2.0 + met + kept)
    )
    assert found.is_flat
    assert leak.is_leak


@pytest.mark.parametrize("kind", ["descriptors", "threads", "processes"])
def test_one_descriptor_in_a_hundred_rounds_is_a_leak(kind: str) -> None:
    values = [20.0 + number // 100 for number in ROUNDS]
    assert verdict(kind, list(ROUNDS), values, allowed_of(f"agent: {kind}", 1_440)).is_leak


def test_too_much_noise_is_not_called_flat() -> None:
    """Nothing certain can be said."""
    noise = 200 * MIB * np.random.default_rng(2).standard_normal(len(ROUNDS))
    found = verdict(MEMORY, list(ROUNDS), list(noise), allowed_of(MEMORY, 1_440))
    assert not found.is_flat
    assert not found.is_leak
    assert "unclear" in str(found)


def test_a_record_of_each_round_may_stay_and_no_more() -> None:
    """A charge has 1.4 kB on disk."""
    name = "agent: agent state"
    allowed = allowed_of(name, 1_440)
    assert verdict(name, list(ROUNDS), list(1_700 * ROUNDS), allowed).is_flat
    assert verdict(name, list(ROUNDS), list(16_384 * ROUNDS), allowed).is_leak


def test_the_board_takes_all_rounds_of_a_day(tmp_path: Path, new_broker: BrokerFactory) -> None:
    fleet, board = write_files(tmp_path, new_broker(), rounds=2_900)
    assert load_fleet_settings(fleet).rounds == 2_900
    assert load_agent_settings(board).limits.maximum_charges >= 2_900


@pytest.mark.slow
@pytest.mark.parametrize(
    ("leak", "grows"),
    [
        ("memory", {"agent: rss", MEMORY}), ("descriptors", {"agent: descriptors"}),
        ("threads", {"agent: threads"}), ("disk", {"agent: agent state"}),
    ],
)  # fmt: skip
def test_a_leak_that_is_planted_in_a_real_agent_is_found(tmp_path: Path, leak: str, grows: set[str]) -> None:
    done = soak(tmp_path, hours=1.5, factor=60.0, leak=leak)
    assert grows <= {each.name for each in done.verdicts() if each.is_leak}


@pytest.mark.slow
def test_a_minute_of_rounds_leaves_no_descriptor_thread_or_process_behind(tmp_path: Path) -> None:
    """Memory needs the long run: caches fill for longer than this."""
    done = soak(tmp_path, hours=1.5, factor=60.0)
    found = {each.name: each for each in done.verdicts()}
    for program in ("agent", "coordinator", "broker"):
        for kind in ("descriptors", "threads"):
            assert not found[f"{program}: {kind}"].is_leak
    for name in ("agent: agent state", "coordinator: coordinator state", "agent: log", "coordinator: log"):
        assert not found[name].is_leak, found[name]
    assert len(done.rounds) >= 2 * PARTS
