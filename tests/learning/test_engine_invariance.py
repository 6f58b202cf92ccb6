"""The bits of one record's gradient depend on that record and the weights alone.

Sensitivity is proven for one record's contribution with all others held fixed. If a
neighbour, a position or a fill could move a bit of it, the proof would not be about this program.
"""

from __future__ import annotations

import os
import subprocess
import sys
from functools import cache
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dpagent.learning import BUILT_IN, Conv2d, Dense, MaxPool2d, ModelSpec, NumpyEngine, Tanh, built_in

POOL = 24

# Sizes that fill no vector: every ufunc and product has a tail to trip over.
ODD = ModelSpec(
    "odd",
    (7, 9, 1),
    7,
    (Conv2d(5, 3), Tanh(), MaxPool2d(2, 1), Conv2d(3, 2), Tanh(), Dense(11), Tanh(), Dense(7)),
)
SPECS = {**BUILT_IN, "odd": ODD}


@cache
def engine(name: str, microbatch: int) -> NumpyEngine:
    return NumpyEngine(SPECS[name], microbatch=microbatch)


@cache
def records(name: str) -> tuple[Any, Any, Any, list[bytes]]:
    """Weights, inputs, labels, and each record's gradient when it is all alone."""
    spec = SPECS[name]
    generator = np.random.default_rng(0)
    weights = spec.initial_weights(5) + generator.normal(0, 0.1, spec.parameter_count).astype(np.float32)
    inputs = generator.random((POOL, *spec.input_shape), dtype=np.float32)
    inputs *= inputs > 0.4  # Flat backgrounds tie in the pooling windows.
    inputs[1] = 0
    inputs[2] = 1
    inputs[3] *= 1e30
    labels = generator.integers(0, spec.classes, POOL)
    alone = [
        next(engine(name, 1).gradients(weights, inputs[i : i + 1], labels[i : i + 1])).tobytes()
        for i in range(POOL)
    ]
    return weights, inputs, labels, alone


def gradients(name: str, microbatch: int, weights: Any, inputs: Any, labels: Any) -> list[bytes]:
    return [
        row.tobytes() for part in engine(name, microbatch).gradients(weights, inputs, labels) for row in part
    ]


@pytest.mark.parametrize("name", SPECS)
@settings(deadline=None, max_examples=40)
@given(
    lot=st.lists(st.integers(0, POOL - 1), min_size=1, max_size=40),
    microbatch=st.sampled_from([1, 2, 5, 16, 32]),
)
def test_equals_a_batch_of_one_bit_for_bit(name: str, lot: list[int], microbatch: int) -> None:
    weights, inputs, labels, alone = records(name)
    found = gradients(name, microbatch, weights, inputs[lot], labels[lot])
    wrong = [place for place, record in enumerate(lot) if found[place] != alone[record]]
    assert not wrong, f"places {wrong} of {len(lot)} differ from a batch of one"
    assert len(found) == len(lot)


@pytest.mark.parametrize("name", SPECS)
def test_every_position_and_every_fill(name: str) -> None:
    weights, inputs, labels, alone = records(name)
    for position in range(32):
        order = np.full(position + 1, 7)
        order[position] = 4
        assert gradients(name, 32, weights, inputs[order], labels[order])[position] == alone[4]
    for fill in range(1, 33):
        order = np.arange(fill) % POOL
        assert gradients(name, 32, weights, inputs[order], labels[order])[0] == alone[0]


@pytest.mark.parametrize("name", SPECS)
@pytest.mark.parametrize("poison", [np.nan, np.inf, -np.inf, 3e38])
def test_a_record_that_is_not_finite_stays_alone(name: str, poison: float) -> None:
    weights, inputs, labels, alone = records(name)
    lot = np.arange(POOL)
    dirty = inputs.copy()
    dirty[[0, 9, 23]] = poison
    found = gradients(name, 8, weights, dirty, labels)
    if not np.isfinite(poison):
        for record in (0, 9, 23):
            assert not np.isfinite(np.frombuffer(found[record], np.float32)).all()
    for record in set(lot) - {0, 9, 23}:
        assert found[record] == alone[record], record
    # And nothing of it is left in the workspaces.
    assert gradients(name, 8, weights, inputs[:3], labels[:3]) == alone[:3]


@pytest.mark.parametrize("name", SPECS)
def test_logits_do_not_depend_on_company_either(name: str) -> None:
    weights, inputs, _, _ = records(name)
    together = engine(name, 16).logits(weights, inputs)
    for record in range(POOL):
        assert np.array_equal(
            engine(name, 16).logits(weights, inputs[record : record + 1])[0], together[record]
        )


@pytest.mark.parametrize("name", SPECS)
def test_the_machine_passes_its_own_check(name: str) -> None:
    assert engine(name, 32).is_batch_invariant()


def test_the_check_notices_a_dependence_on_position(monkeypatch: pytest.MonkeyPatch) -> None:
    subject = NumpyEngine(built_in("digits"), microbatch=4)
    honest = np.matmul

    def leaky(*operands: Any, out: Any) -> Any:
        honest(*operands, out=out)
        out[1] *= np.float32(1 + 2**-22)
        return out

    monkeypatch.setattr(np, "matmul", leaky)
    assert not subject.is_batch_invariant()


def test_a_stack_is_not_collapsed_into_one_product() -> None:
    # A (m,1,k) stack times one matrix could be computed as a single (m,k) product. Should a
    # numpy ever do so, the bits would become those of another kernel: here they are shown to be
    # those of m separate products.
    generator = np.random.default_rng(0)
    for inputs, units in ((513, 32), (33, 10), (513, 10)):
        rows = generator.standard_normal((32, 2, inputs), dtype=np.float32)[:, :1]
        matrix = generator.standard_normal((inputs, units), dtype=np.float32)
        separately = np.stack([row @ matrix for row in rows])
        assert np.array_equal(np.matmul(rows, matrix), separately)


@pytest.mark.parametrize("kernel", ["Prescott", "Nehalem", "Sandybridge", "Haswell", "SkylakeX"])
def test_other_blas_kernels_are_invariant_too(kernel: str) -> None:
    # OpenBLAS on x86-64 can be told which family of kernels to use; elsewhere this repeats one.
    program = (
        "from dpagent.learning import *\n"
        "assert all(NumpyEngine(spec, microbatch=8).is_batch_invariant() for spec in BUILT_IN.values())"
    )
    flags = subprocess.run(
        ["grep", "-m1", "flags", "/proc/cpuinfo"], capture_output=True, text=True
    ).stdout.split()
    if (kernel == "SkylakeX" and "avx512f" not in flags) or (kernel == "Haswell" and "avx2" not in flags):
        pytest.skip("this processor lacks the instructions")
    for threads in ("1", "2"):
        environment = {**os.environ, "OPENBLAS_CORETYPE": kernel, "OPENBLAS_NUM_THREADS": threads}
        subprocess.run([sys.executable, "-c", program], env=environment, check=True, timeout=60)
