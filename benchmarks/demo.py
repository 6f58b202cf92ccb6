"""The common base of the benchmarks of the demo: one run of ``dpagent demo``, and its figures."""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any

from benchmarks.figures import Figure, Skipped
from benchmarks.oracle import pld_epsilon
from benchmarks.programs import ROOT, python, run_json, run_program

_MNIST_FILES = (
    "train-images-idx3-ubyte",
    "train-labels-idx1-ubyte",
    "t10k-images-idx3-ubyte",
    "t10k-labels-idx1-ubyte",
)


def run_demo(arguments: Sequence[str], directory: Path, *, timeout_s: float) -> dict[str, Any]:
    """Run ``dpagent demo`` with its state in ``directory``.

    Returns:
        Its ``--json`` output.
    """
    results = directory / "results.json"
    options = [*arguments, "--state-dir", str(directory / "state"), "--json", str(results)]
    run_program(python("-m", "cli.main", "demo", *options), timeout_s=timeout_s)
    found: dict[str, Any] = json.loads(results.read_text(encoding="utf-8"))
    return found


def accuracy_without_noise(results: dict[str, Any], command: str) -> Figure:
    """The final accuracy of the same training without noise."""
    return Figure("accuracy without noise", 100 * results["baseline_accuracy"], "%", command=command)


def cost_figures(results: dict[str, Any], command: str) -> list[Figure]:
    """ε, time, traffic, memory and delivery of a run, all as ``--json`` has them."""
    seconds, traffic, privacy = results["seconds"], results["bytes_per_device_round"], results["privacy"]
    memory, fragments = results["peak_memory_mib"], results["fragments"]
    spent = max(ledger["epsilon_spent"] for ledger in privacy["ledgers"])
    target = privacy["epsilon_target"]
    measured = {
        "time in all, start and stop included": (seconds["total"], "s"),
        "time of a round, median": (seconds["per_round_median"], "s"),
        "sent by a device in a round": (traffic["up"], "bytes"),
        "received by a device in a round": (traffic["down"], "bytes"),
        "peak resident memory, largest agent": (memory["agent_max"], "MiB"),
        "peak resident memory, coordinator": (memory["coordinator"], "MiB"),
        "fragments sent": (fragments["sent"], "fragments"),
        "fragments lost": (fragments["lost"], "fragments"),
        "duplicates, received and not counted again": (fragments["duplicates"], "fragments"),
    }
    return [
        Figure("largest ε in a ledger", spent, "ε", f"target: {target:g}", spent / target, command),
        *(
            Figure(name, float(value), unit, command=command)
            for name, (value, unit) in measured.items()
            if value is not None  # memory is told on Linux only
        ),
    ]


def mnist_directory() -> Path:
    """Where the four IDX files of MNIST are: ``MNIST_DIR``, or beside the checkout.

    Raises:
        Skipped: They are not there.
    """
    directory = Path(os.environ.get("MNIST_DIR", "../shared/data/mnist"))
    found = ROOT / directory
    missing = [
        file for file in _MNIST_FILES if not ((found / file).is_file() or (found / f"{file}.gz").is_file())
    ]
    if missing:
        raise Skipped(
            f"{directory} lacks {', '.join(missing)}. Set MNIST_DIR to a directory with the four IDX "
            "files of MNIST (gzipped or not), and run it again."
        )
    return found


def claimed_and_recomputed(directory: Path) -> tuple[float, float]:
    """The ε that a ledger of :func:`run_demo` claims, and dp-accounting's price of its charges.

    Of all devices the one with the largest ratio. Priced on a grid of 1e-3.
    """
    exports = [
        run_json(
            python("-m", "cli.main", "budget", "export", "--json", "-", "--state-dir", str(state)),
            timeout_s=300,
        )
        for state in sorted((directory / "state").glob("device-*/state"))
    ]
    return max(map(_claimed_and_recomputed, exports), key=lambda pair: pair[0] / pair[1])


def _claimed_and_recomputed(export: dict[str, Any]) -> tuple[float, float]:
    charges = export["charges"]
    rounds = tuple((c["noise_multiplier"], c["sampling_rate"], c["steps"]) for c in charges)
    return charges[-1]["cumulative_epsilon"], _price(rounds, charges[-1]["delta"])


@lru_cache
def _price(rounds: tuple[tuple[float, float, int], ...], delta: float) -> float:
    """Kept, because devices of one job have the same charges."""
    return pld_epsilon(rounds, delta, grid=1e-3)
