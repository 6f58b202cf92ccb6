"""The default demo: five agents on handwritten digits, end to end.

One run of ``dpagent demo`` with its defaults: a broker (Mosquitto where it is installed, else the
embedded one), a coordinator and five agents as separate processes, 40 rounds at ε = 4,
δ = 1e-5 for each record. All figures are those of its ``--json``, which it reads from the
databases that the programs leave behind. Traffic is payloads and topics, without the headers of
MQTT and TCP. The round time is mostly deliberate waiting (a slot for training, then random
publication times), so the demo's total says little about a real fleet. Accuracy without
noise comes from the same training (lots, clipping, cap, optimiser) without the noise and the network.

Limits: one run, so accuracies vary by a percentage point or two from run to run (the test half has 360
records); everything, including the noiseless training, shares one machine.
"""

from __future__ import annotations

import tempfile
from pathlib import Path

from benchmarks.demo import accuracy_without_noise, cost_figures, run_demo
from benchmarks.figures import Figure

_COMMAND = "dpagent demo"
_TIMEOUT_S = 900.0


def run() -> list[Figure]:
    """Run the demo once."""
    with tempfile.TemporaryDirectory(prefix="dpagent-bench-") as directory:
        results = run_demo([], Path(directory), timeout_s=_TIMEOUT_S)
    baseline = results["baseline_accuracy"]
    accuracy = Figure(
        "accuracy", 100 * results["accuracy"], "%", f"without noise: {100 * baseline:.1f} %",
        results["accuracy"] / baseline, _COMMAND,
    )  # fmt: skip
    return [accuracy, accuracy_without_noise(results, _COMMAND), *cost_figures(results, _COMMAND)]
