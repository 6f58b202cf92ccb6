"""The same training without noise, for comparison: ``python -m cli.demo.baseline DEMO_DIRECTORY``.

Same shards, lots' sampling rate, clipping, cap and optimiser; only the noise and the
network are missing. It reads all shards, which nobody in the real fleet can: it belongs to
the demo alone, and its figures are not private.
"""

from __future__ import annotations

import json
import signal
import sys
from pathlib import Path

import numpy as np

from agent.update import clipped_sum
from cli.demo.layout import Layout, records_per_device
from cli.demo.options import DemoOptions
from coordinator.settings import CapSettings
from dpagent.errors import DpagentError, ExitCode
from dpagent.learning import MomentumSgd, NumpyEngine, built_in, load_npz
from dpagent.privacy import ClampCap, DiscretisedGaussian
from dpagent.storage import write_atomically


def read_baseline(file: Path) -> tuple[float, ...]:
    """Accuracy after each round so far; empty while there is none."""
    try:
        return tuple(json.loads(file.read_text())["accuracy"])
    except (OSError, ValueError, KeyError, TypeError):
        return ()


def run_baseline(options: DemoOptions, layout: Layout) -> None:
    """Train and write the accuracies, round by round."""
    spec = built_in(options.model)
    shards = [load_npz(layout.shard_file(number)) for number in range(1, options.devices + 1)]
    test = load_npz(layout.test_file)
    engine = NumpyEngine(spec)
    # Only its lots, clipping and rounding are used; the noise multiplier has no part in them.
    mechanism = DiscretisedGaussian(options.clip_norm, 1.0, options.sampling_rate, spec.parameter_count)
    cap = ClampCap(regularisation=CapSettings().regularisation, floor=CapSettings().floor)
    optimiser = MomentumSgd(options.learning_rate, options.momentum)
    weights = spec.initial_weights(options.seed)
    velocity = optimiser.initial_velocity(len(weights))
    scale = mechanism.granularity / (options.sampling_rate * records_per_device(options))
    history: list[float] = []
    for _ in range(options.rounds):
        gradient = np.zeros(spec.parameter_count, np.float64)
        for shard in shards:
            mean = clipped_sum(mechanism, weights, shard, engine).astype(np.float64) * scale
            if options.cap == "clamp" and options.cap_at == "device":
                mean, _ = cap.apply(mean, weights, radius=options.clip_norm)
            gradient += mean / options.devices
        if options.cap == "clamp" and options.cap_at == "coordinator":
            gradient, _ = cap.apply(gradient, weights, radius=options.clip_norm)
        weights, velocity = optimiser.step(weights, velocity, gradient)
        history.append(engine.accuracy(weights, test.inputs, test.labels))
        write_atomically(layout.baseline_file, json.dumps({"accuracy": history}).encode())


def main() -> None:
    """Run for the demo in the directory named on the command line."""
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(ExitCode.OK))
    root = Path(sys.argv[1])
    try:
        options = DemoOptions(**json.loads((root / "demo.json").read_text()))
        run_baseline(options, Layout(root, options.devices))
    except DpagentError as error:
        print(error, file=sys.stderr)
        sys.exit(error.exit_code)


if __name__ == "__main__":
    main()
