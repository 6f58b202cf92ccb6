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
    """Time, traffic, memory and delivery of a run, all as ``--json`` has them."""
    seconds, traffic = results["seconds"], results["bytes_per_device_round"]
    memory, fragments = results["peak_memory_mib"], results["fragments"]
    figures = [
        Figure("time in all, start and stop included", seconds["total"], "s"),
        Figure("time of a round, median", seconds["per_round_median"], "s"),
        Figure("sent by a device in a round", traffic["up"], "bytes"),
        Figure("received by a device in a round", traffic["down"], "bytes"),
        Figure("peak resident memory, largest agent", memory["agent_max"], "MiB"),
        Figure("peak resident memory, coordinator", memory["coordinator"], "MiB"),
        Figure("fragments sent", fragments["sent"], "fragments"),
        Figure("fragments lost", fragments["lost"], "fragments"),
        Figure("duplicates, received and not counted again", fragments["duplicates"], "fragments"),
        Figure("largest ε in a ledger", max(d["epsilon_spent"] for d in results["privacy"]["ledgers"]), "ε"),
    ]
    return [
        Figure(figure.name, float(figure.value), figure.unit, command=command)
        for figure in figures
        if figure.value is not None
    ]
