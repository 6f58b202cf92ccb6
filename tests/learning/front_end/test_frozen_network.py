"""Frozen networks on a device: the bytes alone, and a record that fails stays alone."""

from __future__ import annotations

import hashlib
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from frozen_networks import VALUES, choosy, network, node, of_a_file, selective, tanh

from dpagent.errors import ConfigurationError, DataError
from dpagent.learning.data.dataset import DIGEST_BYTES, ArrayDataset
from dpagent.learning.data.derived import Unfailing
from dpagent.learning.front_end.features import FeatureSet, FrontEnd
from dpagent.learning.models.layers import Dense, GroupNorm, MaxPool2d, Relu, Tanh
from dpagent.learning.models.spec import ModelSpec
from dpagent.learning.models.stages import FrozenNetwork, Projection, RandomLayers, Scattering

PLAIN = np.array([[0, 1, 2, 3], [3, 3, 3, 3], [1, 0, 1, 0], [2, 2, 0, 1]], np.float32)


def model_of(data: bytes, *after: Projection) -> ModelSpec:
    stage = FrozenNetwork(hashlib.sha256(data).hexdigest(), (VALUES,))
    return ModelSpec("frozen", (VALUES,), 2, (Dense(2),), front_end=(stage, *after))


def front_end(data: bytes) -> FrontEnd:
    return FrontEnd(model_of(data), {"frozen-network": data})


@pytest.mark.parametrize("location", ["private.bin", "../private.bin", "sub/private.bin", "ABSOLUTE"])
def test_a_network_gets_nothing_from_the_disk(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, location: str
) -> None:
    """Though the file lies where ONNX Runtime would look for it, and holds what is asked for."""
    here = tmp_path / "device"
    (here / "sub").mkdir(parents=True)
    for place in (here, here / "sub", tmp_path):
        np.eye(VALUES, dtype=np.float32).tofile(place / "private.bin")
    monkeypatch.chdir(here)
    data = of_a_file(str(here / "private.bin") if location == "ABSOLUTE" else location)
    with pytest.raises(ConfigurationError, match="stage 0 onnx: its network cannot be loaded"):
        front_end(data)


@pytest.mark.parametrize(
    ("data", "bad"),
    [(choosy(), [9, 0, 0, 0]), (choosy(), [0, np.nan, 0, 0]), (selective(), [-5, 1, 1, 1])],
    ids=["look-up", "undefined look-up", "shape"],
)
def test_a_record_that_a_network_fails_on_has_no_finite_features(data: bytes, bad: list[float]) -> None:
    """Real ONNX Runtime: an index out of range is an error, a dropped value another shape."""
    features = front_end(data)
    alone = features(PLAIN)
    assert np.isfinite(alone).all()
    for place in range(len(PLAIN) + 1):
        found = features(np.insert(PLAIN, place, np.array(bad, np.float32), axis=0))
        assert np.isnan(found[place]).all()
        assert np.delete(found, place, axis=0).tobytes() == alone.tobytes()


def test_what_comes_after_a_failure_is_not_finite_either() -> None:
    data, matrix = choosy(), np.ones((VALUES, 2), "<f4")
    assets = {"frozen-network": data, "projection": matrix.tobytes()}
    found = FrontEnd(model_of(data, Projection(2)), assets)(np.array([[0, 1, 2, 3], [7, 0, 0, 0]]))
    assert found[0].tolist() == [15, 15]
    assert np.isnan(found[1]).all()


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
def test_a_record_that_is_not_finite_cannot_be_made_so(value: float) -> None:
    data = network(
        [node("IsNaN", "x", "bad"), node("Where", "bad zero x", "w"), node("Clip", "w zero one", "y")],
        constants={"zero": np.float32(0), "one": np.float32(1)},
    )
    found = front_end(data)(np.array([[0, 1, 0, 1], [0, 1, value, 1]], np.float32))
    assert found[0].tolist() == [0, 1, 0, 1]
    assert np.isnan(found[1]).all()


