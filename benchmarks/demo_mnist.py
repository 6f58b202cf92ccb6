"""MNIST over ten devices at ε = 2, against the published central figure.

The README's run, once: ten agents with 6,000 records each, 100 rounds, the 26,010-parameter
CNN, ε = 2 and δ = 1e-5 for each record of each device, every device adding its own noise. The
accuracy is compared with the 95 % that Abadi et al. (2016, "Deep Learning with Differential
Privacy") report at the same ε and δ with all records in one trusted place; that is another network and
another setting, so it is a mark to reach rather than a race.

The ε claimed is checked from outside: the charges of every device's ``dpagent budget export``
are priced again by dp-accounting's privacy-loss distributions on a grid of 1e-3, which share no
code with ours. The ratio is the largest over the devices; above 1 we claim more than needed.
The demo's other figures are as in ``demo_digits``.

Limits: one run. The data are not part of the project: without the four IDX files in
``../shared/data/mnist``, or the directory that the variable ``MNIST_DIR`` names, this benchmark
is skipped.
"""

from __future__ import annotations

import os
import tempfile
from functools import lru_cache
from pathlib import Path
from typing import Any

from benchmarks.demo import accuracy_without_noise, cost_figures, run_demo
from benchmarks.figures import Figure, Skipped
from benchmarks.oracle import pld_epsilon
from benchmarks.programs import ROOT, python, run_json

_OPTIONS = ["--dataset", "mnist", "--devices", "10", "--rounds", "100", "--epsilon", "2"]
_COMMAND = "dpagent demo --dataset mnist --data-dir PATH/TO/IDX/FILES --devices 10 --rounds 100 --epsilon 2"
_CENTRAL = 0.95
_FILES = (
    "train-images-idx3-ubyte",
    "train-labels-idx1-ubyte",
    "t10k-images-idx3-ubyte",
    "t10k-labels-idx1-ubyte",
)
_TIMEOUT_S = 3600.0


def run() -> list[Figure]:
    """Run the demo once and price its ledgers again.

    Raises:
        Skipped: The data are not there.
    """
    data = _data_directory()
    with tempfile.TemporaryDirectory(prefix="dpagent-bench-") as name:
        directory = Path(name)
        results = run_demo([*_OPTIONS, "--data-dir", str(data)], directory, timeout_s=_TIMEOUT_S)
        exports = [
            run_json(
                python("-m", "cli.main", "budget", "export", "--json", "-", "--state-dir", str(state)),
                timeout_s=300,
            )
            for state in sorted((directory / "state").glob("device-*/state"))
        ]
    claimed, recomputed = max(map(_claimed_and_recomputed, exports), key=lambda pair: pair[0] / pair[1])
    accuracy = results["accuracy"]
    return [
        Figure(
            "accuracy", 100 * accuracy, "%",
            "95 % (Abadi et al. 2016, central)", accuracy / _CENTRAL, _COMMAND,
        ),
        accuracy_without_noise(results, _COMMAND),
        Figure(
            "ε by the ledgers, largest ratio over the devices", claimed, "ε",
            f"dp-accounting (PLD), from the exported charges: {recomputed:.5f}", claimed / recomputed,
        ),
        *cost_figures(results, _COMMAND),
    ]  # fmt: skip


def _data_directory() -> Path:
    directory = Path(os.environ.get("MNIST_DIR", "../shared/data/mnist"))
    found = ROOT / directory
    missing = [file for file in _FILES if not ((found / file).is_file() or (found / f"{file}.gz").is_file())]
    if missing:
        raise Skipped(
            f"{directory} lacks {', '.join(missing)}. Set MNIST_DIR to a directory with the four IDX "
            "files of MNIST (gzipped or not) and run: make bench ARGS=demo_mnist"
        )
    return found


def _claimed_and_recomputed(export: dict[str, Any]) -> tuple[float, float]:
    """What a device's ledger says it spent, and what dp-accounting makes of its charges."""
    charges = export["charges"]
    rounds = tuple((c["noise_multiplier"], c["sampling_rate"], c["steps"]) for c in charges)
    return charges[-1]["cumulative_epsilon"], _price(rounds, charges[-1]["delta"])


@lru_cache
def _price(rounds: tuple[tuple[float, float, int], ...], delta: float) -> float:
    """Kept, because devices of one job have the same charges."""
    return pld_epsilon(rounds, delta, grid=1e-3)
