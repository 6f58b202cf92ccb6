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

from cli.demo.layout import Layout, records_per_device
from cli.demo.options import DemoOptions
from coordinator.settings import CapSettings
from dpagent.errors import DpagentError, ExitCode
from dpagent.learning import NumpyEngine, Sgd, built_in, open_npz, sum_over_lot
from dpagent.privacy import ClampCap, poisson_lot, shuffled
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
    shards = [open_npz(layout.shard_file(number)) for number in range(1, options.devices + 1)]
    test = open_npz(layout.test_file)
    engine = NumpyEngine(spec)
    cap = ClampCap(regularisation=CapSettings().regularisation, floor=CapSettings().floor)
    optimiser = Sgd(options.momentum)
    weights = spec.initial_weights(options.seed)
    state = np.zeros((optimiser.rows, len(weights)))
    expected_lot = options.sampling_rate * records_per_device(options)
    history: list[float] = []
    for number in range(1, options.rounds + 1):
        gradient = np.zeros(spec.parameter_count, np.float64)
        for shard in shards:
            lot = shuffled(poisson_lot(len(shard), options.sampling_rate))
            mean = sum_over_lot(engine, weights, shard, lot, [options.clip_norm]).total / expected_lot
            if options.cap == "clamp" and options.cap_at == "device":
                mean, _ = cap.apply(mean, weights, radius=options.clip_norm)
            gradient += mean / options.devices
        if options.cap == "clamp" and options.cap_at == "coordinator":
            gradient, _ = cap.apply(gradient, weights, radius=options.clip_norm)
        weights, state = optimiser.step(
            weights, state, gradient, number=number, learning_rate=options.learning_rate
        )
        history.append(engine.accuracy(weights, *test.batch(np.arange(len(test)))))
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
