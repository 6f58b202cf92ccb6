"""The soak: a fleet's day on accelerated clocks, and whether what its programs take stays flat.

``make soak ARGS="--hours 24 --factor 60"`` runs Mosquitto, a coordinator and an agent, as processes, with
rounds of a simulated minute; samples memory, descriptors, threads, processes, and the bytes of state
directories, write-ahead logs and logs; and ends with a line for each series, and exit code 1 if one of them
grows, or if nothing certain can be said of it. ``--leak memory`` shows what that looks like.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
from collections import defaultdict
from contextlib import ExitStack, closing
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

from brokers import Broker
from children import Child
from fleets import write_agent, write_fleet
from soak.flatness import PARTS, Verdict, verdict
from soak.samples import of_directory, of_process

from coordinator.keys import load_signer
from coordinator.reader import StoreReader
from coordinator.settings import load_fleet_settings
from dpagent.errors import StorageError

ROUND_S: Final = 60.0
"""Of a round, in simulated time, as far as the work is done by then."""
_START_S: Final = 400.0
_MIB: Final = 1 << 20
ALLOWED_BYTES: Final = 4 * _MIB
"""Growth of a program's memory, and of what is no record of rounds, over a whole run."""
ALLOWED_COUNT: Final = 0.5
"""Growth of descriptors, threads and processes over a whole run."""
ALLOWED_A_ROUND: Final = {"agent state": 2_500.0, "coordinator state": 4_096.0, "log": 1_024.0}
"""Bytes that stay on record of every round: of the agent, a charge (1.4 kB) and a row for 2,000 of them; of
the coordinator, a row with its statistics; a few lines of log."""


_COUNTS: Final = ("descriptors", "threads", "processes")
"""Series of what comes and goes with the work."""


@dataclass
class Soak:
    """Samples of a run, by series, with the rounds closed at each."""

    rounds: list[float] = field(default_factory=list)
    series: dict[str, list[float]] = field(default_factory=lambda: defaultdict(list))

    def verdicts(self) -> list[Verdict]:
        """On every series."""
        run = self.rounds[-1] - self.rounds[0]
        return [
            verdict(name, self.rounds, values, allowed_of(name, run), comes_and_goes=_kind(name) in _COUNTS)
            for name, values in self.series.items()
        ]


def allowed_of(name: str, rounds: float) -> float:
    """Growth a round of a series, for a run of so many."""
    if _kind(name) in _COUNTS:
        return ALLOWED_COUNT / rounds
    return ALLOWED_BYTES / rounds + next(
        (bytes_a_round for ending, bytes_a_round in ALLOWED_A_ROUND.items() if name.endswith(ending)), 0.0
    )


def _kind(name: str) -> str:
    """Of a series, which is called after its program, too."""
    return name.rpartition(": ")[2]


def soak(
    directory: Path,
    *,
    hours: float,
    factor: float,
    leak: str = "none",
    samples: int = 240,
    tells: bool = False,
) -> Soak:
    """Run a fleet.

    Args:
        directory: empty, for all its files.
        hours: of simulated time, or as many rounds.
        factor: by which clocks run faster.
        leak: planted in the agent; see :mod:`soak.accelerated`.
        samples: how many.
        tells: whether each is printed.
    """
    (directory / "broker").mkdir()
    done, wanted = Soak(), round(hours * 3_600 / ROUND_S)
    with ExitStack() as held:
        broker = Broker("mosquitto", directory / "broker").start()
        held.callback(broker.give_up)
        fleet, board = write_files(directory, broker, rounds=min(5_000, 2 * wanted + 20))
        settings = load_fleet_settings(fleet)
        programs = {
            "coordinator": held.enter_context(
                _program(factor, "none", "coordinator", "run", "--config", fleet)
            ),
            "agent": held.enter_context(_program(factor, leak, "run", "--config", board)),
        }
        processes = {name: child.process.pid for name, child in programs.items()}
        processes["broker"] = broker.pid
        begin = _wait_for_rounds(settings.state_dir, 1, programs, _START_S)
        until = begin
        for number in range(samples):
            until = begin + wanted * (number + 1) / samples
            closed = _wait_for_rounds(settings.state_dir, until, programs, _START_S)
            done.rounds.append(closed)
            for name, process in processes.items():
                for kind, value in of_process(process).items():
                    done.series[f"{name}: {kind}"].append(value)
            for name, place in (("agent", board.parent / "state"), ("coordinator", settings.state_dir)):
                done.series[f"{name}: {name} state"].append(of_directory(place))
                done.series[f"{name}: write-ahead log"].append(of_directory(place, "-wal"))
                done.series[f"{name}: log"].append(float(programs[name].log.stat().st_size))
            if tells:
                resident = done.series["agent: rss"][-1] / _MIB
                print(f"round {closed:g} of {begin + wanted:g}: agent {resident:.1f} MiB", flush=True)
    return done


