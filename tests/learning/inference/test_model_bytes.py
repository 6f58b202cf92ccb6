"""Metadata of model files without the onnx package, against that package, and in files of anyone."""

from __future__ import annotations

import onnx
import pytest
from exported_models import linear
from hypothesis import given
from hypothesis import strategies as st
from onnx import helper

from dpagent.errors import DataError
from dpagent.learning.inference.export.model import export_onnx
from dpagent.learning.inference.model_bytes import metadata_of

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


def test_many_entries_and_no_text_are_refused() -> None:
    with pytest.raises(DataError, match="UTF-8"):
        metadata_of(b"\x72\x03\x0a\x01\xff")
    model = onnx.ModelProto()
    helper.set_model_props(model, {str(number): "" for number in range(1_025)})
    with pytest.raises(DataError, match="more than 1,024"):
        metadata_of(model.SerializeToString())
