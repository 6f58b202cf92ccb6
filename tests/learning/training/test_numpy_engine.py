"""The engine on numpy: the same bits in any company, on any BLAS, in little memory.

Sensitivity is proven for one record's contribution with all others held fixed. If a neighbour, a position
or a fill could move a bit of it, the proof would not be about this program.
"""

from __future__ import annotations

import os
import platform
import subprocess
import sys
from functools import cache, partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from executed import executed
from learning.engines import HUGE
from learning.small_models import SPECS, logits_of, loss_of, records, small

from dpagent.errors import DataError, ParameterError
from dpagent.learning.models.built_ins import BUILT_IN, built_in
from dpagent.learning.models.layers import Conv2d, Dense, GroupNorm, MaxPool2d, Relu, Residual, Tanh
from dpagent.learning.models.spec import ModelSpec
from dpagent.learning.training.engine import NORM_RUN
from dpagent.learning.training.numpy_engine import products, stages
from dpagent.learning.training.numpy_engine.activations import Tangent
from dpagent.learning.training.numpy_engine.engine import NumpyEngine
from dpagent.learning.training.numpy_engine.gathering import SlidingProduct
from dpagent.learning.training.numpy_engine.workspaces import Memory
from dpagent.norm import Norm

# Sizes that fill no vector: every function and product has a tail to trip over.
ODD = small("odd", (11, 9, 1), Conv2d(5, 3), Tanh(), MaxPool2d(2, 1), Conv2d(3, 2), Tanh(), Dense(11), Tanh())
SLIDING = small("sliding", (9, 9, 2), Conv2d(16, 2), Tanh(), MaxPool2d(3, 1), Conv2d(4, 3), Relu())
COMPANY = [
    ODD,
    SLIDING,
    *SPECS[1:7],
    *(built_in(name).head for name in ("digits", "mnist-cnn", "sensor-cnn")),
]


@cache
def engine(spec: ModelSpec, microbatch: int, **options: Any) -> NumpyEngine:
    return NumpyEngine(spec, microbatch=microbatch, **options)


def total(subject: NumpyEngine, weights: Any, inputs: Any, labels: Any) -> bytes:
    return subject.clipped_sum(weights, inputs, labels, [HUGE]).total.tobytes()


@pytest.mark.parametrize("spec", COMPANY, ids=lambda spec: spec.name)
@pytest.mark.parametrize("microbatch", [5, 16])
def test_a_record_is_the_same_at_every_place_and_in_any_company(spec: ModelSpec, microbatch: int) -> None:
    weights, inputs, labels = records(spec, microbatch)
    inputs *= inputs > 0.4  # Flat backgrounds tie in the pooling windows.
    subject = engine(spec, microbatch)
    alone = total(subject, weights, inputs[:1], labels[:1])
    # Whatever makes its gradient not finite adds exact zeros: what is left is the first record.
    company = np.full_like(inputs, np.nan)
    for place in range(microbatch):
        company[:] = np.nan
        company[place] = inputs[0]
        assert total(subject, weights, company, np.full(microbatch, labels[0])) == alone, place
    for fill in range(1, microbatch):
        assert total(subject, weights, company[-fill:], np.full(fill, labels[0])) == alone, fill
    assert subject.is_batch_invariant()


@pytest.mark.parametrize("spec", COMPANY, ids=lambda spec: spec.name)
def test_logits_do_not_depend_on_company_either(spec: ModelSpec) -> None:
    weights, inputs, _ = records(spec, 21)
    together = engine(spec, 16).logits(weights, inputs)
    for place in range(21):
        assert np.array_equal(engine(spec, 16).logits(weights, inputs[place : place + 1])[0], together[place])


@pytest.mark.parametrize(
    "spec", [*SPECS, *(built_in(name).head for name in sorted(BUILT_IN))], ids=lambda s: s.name
)
@pytest.mark.parametrize("views", [1, 3])
def test_logits_and_accuracy(spec: ModelSpec, views: int) -> None:
    weights, inputs, labels = records(spec, 5)
    subject = engine(spec, 2, views=views)
    expected = np.array([logits_of(spec, weights, record) for record in inputs])
    np.testing.assert_allclose(subject.logits(weights, inputs), expected, atol=3e-5)
    assert subject.accuracy(weights, inputs, labels) == np.mean(expected.argmax(axis=1) == labels)
    assert subject.logits(weights, inputs[:0]).shape == (0, spec.classes)
    with pytest.raises(DataError, match="no records"):
        subject.accuracy(weights, inputs[:0], labels[:0])