def test_a_record_that_cannot_be_read_has_no_finite_features_and_others_are_as_ever(tmp_path: Path) -> None:
    class Broken(ArrayDataset):
        def _read(self, indices: Any) -> Any:
            if 70 in indices:
                raise DataError("record 70 is damaged")
            return super()._read(indices)

        def digests(self) -> Any:
            """As of rows, which read no record for them."""
            return np.ones((len(self), DIGEST_BYTES), np.uint8)

    inputs = np.random.default_rng(0).integers(0, 256, (150, VALUES), dtype=np.uint8)
    labels, said = np.zeros(150, np.int64), list[str]()
    features = FeatureSet(Unfailing(Broken(inputs, labels, 2), said.append), front_end(tanh()), tmp_path)
    found, _ = features.batch(np.arange(150))
    features.close()
    assert (set(said), features.unusable) == ({"record 70 is damaged"}, 1)
    assert np.isnan(found[70]).all()
    whole = front_end(tanh())(inputs)
    assert np.delete(found, 70, axis=0).tobytes() == np.delete(whole, 70, axis=0).tobytes()


def test_such_records_are_counted_for_the_owner(tmp_path: Path) -> None:
    inputs = np.concatenate([PLAIN, [[4, 0, 0, 0], [0, 0, 0, -9]]]).astype(np.float32)
    data = ArrayDataset(inputs, np.zeros(6, np.int64), 2)
    features = FeatureSet(data, front_end(choosy()), tmp_path)
    assert features.unusable == 2
    features.close()


def test_a_network_that_fails_on_all_records_is_refused_at_once() -> None:
    """On a made-up record, so nothing of the device's decides."""
    data = network(
        [node("Sub", "x four", "s"), node("Cast", "s", "i", to=7), node("Gather", "table i", "y")],
        constants={"four": np.float32(9), "table": np.ones(4, np.float32)},
    )
    with pytest.raises(ConfigurationError, match="stage 0 onnx: its network cannot be run"):
        front_end(data)


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf, 3e38, -3e38, 1e-45, 0.0])
def test_no_record_makes_another_stage_fail_or_touch_others(value: float) -> None:
    matrix = np.random.default_rng(5).normal(size=(2 * 2 * 9 * 2, 4)).astype("<f4")
    stages = (
        Scattering(2, 2),
        RandomLayers((GroupNorm(3), Relu(), MaxPool2d(2, 1), Tanh())),
        RandomLayers((Dense(72),), seed=4),
        Projection(4),
    )
    spec = ModelSpec("all", (16, 16, 1), 3, (Dense(3),), 0.3, 0.5, stages)
    features = FrontEnd(spec, {"projection": matrix.tobytes()})
    inputs = np.random.default_rng(0).random((3, *spec.input_shape), np.float32)
    whole = features(inputs)
    inputs[1] = value
    one, _, three = features(inputs)
    assert (one.tobytes(), three.tobytes()) == (whole[0].tobytes(), whole[2].tobytes())
    inputs[1] = whole[0].mean()
    inputs[1, 3, 4] = value
    one, _, three = features(inputs)
    assert (one.tobytes(), three.tobytes()) == (whole[0].tobytes(), whole[2].tobytes())


def test_without_onnx_runtime_a_network_is_refused_with_the_packages_name() -> None:
    """In a process where it cannot be imported, as on a 32-bit board."""
    data = tanh()
    program = f"""
import hashlib, sys
sys.modules["onnxruntime"] = None
from dpagent.errors import ConfigurationError, DataError
from dpagent.learning.models.layers import Dense
from dpagent.learning.models.spec import ModelSpec
from dpagent.learning.front_end.features import FrontEnd
from dpagent.learning.models.stages import FrozenNetwork
data = bytes.fromhex({data.hex()!r})
stage = FrozenNetwork(hashlib.sha256(data).hexdigest(), (4,))
spec = ModelSpec("frozen", (4,), 2, (Dense(2),), front_end=(stage,))
try:
    FrontEnd(spec, {{"frozen-network": data}})
except ConfigurationError as error:
    print(error)
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert "networks are run with the package onnxruntime, which cannot be used here" in done.stdout