def write_files(directory: Path, broker: Broker, *, rounds: int) -> tuple[Path, Path]:
    """A fleet.yaml of so many rounds, and the agent.yaml of a board that takes them all."""
    fleet = write_fleet(
        directory / "coordinator", broker, fleet="soak", devices=1, rounds=rounds, keep_models="last",
        privacy={"epsilon": 8.0, "sampling_rate": 0.1},
        round={
            "deadline_s": 100 * ROUND_S, "compute_slot_s": ROUND_S / 3, "jitter_window_s": ROUND_S / 4,
            "device_grid_s": ROUND_S / 12,
        },
    )  # fmt: skip
    key = load_signer(load_fleet_settings(fleet).keys_dir, "soak").public_key
    limits = {
        "minimum_compute_slot_s": ROUND_S / 12, "maximum_training_s": 604_800.0, "maximum_charges": rounds
    }  # fmt: skip
    board = write_agent(
        directory / "device", broker, key, fleet="soak", budget={"epsilon": 9.0, "delta": 1e-3},
        limits=limits, engine="numpy",
    )  # fmt: skip
    return fleet, board


def _program(factor: float, leak: str, *arguments: str | Path) -> Child:
    file = Path(arguments[-1])
    command = [sys.executable, "-P", "-m", "soak.accelerated", str(factor), leak, *map(str, arguments)]
    return Child(command, file.with_suffix(".log"))


def _closed(state_dir: Path) -> int:
    try:
        reader = StoreReader(state_dir)
    except StorageError:
        return 0
    with closing(reader):
        return sum(each.closed_at is not None for each in reader.rounds())


def _wait_for_rounds(state_dir: Path, wanted: float, programs: dict[str, Child], patience_s: float) -> int:
    """How many rounds are closed, once it is so many."""
    until, before = time.monotonic() + patience_s, -1
    while (closed := _closed(state_dir)) < wanted:
        if closed > before:
            until, before = time.monotonic() + patience_s, closed
        for child in programs.values():
            assert child.is_running(), child.state()
        assert time.monotonic() < until, "\n".join(child.state() for child in programs.values())
        time.sleep(0.2)
    return closed


def main() -> int:
    """Run; return the exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--hours", type=float, default=24.0, help="of simulated time")
    parser.add_argument("--factor", type=float, default=60.0, help="by which clocks run faster")
    parser.add_argument(
        "--leak", default="none", choices=["none", "memory", "descriptors", "threads", "disk"]
    )
    options = parser.parse_args()
    began = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="dpagent-soak-") as place:
        done = soak(
            Path(place), hours=options.hours, factor=options.factor, leak=options.leak,
            samples=max(2 * PARTS, min(480, round(options.hours * 60 / 3))), tells=True,
        )  # fmt: skip
    verdicts = done.verdicts()
    print(*verdicts, sep="\n")
    rounds = done.rounds[-1] - done.rounds[0]
    failed = [each.name for each in verdicts if not each.is_flat]
    print(
        f"{rounds:g} rounds of a simulated minute in {time.monotonic() - began:.0f} s: "
        + (f"not flat: {', '.join(failed)}" if failed else "flat")
    )
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