@pytest.mark.parametrize("form", ["stacked", "tiles of", "flat", "groups of"])
def test_every_form_of_every_product_gives_the_same_sums(form: str) -> None:
    for spec in (built_in("digits"), built_in("mnist-cnn"), SPECS[6], ODD):
        weights, inputs, labels = records(spec, 13)
        expected = engine(spec, 8, products="stacked").clipped_sum(weights, inputs, labels, [0.5]).total
        subject = NumpyEngine(spec, microbatch=8)
        taken = 0
        for product in subject._network.choices.values():
            if not isinstance(product, products.Product):
                continue
            possible = [name for name in product._operands if name.startswith(form)]
            product.form = possible[0] if possible else "stacked"
            taken += bool(possible)
        assert taken
        found = subject.clipped_sum(weights, inputs, labels, [0.5]).total
        np.testing.assert_allclose(found, expected, rtol=0, atol=2e-6 * np.abs(expected).max())


@pytest.mark.parametrize("views", [1, 2])
def test_windows_of_a_series_are_multiplied_where_they_lie(views: int) -> None:
    for spec in (built_in("sensor-cnn"), *(spec for spec in SPECS if spec.name == "long series")):
        weights, inputs, labels = records(spec, 10 * views)
        inputs, labels = inputs.reshape(10, -1, *spec.input_shape), labels[:10]
        if views == 1:
            inputs = inputs[:, 0]
        subject = NumpyEngine(spec, microbatch=8, views=views, products="stacked")
        expected = subject.clipped_sum(weights, inputs, labels, [0.5]).total
        sliding = [x for x in subject._network.choices.values() if isinstance(x, SlidingProduct)]
        assert sliding
        for product in sliding:
            product.form = "sliding"
        found = subject.clipped_sum(weights, inputs, labels, [0.5]).total
        assert "sliding" in subject.forms.values()
        np.testing.assert_allclose(found, expected, rtol=0, atol=2e-6 * np.abs(expected).max())
        assert subject.is_batch_invariant()


def test_the_tangent_by_its_exponential_is_the_tangent() -> None:
    argument = np.concatenate([np.linspace(-100, 100, 20001), np.linspace(-1, 1, 20001)]).astype(np.float32)
    argument = np.concatenate([argument, np.float32([np.inf, -np.inf, np.nan, 3e38, -3e38])])
    tangent = Tangent(argument, np.empty_like(argument))
    tangent.form = "exponential"
    with np.errstate(over="ignore"):
        tangent()
    np.testing.assert_allclose(tangent._result, np.tanh(argument.astype(np.float64)), rtol=0, atol=2e-7)
    for spec in (built_in("mnist-cnn"), SPECS[2]):
        weights, inputs, labels = records(spec, 6)
        subject = NumpyEngine(spec, microbatch=8)
        expected = subject.clipped_sum(weights, inputs, labels, [0.5]).total
        for choice in subject._network.choices.values():
            if isinstance(choice, Tangent):
                choice.form = "exponential" if choice.form == "library" else "library"
        found = subject.clipped_sum(weights, inputs, labels, [0.5]).total
        assert found.tobytes() != expected.tobytes()
        np.testing.assert_allclose(found, expected, rtol=0, atol=5e-6 * np.abs(expected).max())
        assert subject.is_batch_invariant()


@pytest.mark.parametrize("form", ["flat", "groups of 2"])
def test_a_form_that_depends_on_the_position_is_not_taken(monkeypatch: pytest.MonkeyPatch, form: str) -> None:
    honest = np.matmul

    def uneven(left: Any, right: Any, out: Any) -> Any:
        honest(left, right, out=out)
        if out.shape[-2] > 1:
            out[..., -1, :] *= np.float32(1 + 2**-22)
        return out

    monkeypatch.setattr(np, "matmul", uneven)
    monkeypatch.setattr(products, "fastest", lambda product: 1.0 if product.form != form else 0.1)
    spec = small("dense", (6,), Dense(5), Dense(4))
    assert set(NumpyEngine(spec, microbatch=4).forms.values()) == {"stacked"}
    # And it is what is wrong with it that keeps it out: an honest one, exact in any order, is taken.
    monkeypatch.setattr(np, "matmul", lambda left, right, out: honest(left * 0, right, out=out))
    assert set(NumpyEngine(spec, microbatch=4).forms.values()) == {form}


def test_the_check_notices_a_dependence_on_position(monkeypatch: pytest.MonkeyPatch) -> None:
    subject = NumpyEngine(built_in("digits"), microbatch=4, products="stacked")
    honest = np.matmul

    def leaky(*operands: Any, out: Any) -> Any:
        honest(*operands, out=out)
        out[1] *= np.float32(1 + 2**-22)
        return out

    assert subject.is_batch_invariant()
    monkeypatch.setattr(np, "matmul", leaky)
    assert not subject.is_batch_invariant()


