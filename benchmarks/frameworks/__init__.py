"""Training steps against Opacus and PyTorch: examples a second, and memory.

One step is a gradient sum over a lot of 256: for us and for Opacus each example's whole gradient clipped
to 1, then summed; for PyTorch without privacy, forward, backward and an SGD step. No side draws
noise. Opacus runs in each of its modes (hooks, ghost clipping, ExpandedWeights, functorch) with its own
optimiser and true channels-first strides; PyTorch without privacy as it is, and with channels last in memory,
which suits its convolutions better (a series is then an image of height one). Every side uses the physical
batch that it was fastest with, of 4 to 256 (ours: of 4 to 64). Before anything is timed, each side's sum is
held against ``torch.func.vmap(grad)`` in float64: beyond 1e-5 the benchmark fails. All sides then take turns
of 0.2 s in one process for each model; medians of 7. Preprocessing is in our time and not in the others'. The
allocator is told to keep its memory (``MALLOC_…``), which made Opacus faster more often than slower, and
hardly touches us.

The share of the peak is the floating-point operations of the model's matrix products (the same number
with and without privacy), times examples a second, over the rate of a 1536×1536 float32 product in the same
process, in numpy or PyTorch, whichever is faster. Ours does a little less than that number: of `mnist-cnn`,
5 % are positions that no later layer reads.

"128 bits": both sides without AVX and FMA, the nearest thing here to a Pi. PyTorch by
``MKL_CBWR=COMPATIBLE``, ``ONEDNN_MAX_CPU_ISA=SSE41`` and ``ATEN_CPU_CAPABILITY=default``; numpy by
``OPENBLAS_CORETYPE=Prescott`` and ``NPY_DISABLE_CPU_FEATURES`` (all above x86-64-v2). The effect is
measured: the table has the product's rate in either library. The setting also removes numpy's vectorised
tanh (17 ns a value instead of 0.3), which NEON has. ONNX Runtime has no such switch and is left out there.

Peak memory is VmHWM of a separate process for each side, which takes three steps of ``mnist-cnn`` on 6,000
records with one thread: ours at a microbatch of 32, the largest of the board profiles, the others at the
batch that was fastest.

With two threads, ours are two processes with one each (:mod:`dpagent.learning.training.parallel_engine`).

Limits: not on ARM; eager PyTorch, not compiled; two threads mean something only where nothing else runs, and
what a side gains by the second differs between machines: two processes on `digits` had 2.9 times the rate of
Opacus's best mode on an Intel Xeon with AVX-512. Inputs are random, without those whose two largest values in
a max-pooling window are within 3e-6: float32 may take either, so two correct sides may differ there. Neither
PyTorch nor Opacus is a dependency; without them this benchmark is skipped. To install them in a separate
environment: ``pip install torch==2.13.0``, then ``pip install opacus==1.6.0``, then ``pip install -c
constraints.txt -e '.[dev]'``.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from importlib.util import find_spec
from typing import Any

from benchmarks.figures import Figure, Skipped
from benchmarks.frameworks.ours import NAMES
from benchmarks.programs import python, run_json

LOT = 256
"""Examples of a step."""

_MODELS = ("mnist-cnn", "digits", "sensor-cnn", "cifar-cnn")
_WEIGHED = "mnist-cnn"
_PROFILE_MICROBATCH = 32
_TIMEOUT_S = 3600.0
_KEPT_MEMORY = {
    "MALLOC_MMAP_THRESHOLD_": "4294967296",
    "MALLOC_TRIM_THRESHOLD_": "8589934592",
    "MALLOC_TOP_PAD_": "67108864",
}
_NARROW = {
    "MKL_CBWR": "COMPATIBLE",
    "ONEDNN_MAX_CPU_ISA": "SSE41",
    "ATEN_CPU_CAPABILITY": "default",
    # OpenBLAS has no SSE kernel for Nehalem that is faster than this one.
    "OPENBLAS_CORETYPE": "Prescott",
    "NPY_DISABLE_CPU_FEATURES": "X86_V3 X86_V4 AVX512_ICL AVX512_SPR",
}
_COMMAND = "python -m benchmarks frameworks"
_Sides = Mapping[str, Mapping[str, float]]


def run() -> list[Figure]:
    """Measure every model in children: one thread, two, one at 128 bits; then weigh the sides."""
    for name, pin in (("torch", "2.13.0"), ("opacus", "1.6.0")):
        if find_spec(name) is None:
            raise Skipped(
                f"{name} is not installed; in an environment outside the project: pip install "
                f"{name}=={pin} (torch first)."
            )
    figures: list[Figure] = []
    batches: dict[str, int] = {}
    for setting, threads, surroundings, engines in (
        ("one thread", 1, {}, NAMES),
        ("two threads", 2, {}, NAMES),
        # ONNX Runtime cannot be held to narrow vectors.
        ("128 bits, one thread", 1, _NARROW, ("numpy",)),
    ):
        for number, model in enumerate(_MODELS):
            measured = _measure(model, threads, engines, surroundings)
            if number == 0:
                figures += [
                    Figure(f"large product in {library}, {setting}", rate, "GFLOP/s", command=_COMMAND)
                    for library, rate in measured["products"].items()
                ]
            figures += _compare(f"{model}, {setting}", measured)
            if model == _WEIGHED and not batches:
                batches = {
                    name: _PROFILE_MICROBATCH if name.startswith("ours") else side["batch"]
                    for name, side in measured["sides"].items()
                }
    return [*figures, *_weigh(batches)]


def _measure(model: str, threads: int, engines: Sequence[str], surroundings: Mapping[str, str]) -> Any:
    variables = [f"{name}={value}" for name, value in (_KEPT_MEMORY | dict(surroundings)).items()]
    child = python("-m", "benchmarks.frameworks.speed", model, str(threads), *engines)
    return run_json(["env", *variables, *child], timeout_s=_TIMEOUT_S)


def _compare(what: str, measured: Any) -> list[Figure]:
    """Each of our engines against hooks, Opacus's best mode and PyTorch's better form, and the peak."""
    sides: _Sides = measured["sides"]
    opacus, pytorch = _family(sides, "Opacus"), _family(sides, "PyTorch")
    figures = []
    for name, rate in _family(sides, "ours").items():
        for others, shown in (
            ({"hooks": opacus["hooks"]}, "Opacus"),
            (opacus, "Opacus"),
            (pytorch, "PyTorch, not private"),
        ):
            best = max(others, key=others.__getitem__)
            title = "Opacus hooks" if len(others) == 1 else f"best of {shown}"
            listed = ", ".join(f"{other} {value:,.0f}" for other, value in others.items())
            figures.append(
                Figure(
                    f"{what}: {name} engine, {title}", rate, "examples a second",
                    f"{shown}: {listed}", rate / others[best], command=_COMMAND,
                )
            )  # fmt: skip
        reached = rate * measured["flops"] / 1e9
        figures.append(
            Figure(
                f"{what}: {name} engine, share of the peak", reached, "GFLOP/s",
                f"large product: {measured['peak']:.0f}", reached / measured["peak"], command=_COMMAND,
            )
        )  # fmt: skip
    return figures


def _family(sides: _Sides, family: str) -> dict[str, float]:
    """Examples a second of the sides of one family, by their names in it."""
    prefix = f"{family}, "
    return {
        name.removeprefix(prefix): side["rate"] for name, side in sides.items() if name.startswith(prefix)
    }


def _weigh(batches: Mapping[str, int]) -> list[Figure]:
    """Peak memory of a process for each side."""
    figures = []
    for name, batch in batches.items():
        child = python("-m", "benchmarks.frameworks.memory", name.partition(", ")[2], _WEIGHED, str(batch))
        peak = float(run_json(child, timeout_s=_TIMEOUT_S))
        figures.append(
            Figure(f"peak memory, {_WEIGHED}: {name} (batch {batch})", peak, "MiB", command=_COMMAND)
        )
    return figures
