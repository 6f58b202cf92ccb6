"""Features: one record at a time, kept on disk, computed again only where the records changed."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from executed import executed
from numpy.typing import NDArray
from onnx import TensorProto, helper, numpy_helper

from dpagent import storage
from dpagent.errors import ConfigurationError, DataError, StorageError
from dpagent.learning.data.dataset import ArrayDataset
from dpagent.learning.front_end.features import FeatureSet, FrontEnd, forget_features, require_room, reserve
from dpagent.learning.front_end.transforms import Transform
from dpagent.learning.inference.export.front_end import append_front_end
from dpagent.learning.inference.export.graph import Graph
from dpagent.learning.models.built_ins import built_in
from dpagent.learning.models.forward import forward
from dpagent.learning.models.layers import (
    AveragePool1d,
    AveragePool2d,
    Conv1d,
    Conv2d,
    Dense,
    GroupNorm,
    MaxPool1d,
    MaxPool2d,
    Relu,
    Tanh,
)
from dpagent.learning.models.spec import ModelSpec
from dpagent.learning.models.stages import FrozenNetwork, Projection, RandomLayers, Scattering
from dpagent.learning.onnx_session import quiet_session
from dpagent.protocol.chunks import content_digest

SHAPE = (16, 16, 1)
SPEC = ModelSpec("small", SHAPE, 3, (Dense(3),), 0.3, 0.5, (Scattering(2, 2), Projection(4)))
MATRIX = np.random.default_rng(5).normal(size=(4 * 4 * 9, 4)).astype("<f4")
ASSETS = {"projection": MATRIX.tobytes()}


def records(count: int, seed: int = 0) -> ArrayDataset:
    generator = np.random.default_rng(seed)
    inputs = generator.integers(0, 256, (count, *SHAPE), dtype=np.uint8)
    return ArrayDataset(inputs, np.arange(count) % 3, 3)


def pooling_network(shape: tuple[int, ...] = SHAPE) -> bytes:
    """A network of two nodes: mean over rows, and a scale."""
    nodes = [
        helper.make_node("ReduceMean", ["pixels", "axes"], ["means"], keepdims=0),
        helper.make_node("Mul", ["means", "two"], ["features"]),
    ]
    graph = helper.make_graph(
        nodes, "network",
        [helper.make_tensor_value_info("pixels", TensorProto.FLOAT, ["n", *shape])],
        [helper.make_tensor_value_info("features", TensorProto.FLOAT, ["n", 16, 1])],
        [numpy_helper.from_array(np.array([1]), "axes"), numpy_helper.from_array(np.float32(2), "two")],
    )  # fmt: skip
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 18)], ir_version=9)
    return bytes(model.SerializeToString())


def test_a_record_has_the_same_features_in_any_company() -> None:
    front_end = FrontEnd(SPEC, ASSETS)
    inputs = records(9).inputs
    together = front_end(inputs)
    assert together.shape == (9, 4)
    for order in (np.arange(9)[::-1], np.array([3, 3, 3]), np.array([8])):
        assert front_end(inputs[order]).tobytes() == together[order].tobytes()


def test_a_record_that_is_not_finite_stays_alone() -> None:
    inputs = np.random.default_rng(0).random((3, *SHAPE), np.float32)
    whole = FrontEnd(SPEC, ASSETS)(inputs)
    inputs[1, 2, 3] = np.nan
    broken = FrontEnd(SPEC, ASSETS)(inputs)
    assert np.isnan(broken[1]).all()
    assert broken[[0, 2]].tobytes() == whole[[0, 2]].tobytes()


def test_a_record_that_is_not_finite_is_as_much_work_as_another() -> None:
    """Before, it was none: a round in which a frozen network takes a second for each record was over by so
    much sooner, and a power cut, after which the slots of the next answer tell whether it was over, told
    that a record was there."""
    inputs = np.random.default_rng(0).random((3, *SHAPE), np.float32)
    front_end, seen = FrontEnd(SPEC, ASSETS), []
    front_end._transforms = [
        Transform(each.output_shape, lambda values, each=each: seen.append(values.shape) or each(values))
        for each in front_end._transforms
    ]
    front_end(inputs)
    usual = seen.copy()
    taken = [executed(lambda: front_end(inputs))]
    inputs[1, 2, 3], inputs[2] = np.nan, np.inf
    seen.clear()
    assert np.isnan(front_end(inputs)[1:]).all()
    assert seen == usual
    taken.append(executed(lambda: front_end(inputs)))
    assert taken[1] == taken[0]


def test_offset_and_scale_come_first() -> None:
    inputs = records(2).inputs
    plain = ModelSpec("plain", SHAPE, 3, (Dense(3),), 0.0, 1.0, SPEC.front_end)
    scaled = (inputs / np.float32(255) - np.float32(0.3)) / np.float32(0.5)
    np.testing.assert_allclose(FrontEnd(SPEC, ASSETS)(inputs), FrontEnd(plain, ASSETS)(scaled), rtol=1e-5)


def test_features_are_read_in_any_order_and_kept(tmp_path: Path) -> None:
    front_end = FrontEnd(SPEC, ASSETS)
    data = records(150)
    features = FeatureSet(data, front_end, tmp_path)
    order = np.random.default_rng(0).permutation(150)
    inputs, labels = features.batch(order)
    assert inputs.tobytes() == front_end(data.inputs[order]).tobytes()
    assert np.array_equal(labels, data.labels[order])
    assert (features.shape, features.classes, features.dtype) == ((4,), 3, np.float32)
    features.close()
    (file,) = tmp_path.glob("*.f32")
    assert file.stat().st_mode & 0o777 == 0o600
    assert file.stat().st_size == 150 * 16
    (digests,) = tmp_path.glob("*.index")
    assert digests.stat().st_mode & 0o777 == 0o600


class Counting(FrontEnd):
    """A front end that notes how many records it was given."""

    seen = 0

    def __call__(self, inputs: Any) -> Any:
        self.seen += len(inputs)
        return super().__call__(inputs)


def computed(data: ArrayDataset, directory: Path, assets: dict[str, bytes] | None = None) -> int:
    front_end = Counting(SPEC, assets or ASSETS)
    features = FeatureSet(data, front_end, directory)
    inputs, _ = features.batch(np.arange(len(data)))
    seen = front_end.seen
    assert inputs.tobytes() == front_end(data.inputs).tobytes()
    features.close()
    return seen


def test_only_what_changed_is_computed_again(tmp_path: Path) -> None:
    data = records(200)
    assert computed(data, tmp_path) == 200
    assert computed(data, tmp_path) == 0
    grown = ArrayDataset(np.concatenate([data.inputs, records(30, 1).inputs]), np.arange(230) % 3, 3)
    assert computed(grown, tmp_path) == 30
    changed = ArrayDataset(grown.inputs.copy(), grown.labels, 3)
    changed.inputs[70] ^= 1
    assert computed(changed, tmp_path) == 1
    assert computed(ArrayDataset(changed.inputs[:100], changed.labels[:100], 3), tmp_path) == 0
    assert computed(changed, tmp_path) == 0


class Placed(ArrayDataset):
    """Records that keep their places while others go."""

    kept: NDArray[np.int64]

    @property
    def places(self) -> NDArray[np.int64]:
        return self.kept


def test_a_record_that_goes_costs_no_other_its_features(tmp_path: Path) -> None:
    """Else the time of a round tells that one record is gone, or has come before all others."""
    data = records(200)
    assert computed(data, tmp_path) == 200
    kept = np.delete(np.arange(200), [3, 150])
    fewer = Placed(data.inputs[kept], data.labels[kept], 3)
    fewer.kept = kept
    assert computed(fewer, tmp_path) == 0
    inputs = data.inputs.copy()
    inputs[3] ^= 1
    assert computed(ArrayDataset(inputs, data.labels, 3), tmp_path) == 1


def test_another_front_end_replaces_the_features_of_the_last(tmp_path: Path) -> None:
    data = records(10)
    computed(data, tmp_path)
    assert computed(data, tmp_path, {"projection": (2 * MATRIX).tobytes()}) == 10
    assert len(list(tmp_path.glob("features.*"))) == 2


@pytest.mark.parametrize("damage", ["shorter", "no digests", "rubbish", "list of rubbish"])
def test_a_damaged_file_is_made_again(tmp_path: Path, damage: str) -> None:
    data = records(150)
    computed(data, tmp_path)
    (file,), (digests,) = tmp_path.glob("*.f32"), tmp_path.glob("*.index")
    if damage == "shorter":
        file.write_bytes(file.read_bytes()[: 100 * 16])
    elif damage == "no digests":
        digests.unlink()
    else:
        digests.write_text("[1, 2, 3]" if damage.startswith("list") else "{")
    assert computed(data, tmp_path) > 0


def test_a_disk_that_takes_a_little_at_a_time_gets_all_of_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write = os.pwrite
    monkeypatch.setattr(os, "pwrite", lambda file, data, offset: write(file, data[:100], offset))
    assert computed(records(150), tmp_path) == 150


@pytest.mark.parametrize("survives", [0, 500], ids=["nothing was written", "a part was written"])
def test_rows_that_a_crash_left_behind_are_not_taken_for_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, survives: int
) -> None:
    """The records change, the board dies while it writes, and the records are what they were before."""
    data = records(200)
    computed(data, tmp_path)
    changed = ArrayDataset(data.inputs ^ 1, data.labels, 3)
    write = os.pwrite

    def dies(file: int, rows: bytes, offset: int) -> int:
        if offset and Path(f"/proc/self/fd/{file}").readlink().suffix == ".f32":
            write(file, rows[:survives], offset)
            raise KeyboardInterrupt
        return write(file, rows, offset)

    # The second time, what lies before the change is kept.
    for same in (0, 64):
        changed.inputs[:same] = data.inputs[:same]
        with monkeypatch.context() as patch:
            patch.setattr(os, "pwrite", dies)
            with pytest.raises(KeyboardInterrupt):
                computed(changed, tmp_path)
        assert computed(data, tmp_path) == 200 - same


def test_features_that_would_fill_the_disk_are_not_begun(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    free = os.statvfs(tmp_path).f_bavail * os.statvfs(tmp_path).f_frsize
    data = records(200)
    with monkeypatch.context() as patch:
        patch.setattr(storage, "SPACE_LEFT", 2 * free)
        with pytest.raises(StorageError, match=r"features\.f32: features take 3,200 bytes more, .*state_dir"):
            computed(data, tmp_path)
        assert not [*tmp_path.glob("features.*")]
    computed(data, tmp_path)
    monkeypatch.setattr(storage, "SPACE_LEFT", 2 * free)
    # What is there already takes no room.
    assert computed(data, tmp_path) == 0


def test_a_file_cut_short_while_in_use_is_said(tmp_path: Path) -> None:
    features = FeatureSet(records(10), FrontEnd(SPEC, ASSETS), tmp_path)
    (file,) = tmp_path.glob("*.f32")
    file.write_bytes(file.read_bytes()[:100])
    with pytest.raises(StorageError, match=r"\.f32 was cut short while in use"):
        features.batch(np.arange(10))
    features.close()


def test_records_of_another_shape_are_refused(tmp_path: Path) -> None:
    other = ArrayDataset(np.zeros((2, 8, 8, 1), np.uint8), np.zeros(2, np.int64), 3)
    with pytest.raises(DataError, match=r"shape \(8, 8, 1\); the front end expects \(16, 16, 1\)"):
        FeatureSet(other, FrontEnd(SPEC, ASSETS), tmp_path)


def exported(spec: ModelSpec, assets: dict[str, bytes]) -> Any:
    graph = Graph()
    graph.add("Identity", append_front_end(graph, spec, assets, "input"), name="features")
    model = graph.model("front_end", {"input": spec.input_shape}, {"features": spec.feature_shape}, {})
    session = quiet_session(model)
    return lambda inputs: session.run(None, {"input": inputs})[0]


NETWORK = pooling_network()
FROZEN = ModelSpec(
    "frozen", SHAPE, 3, (Dense(3),), front_end=(FrozenNetwork(content_digest(NETWORK).hex(), (16, 1)),)
)
COLOUR = ModelSpec("colour", (17, 20, 3), 3, (Dense(3),), front_end=(Scattering(2, 3),))
PLAIN = ModelSpec("plain", SHAPE, 3, (Dense(3),), front_end=SPEC.front_end)
RANDOM = ModelSpec(
    "random", SHAPE, 3, (Dense(3),), 0.0, 1.0,
    (
        RandomLayers((Conv2d(6, 3, 2, 1), GroupNorm(2), Tanh(), MaxPool2d(2, 1)), seed=3),
        RandomLayers((Conv2d(4, 2), Relu(), AveragePool2d(2, 2)), seed=4),
    ),
)  # fmt: skip
SERIES = ModelSpec(
    "series", (20, 3), 3, (Dense(3),),
    front_end=(RandomLayers((Conv1d(5, 3, 1, 1), MaxPool1d(2, 2), AveragePool1d(2, 1), Dense(7))),),
)  # fmt: skip
CASES = [
    (RANDOM, {}),
    (SERIES, {}),
    (PLAIN, ASSETS),
    (FROZEN, {"frozen-network": NETWORK}),
    (COLOUR, {}),
    (built_in("scattering"), {}),
]


@pytest.mark.parametrize(("spec", "assets"), CASES, ids=[spec.name for spec, _ in CASES])
def test_the_exported_nodes_compute_the_same(spec: ModelSpec, assets: dict[str, bytes]) -> None:
    inputs = np.random.default_rng(0).random((5, *spec.input_shape), np.float32)
    ours, theirs = FrontEnd(spec, assets)(inputs), exported(spec, assets)(inputs)
    assert theirs.shape == ours.shape
    np.testing.assert_allclose(theirs, ours, atol=2e-6 * np.abs(ours).max())


@pytest.mark.parametrize("spec", [RANDOM, SERIES], ids=["images", "series"])
def test_random_layers_are_those_of_a_model_with_the_seeds_weights(spec: ModelSpec) -> None:
    """Against the definition in float64, a stage at a time."""
    inputs = np.random.default_rng(2).random((3, *spec.input_shape), np.float32)
    found = FrontEnd(spec)(inputs)
    for record, features in zip(inputs, found, strict=True):
        values = (record.astype(np.float64) - spec.input_offset) / spec.input_scale
        shape = spec.input_shape
        for stage in spec.front_end:
            assert isinstance(stage, RandomLayers)
            model = ModelSpec("stage", shape, 2, (*stage.layers, Dense(2)))
            weights = model.initial_weights(stage.seed).astype(np.float64)
            values = forward(model.nodes[:-1], weights, values)
            shape = model.nodes[-1].input_shape
        np.testing.assert_allclose(features, values, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(
    ("spec", "assets", "text"),
    [
        (SPEC, {}, "stage 1 projection: its projection is missing"),
        (SPEC, {"projection": bytes(8)}, "its matrix has 8 bytes; expected 2304"),
        (SPEC, {"projection": MATRIX.tobytes()[:-4] + b"\0\0\xc0\x7f"}, "not finite"),
        (FROZEN, {"frozen-network": NETWORK + b"x"}, "not the one that the model names"),
    ],
)
def test_an_asset_that_does_not_fit_is_refused(spec: ModelSpec, assets: dict[str, bytes], text: str) -> None:
    with pytest.raises(ConfigurationError, match=text):
        FrontEnd(spec, assets)


@pytest.mark.parametrize(
    ("network", "shape", "text"),
    [
        (b"rubbish", (16, 1), "cannot be loaded"),
        (NETWORK, (16,), r"makes \(16, 1\) of a record; the model says \(16,\)"),
        (pooling_network((8, 16, 1)), (16, 1), "cannot be run"),
    ],
)
def test_a_network_that_does_not_fit_is_named(network: bytes, shape: tuple[int, ...], text: str) -> None:
    stage = FrozenNetwork(content_digest(network).hex(), shape)
    spec = ModelSpec("frozen", SHAPE, 3, (Dense(3),), front_end=(stage,))
    with pytest.raises(ConfigurationError, match=f"stage 0 onnx: its network .*{text}|{text}"):
        FrontEnd(spec, {"frozen-network": network})


def test_digests_are_of_what_the_features_were_made_from(tmp_path: Path) -> None:
    computed(records(130), tmp_path)
    (file,) = tmp_path.glob("*.index")
    content = file.read_bytes()
    head, digests = json.loads(content[:4096]), content[4096 : 4096 + 130 * 16]
    assert head["row_bytes"] == 16
    assert len({digests[start : start + 16] for start in range(0, len(digests), 16)}) == 130


def test_room_for_features_is_judged_by_public_numbers_alone() -> None:
    scattering = built_in("scattering")
    require_room(built_in("digits"), 1 << 20, 0)
    require_room(scattering, 2_000, 31)
    with pytest.raises(
        ConfigurationError, match=r"2,048 records .*scattering take 32 MiB; .*is 31\. Set it to"
    ):
        require_room(scattering, 2_048, 31)


def test_features_live_in_the_room_that_was_reserved(disk: Path) -> None:
    reserve(disk, 1 << 20, 200)
    file = disk / "features.f32"
    assert file.stat().st_blocks * 512 >= 1 << 20
    data = records(150)
    assert computed(data, disk) == 150
    reserve(disk, 1 << 20, 200)
    assert (computed(data, disk), file.stat().st_size) == (0, 1 << 20)
    # What was cut off is zeros afterwards, and no features of any record.
    reserve(disk, 64 * 16, 200)
    reserve(disk, 1 << 20, 200)
    assert computed(data, disk) == 150 - 64
    file.unlink()
    reserve(disk, 1 << 20, 200)
    assert computed(data, disk) == 150
    reserve(disk, 0, 200)
    assert not list(disk.iterdir())


@pytest.mark.parametrize("survives", [0, 1, 100, 1 << 20])
@pytest.mark.parametrize("after", range(6))
def test_digests_that_a_crash_left_behind_are_those_of_the_rows(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, after: int, survives: int
) -> None:
    """At each of the writes of the file that tells of the rows, before the rows are overwritten and after."""
    data, changed = records(6), records(8, seed=1)
    computed(data, tmp_path)
    write, left = os.pwrite, [after]

    def dies(file: int, content: bytes, offset: int) -> int:
        if Path(f"/proc/self/fd/{file}").readlink().suffix == ".index":
            if not left[0]:
                write(file, content[:survives], offset)
                raise KeyboardInterrupt
            left[0] -= 1
        return write(file, content, offset)

    with monkeypatch.context() as patch:
        patch.setattr(os, "pwrite", dies)
        with pytest.raises(KeyboardInterrupt):
            computed(changed, tmp_path)
    front_end = FrontEnd(SPEC, ASSETS)
    for each in (data, changed):
        features = FeatureSet(each, front_end, tmp_path)
        np.testing.assert_array_equal(features.batch(np.arange(len(each)))[0], front_end(each.inputs))
        features.close()


def test_a_new_record_takes_no_room_of_the_disk(disk: Path) -> None:
    """Otherwise, on a full disk, the one record that is new decides whether the round counts any."""
    reserve(disk, 1 << 20, 200)
    assert computed(records(150), disk) == 150

    def taken() -> dict[str, tuple[int, int]]:
        return {file.name: (file.stat().st_ino, file.stat().st_blocks) for file in disk.iterdir()}

    before = taken()
    assert computed(records(200, seed=1), disk) == 200
    assert taken() == before


def test_a_record_that_a_front_end_fails_with_is_tried_once_and_so_are_the_others(tmp_path: Path) -> None:
    """Otherwise features took twice as long with such a record, where half as much again is allowed for."""
    tried: list[int] = []

    class Failing(FrontEnd):
        def __call__(self, inputs: NDArray[Any]) -> NDArray[np.float32]:
            tried.append(len(inputs))
            if (inputs == 7).all(axis=(1, 2, 3)).any():
                raise RuntimeError("no features")
            return super().__call__(inputs)

    data = records(4)
    data.inputs[3] = 7
    features = FeatureSet(data, Failing(SPEC, ASSETS), tmp_path)
    assert sum(tried) == 4
    assert features.unusable == 1
    assert np.isnan(features.batch(np.array([3]))[0]).all()
    assert np.isfinite(features.batch(np.arange(3))[0]).all()
    forget_features(tmp_path)
    assert FeatureSet(data, FrontEnd(SPEC, ASSETS), tmp_path).computed == 0, "what is new alone"
    forget_features(tmp_path, all_of_them=True)
    again = FeatureSet(data, FrontEnd(SPEC, ASSETS), tmp_path)
    assert (again.computed, again.unusable) == (4, 0)
