"""Metadata and weights of model files without the onnx package, against it, and in files of anyone."""

from __future__ import annotations

import numpy as np
import onnx
import pytest
from exported_models import linear
from hypothesis import given
from hypothesis import strategies as st
from learning.small_models import SPECS, records
from onnx import helper

from dpagent.errors import DataError
from dpagent.learning.inference.export.model import export_onnx
from dpagent.learning.inference.model_bytes import metadata_of, weights_of, with_metadata, with_weights
from dpagent.learning.models.built_ins import BUILT_IN
from dpagent.learning.models.spec import ModelSpec

EVERY = [*SPECS, *BUILT_IN.values()]
"""Every layer, and every front end whose stages need no file."""
SPEC, WEIGHTS = linear((3,), 2)
PLAIN = onnx.load_from_string(export_onnx(SPEC, WEIGHTS, metadata={}))


@given(st.dictionaries(st.text(), st.text()))
def test_metadata_are_what_the_onnx_package_wrote(entries: dict[str, str]) -> None:
    model = onnx.ModelProto()
    model.CopyFrom(PLAIN)
    helper.set_model_props(model, entries)
    assert metadata_of(model.SerializeToString()) == entries


@given(st.binary(max_size=200), st.integers(0, 1_000))
def test_bytes_of_anyone_are_read_or_refused(data: bytes, place: int) -> None:
    good = export_onnx(SPEC, WEIGHTS, metadata={"a": "b"})
    for hostile in (data, good[:place] + data + good[place:], good[: place % len(good)]):
        try:
            metadata_of(hostile)
        except DataError:
            continue


@pytest.mark.parametrize("spec", EVERY, ids=lambda spec: spec.name)
def test_weights_are_those_that_were_exported_and_others_take_their_place(spec: ModelSpec) -> None:
    first, second = (records(spec.head, seed)[0] for seed in (1, 2))
    file = export_onnx(spec, first, metadata={"a": "b"})
    np.testing.assert_array_equal(weights_of(file, spec), first)
    assert with_weights(file, spec, second) == export_onnx(spec, second, metadata={"a": "b"})


def test_other_metadata_take_the_place_of_all() -> None:
    before, after = {"a": "b", "dpagent.privacy": "ε"}, {"c": "d" * 300, "dpagent.privacy": "none"}
    file = export_onnx(SPEC, WEIGHTS, metadata=before)
    assert with_metadata(file, after) == export_onnx(SPEC, WEIGHTS, metadata=after)


@given(st.binary(max_size=200), st.integers(0, 1_000))
def test_weights_in_bytes_of_anyone_are_read_or_refused(data: bytes, place: int) -> None:
    good = export_onnx(SPEC, WEIGHTS, metadata={})
    for hostile in (data, good[:place] + data + good[place:], good[: place % len(good)]):
        try:
            found = weights_of(hostile, SPEC)
        except DataError:
            continue
        assert found.shape == WEIGHTS.shape
        assert len(with_weights(hostile, SPEC, WEIGHTS)) == len(hostile)


def test_weights_of_another_architecture_are_refused() -> None:
    other = linear((4,), 2)[0]
    with pytest.raises(DataError, match=r"no weights '0.dense.weight' of shape \(4, 2\)"):
        weights_of(export_onnx(SPEC, WEIGHTS, metadata={}), other)


def test_many_entries_and_no_text_are_refused() -> None:
    with pytest.raises(DataError, match="UTF-8"):
        metadata_of(b"\x72\x03\x0a\x01\xff")
    model = onnx.ModelProto()
    helper.set_model_props(model, {str(number): "" for number in range(1_025)})
    with pytest.raises(DataError, match="more than 1,024"):
        metadata_of(model.SerializeToString())
