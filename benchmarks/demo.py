"""What the two demo benchmarks share: one run of ``dpagent demo``, and the figures it gives."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.figures import Figure
from benchmarks.programs import python, run_program


def run_demo(arguments: Sequence[str], directory: Path, *, timeout_s: float) -> dict[str, Any]:
    """Run ``dpagent demo`` with its state in ``directory``.

    Returns:
        What it writes with ``--json``.
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
