"""MNIST over ten devices at ε = 2, against the published central figure.

The README's run, once: ten agents with 6,000 records each, 100 rounds, the 26,010-parameter
CNN, ε = 2 and δ = 1e-5 for each record of each device, every device adding its own noise. The
accuracy is compared with the 95 % that Abadi et al. (2016, "Deep Learning with Differential
Privacy") report at the same ε and δ with all records in one trusted place; that is another network and
another setting, so it is a reference rather than a fair comparison.

An independent program checks the claimed ε: dp-accounting prices the charges of every device's ``dpagent
budget export`` again by privacy-loss distributions on a grid of 1e-3. It shares no code with ours. The
ratio is the largest over the devices; above 1 we claim more than needed.
The demo's other figures are as in ``demo_digits``.

Limits: one run. The data are not part of the project: without the four IDX files in
``../shared/data/mnist``, or the directory that the variable ``MNIST_DIR`` names, this benchmark
is skipped.
"""

from __future__ import annotations

import tempfile
from pathlib import Path

from benchmarks.demo import (
    accuracy_without_noise,
    claimed_and_recomputed,
    cost_figures,
    mnist_directory,
    run_demo,
)
from benchmarks.figures import Figure

_OPTIONS = ["--dataset", "mnist", "--devices", "10", "--rounds", "100", "--epsilon", "2"]
_COMMAND = "dpagent demo --dataset mnist --data-dir PATH/TO/IDX/FILES --devices 10 --rounds 100 --epsilon 2"
_CENTRAL = 0.95
_TIMEOUT_S = 3600.0


def run() -> list[Figure]:
    """Run the demo once and price its ledgers again.

    Raises:
        Skipped: The data are not there.
    """
    data = mnist_directory()
    with tempfile.TemporaryDirectory(prefix="dpagent-bench-") as name:
        directory = Path(name)
        results = run_demo([*_OPTIONS, "--data-dir", str(data)], directory, timeout_s=_TIMEOUT_S)
        claimed, recomputed = claimed_and_recomputed(directory)
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