_INVARIANCE = """
import sys
sys.path[:0] = sys.argv[1:3]
from dpagent.learning.models.built_ins import BUILT_IN
from dpagent.learning.training.numpy_engine.engine import NumpyEngine
from learning.small_models import SPECS
asked = sys.argv[3:]
for spec in [spec.head for name, spec in BUILT_IN.items() if name in asked] if asked else SPECS:
    for options in ({"microbatch": 7}, {"microbatch": 16, "products": "stacked"}):
        assert NumpyEngine(spec, **options).is_batch_invariant(), (spec.name, options)
"""


# Families of kernels that OpenBLAS can be told to use. On 32-bit ARM it is built with one.
_KERNELS = {
    "x86_64": ["Prescott", "Nehalem", "Sandybridge", "Haswell", "SkylakeX"],
    "aarch64": ["ARMV8", "CORTEXA53", "CORTEXA57", "NEOVERSEN1"],
}
# OpenBLAS shares out products from 2^18 multiplications on, which small networks do not have. On a busy
# machine two threads wait for each other most of the time: half a minute for the two largest models.
_LARGEST = ["cifar-cnn", "resnet-8"]
_SHARED_OUT = [name for name in BUILT_IN if name not in _LARGEST]


@pytest.mark.heavy
@pytest.mark.parametrize(
    ("threads", "models"),
    [
        pytest.param(1, [], id="1-small"),
        pytest.param(1, list(BUILT_IN), id="1-built-in", marks=pytest.mark.slow),
        pytest.param(2, _SHARED_OUT, id="2-shared-out", marks=pytest.mark.slow),
        pytest.param(2, _LARGEST, id="2-largest", marks=pytest.mark.slow),
    ],
)
@pytest.mark.parametrize("kernel", _KERNELS.get(platform.machine(), ["the only one"]))
def test_other_blas_kernels_are_invariant_too(kernel: str, threads: int, models: list[str]) -> None:
    processor = Path("/proc/cpuinfo")
    flags = processor.read_text() if processor.exists() else ""
    if (kernel == "SkylakeX" and "avx512f" not in flags) or (kernel == "Haswell" and "avx2" not in flags):
        pytest.skip("this processor lacks the instructions")
    environment = {**os.environ, "OPENBLAS_CORETYPE": kernel, "OPENBLAS_NUM_THREADS": str(threads)}
    roots = [str(Path(__file__).parents[levels]) for levels in (3, 2)]
    run_child(_INVARIANCE, *roots, *models, environment=environment)


_MEMORY = """
import sys
sys.path[:0] = sys.argv[1:]
import numpy as np
from dpagent.learning.models.built_ins import built_in
from dpagent.learning.training.numpy_engine.engine import NumpyEngine
spec = built_in("mnist-cnn")
engine, weights = NumpyEngine(spec, microbatch=64), spec.initial_weights(0)
inputs = np.random.default_rng(0).integers(0, 256, (256, 28, 28, 1), np.uint8)
for _ in range(3):
    engine.clipped_sum(weights, inputs, np.zeros(256, np.int64), [1.0])
(peak,) = (line for line in open("/proc/self/status") if line.startswith("VmHWM"))
print(int(peak.split()[1]) / 1024)
"""


def test_a_process_that_trains_is_small() -> None:
    if not Path("/proc/self/status").exists():
        pytest.skip("the peak of a process's memory is read from /proc")
    environment = {**os.environ, "OPENBLAS_NUM_THREADS": "1"}
    assert float(run_child(_MEMORY, str(Path.cwd()), environment=environment)) <= 56


