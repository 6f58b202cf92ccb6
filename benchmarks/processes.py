"""Training in several processes: one against two, by engine and model, and the memory of the second.

A step is a clipped sum over a lot of 256 records, in microbatches of 32 (`cifar-cnn`: 8). Both sides have the
same records, and take turns of 0.3 s in one process for each engine and model; medians of 9. A ratio is the
rate with two processes over that with one, and its median that of the turns. Beside it stands that of two
processes with nothing in common, each with lots of its own: what the second core of the machine is worth to
that model at best, where the cores share a cache, the memory and the power, or a host has other work.

Memory is the proportional set size of both processes together, after as many steps, less that of a process
that has never had another: what the second one costs, with all that both share counted once.

Limits: two cores; a machine on which nothing else runs. Reading records is no part of it.
"""

from __future__ import annotations

import json
import os
import socket
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from benchmarks.figures import Figure
from benchmarks.frameworks import ours
from benchmarks.programs import python, run_json
from dpagent.learning.models.built_ins import built_in
from dpagent.learning.training.forks import end, forked
from dpagent.learning.training.parallel_engine import ParallelEngine

_MICROBATCHES: Final = {"mnist-cnn": 32, "digits": 32, "sensor-cnn": 32, "cifar-cnn": 8}
_LOT: Final = 256
_TURN_S: Final = 0.3
_TURNS: Final = 9
_TIMEOUT_S: Final = 600.0
_LONGEST: Final = 64
"""Bytes of a message."""


def run() -> list[Figure]:
    """Measure each engine on each model, in children."""
    figures = []
    for model, microbatch in _MICROBATCHES.items():
        for name in ours.NAMES:
            child = python("-m", "benchmarks.processes", name, model, str(microbatch))
            alone = run_json([*child, "memory"], timeout_s=_TIMEOUT_S)
            found = run_json(child, timeout_s=_TIMEOUT_S)
            one, two = found["rates"]
            what = f"{model}, {name} engine, two processes"
            compared = f"one: {one:,.0f}"
            figures.append(Figure(what, two, "examples a second", compared, found["ratio"]))
            figures.append(
                Figure(
                    f"{model}, {name} engine, two processes with lots of their own",
                    found["apart"], "examples a second", compared, found["ratio_apart"],
                )
            )  # fmt: skip
            figures.append(Figure(f"{what}, the second one's memory", found["pss"] - alone["pss"], "MiB"))
    return figures


def main(name: str, model: str, microbatch: int, *, is_alone: bool) -> dict[str, Any]:
    """What a child measures.

    Returns:
        ``pss``, in MiB; unless it is alone, ``rates`` with one process and with two, and of two ``apart``, in
        records a second, and the medians of the turns' ``ratio`` and ``ratio_apart``.
    """
    spec = built_in(model)
    engine = ours.made(name, spec, microbatch)
    generator = np.random.default_rng(0)
    inputs = generator.random((_LOT, *spec.input_shape), np.float32)
    labels, weights = generator.integers(0, spec.classes, _LOT), spec.initial_weights(0)

    def step(side: Any) -> Callable[[], NDArray[np.float64]]:
        return lambda: side.clipped_sum(weights, inputs, labels, [ours.CLIP_NORM]).total

    if is_alone:
        for _ in range(3):
            step(engine)()
        return {"pss": _pss_mib(os.getpid())}
    connection, other = _apart(step(engine))
    both = ParallelEngine(engine, 2)
    for side in (engine, both):
        step(side)()
    turns = []
    for _ in range(_TURNS):
        one, two = _rate(step(engine)), _rate(step(both))
        connection.send(b"now")
        own = _rate(step(engine))
        turns.append((one, two, own + float(connection.recv(_LONGEST))))
    end(other, connection)
    pss = sum(map(_pss_mib, [os.getpid(), *both.forks]))
    *rates, apart = (statistics.median(rates) for rates in zip(*turns, strict=True))
    return {
        "pss": pss,
        "rates": rates,
        "ratio": statistics.median(two / one for one, two, _ in turns),
        "apart": apart,
        "ratio_apart": statistics.median(apart / one for one, _, apart in turns),
    }


def _apart(step: Callable[[], object]) -> tuple[socket.socket, int]:
    """A process that takes a turn whenever it is told to, and says its rate."""
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)

    def serve() -> None:
        while theirs.recv(_LONGEST):
            theirs.send(str(_rate(step)).encode())

    with theirs:
        return ours, forked(serve, theirs.fileno())


def _rate(step: Callable[[], object]) -> float:
    """Records a second, in one turn."""
    began, steps = time.perf_counter(), 0
    while (took := time.perf_counter() - began) < _TURN_S:
        step()
        steps += 1
    return steps * _LOT / took


def _pss_mib(process: int) -> float:
    for line in Path(f"/proc/{process}/smaps_rollup").read_text().splitlines():
        if line.startswith("Pss:"):
            return int(line.split()[1]) / 1024
    raise AssertionError(line)


if __name__ == "__main__":
    engine_name, model_name, size, *rest = sys.argv[1:]
    print(json.dumps(main(engine_name, model_name, int(size), is_alone=rest == ["memory"])))
