"""MNIST through the frozen scattering front end over ten devices, at ε = 0.5, 2 and 8.

The commands of ``docs/first-model.md``, once each: ten agents with 6,000 records each, 39,700
parameters, δ = 1e-5 for each record of each device, every device adding its own noise. The accuracies are
compared with the 90, 95 and 97 % that Abadi et al. (2016, "Deep Learning with Differential Privacy")
report at ε = 0.5, 2 and 8 and the same δ, with all records in one trusted place; that is another network and
another setting, so it is a reference rather than a fair comparison.

The settings (``simulation/presets.py``) come from a search on MNIST that used the test set. That
search is not private, and no ledger counts it. ε is checked as in ``demo_mnist``.

Limits: one run each. Skipped without the data, as ``demo_mnist``.
"""

from __future__ import annotations

import tempfile
from dataclasses import replace
from pathlib import Path

from benchmarks.demo import (
    accuracy_without_noise,
    claimed_and_recomputed,
    cost_figures,
    mnist_directory,
    run_demo,
)
from benchmarks.figures import Figure

# Accuracies with all records in one place, by ε.
_CENTRAL = {0.5: 0.90, 2.0: 0.95, 8.0: 0.97}
_OPTIONS = ["--dataset", "mnist", "--model", "scattering"]
_COMMAND = "dpagent demo --dataset mnist --data-dir PATH/TO/IDX/FILES --model scattering --epsilon {:g}"
_TIMEOUT_S = 3600.0


def run() -> list[Figure]:
    """Run the demo once for each ε, and price its ledgers again.

    Raises:
        Skipped: The data are not there.
    """
    data = mnist_directory()
    return [figure for epsilon in _CENTRAL for figure in _run(epsilon, data)]


def _run(epsilon: float, data: Path) -> list[Figure]:
    command = _COMMAND.format(epsilon)
    options = [*_OPTIONS, "--data-dir", str(data), "--epsilon", f"{epsilon:g}"]
    with tempfile.TemporaryDirectory(prefix="dpagent-bench-") as name:
        results = run_demo(options, Path(name), timeout_s=_TIMEOUT_S)
        claimed, recomputed = claimed_and_recomputed(Path(name))
    accuracy, central = results["accuracy"], _CENTRAL[epsilon]
    figures = [
        Figure(
            "accuracy", 100 * accuracy, "%",
            f"{100 * central:g} % (Abadi et al. 2016, central)", accuracy / central, command,
        ),
        accuracy_without_noise(results, command),
        Figure("rounds", float(results["rounds"]), "rounds", command=command),
        Figure(
            "ε by the ledgers, largest ratio over the devices", claimed, "ε",
            f"dp-accounting (PLD), from the exported charges: {recomputed:.5f}", claimed / recomputed,
        ),
        *cost_figures(results, command),
    ]  # fmt: skip
    return [replace(figure, name=f"ε = {epsilon:g}: {figure.name}") for figure in figures]