def run_child(program: str, *arguments: str, environment: dict[str, str]) -> str:
    done = subprocess.run(
        [sys.executable, "-c", program, *arguments],
        env=environment,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_squares_are_added_in_short_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    lengths: list[int] = []
    honest = np.vecdot

    def watched(left: Any, right: Any) -> Any:
        lengths.append(left.shape[-1])
        return honest(left, right)

    monkeypatch.setattr(np, "vecdot", watched)
    for name in ("sensor-cnn", "cifar-cnn"):
        spec = built_in(name)
        weights, inputs, labels = records(spec, 2)
        NumpyEngine(spec, microbatch=2, products="stacked").clipped_sum(weights, inputs, labels, [1.0])
    assert NORM_RUN // 2 < max(lengths) <= NORM_RUN
    lengths.clear()
    spec = small("factors of an outer product", (3 * NORM_RUN,), Dense(2 * NORM_RUN))
    weights, inputs, labels = records(spec, 1)
    gradient = NumpyEngine(spec, microbatch=1).clipped_sum(weights, inputs, labels, [1.0])
    assert max(lengths) <= NORM_RUN // 2
    assert np.linalg.norm(gradient.total) == pytest.approx(1, rel=1e-5)


def test_every_record_begins_on_a_cache_line() -> None:
    for shape in ((1,), (7,), (16,), (5, 3, 2)):
        for views in (1, 3):
            room = Memory(4, views).workspace(shape)
            starts = [record.__array_interface__["data"][0] for record in room.values]
            assert all(start % 64 == 0 for start in starts)
            assert room.whole.size % 16 == 0
            assert np.shares_memory(room.values, room.whole)
    gradients = stages.RecordGradients(3, (5, 7), Norm.L2)
    assert all(row.__array_interface__["data"][0] % 64 == 0 for row in gradients.rows)


def test_blocks_of_a_microbatch_change_no_more_than_the_order_of_sums() -> None:
    spec = built_in("mnist-cnn")
    weights, inputs, labels = records(spec, 45)
    found = [
        NumpyEngine(spec, microbatch=20, block=block).clipped_sum(weights, inputs, labels, [0.5])
        for block in (1, 3, 7, 20)
    ]
    for each in found[1:]:
        np.testing.assert_allclose(
            each.total, found[0].total, rtol=0, atol=1e-6 * np.abs(found[0].total).max()
        )
        assert each.within.tolist() == found[0].within.tolist()


@pytest.mark.parametrize("views", [1, 3])
@pytest.mark.parametrize("spec", [ODD, SLIDING, built_in("digits")], ids=lambda spec: spec.name)
def test_a_gradient_that_is_not_finite_takes_no_other_way(spec: ModelSpec, views: int) -> None:
    """A coordinator may choose weights with which one record's is not, and see how long many steps take."""
    weights, inputs, labels = records(spec, 8)
    subject = engine(spec, 8, views=views)
    if views > 1:
        inputs = np.repeat(inputs[:, np.newaxis], views, axis=1)
    spoilt = inputs.copy()
    spoilt[3] = np.nan
    assert subject.clipped_sum(weights, spoilt, labels, [HUGE]).excluded == 1
    ways = [
        executed(partial(subject.clipped_sum, weights, each, labels, [HUGE])) for each in (inputs, spoilt)
    ]
    assert ways[0] == ways[1]
    assert sum(ways[0].values()) > 500


def test_no_weights_have_an_exponential_take_another_way(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a processor with AVX2 and no AVX-512, that of −95 among others takes 60 % longer."""
    seen: list[float] = []
    exponential = np.exp

    def watched(argument: Any, **options: Any) -> Any:
        seen.extend((float(np.nanmin(argument)), float(np.nanmax(argument))))
        return exponential(argument, **options)

    monkeypatch.setattr(np, "exp", watched)
    spec = built_in("digits")
    subject = NumpyEngine(spec, microbatch=4)
    for choice in subject._network.choices.values():
        if isinstance(choice, Tangent):
            choice.form = "exponential"
    seen.clear()
    weights, inputs, labels = records(spec, 4)
    for size in (1.0, 1e3, 1e30):
        subject.clipped_sum(weights * np.float32(size), inputs, labels, [HUGE])
    assert len(seen) == 2 * 3 * 3
    assert min(seen) == -max(seen) == -80


def test_activations_and_branches_do_not_overwrite_what_others_need() -> None:
    # Each of these has an activation, or a norm, whose output somebody reads once more.
    for layers in (
        (Dense(6), Tanh(), Relu(), Tanh()),
        (Dense(6), GroupNorm(2), Tanh(), Residual((Tanh(), Relu(), Dense(6)), (Relu(), Dense(6)))),
        (Residual((Tanh(),), (Relu(),)), Residual((GroupNorm(1), Relu())), Dense(4)),
    ):
        spec = small("shared", (6,), *layers)
        weights, inputs, labels = records(spec, 3)
        subject = engine(spec, 4)
        step, gradient = 1e-3, subject.clipped_sum(weights, inputs, labels, [HUGE]).total
        direction = gradient / np.linalg.norm(gradient)
        ends = [
            sum(loss_of(spec, weights + h * direction, x, y) for x, y in zip(inputs, labels, strict=True))
            for h in (-step, step)
        ]
        assert gradient @ direction == pytest.approx((ends[1] - ends[0]) / (2 * step), rel=1e-4)


def test_options_out_of_range_are_refused() -> None:
    with pytest.raises(ParameterError, match="'fast'; expected 'calibrated' or 'stacked'"):
        NumpyEngine(built_in("digits"), products="fast")  # type: ignore[arg-type]
    with pytest.raises(ParameterError, match="block is 9"):
        NumpyEngine(built_in("digits"), microbatch=8, block=9)
