"""The worked example of a format: two names register it, and it is known wherever data are read."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from examples.jsonl_format import JsonlFormat, JsonlSettings
from exported_models import write_model

from dpagent.configuration import load_settings
from dpagent.errors import ConfigurationError, DataError
from dpagent.learning.data.checking import examine
from dpagent.learning.data.opening import declare, list_declared, open_dataset, open_declared, recognise
from dpagent.learning.data.registry import FORMATS
from dpagent.learning.data.sections import SECTIONS
from dpagent.learning.data.settings import DatasetSettings, with_formats
from dpagent.learning.inference.prediction.exported_model import ExportedModel
from dpagent.learning.inference.prediction.reader import InputReader

LINES = """\
{"inputs": [1, 2], "label": "sit"}
{"inputs": [1, 2, 3], "label": "sit"}
no JSON at all
{"inputs": [3, 4], "label": "fly"}
{"inputs": [5, 6], "label": "run"}
"""


@pytest.fixture(autouse=True)
def _registered(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(FORMATS, "jsonl", JsonlFormat())
    monkeypatch.setitem(SECTIONS, "jsonl", JsonlSettings)


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "walks.jsonl"
    path.write_text(LINES)
    return path


def settings(file: Path, text: str = "jsonl: {width: 2}") -> DatasetSettings:
    """Read from YAML by the schema as it is with the format, which is made once when a program starts."""
    yaml = file.with_name("data.yaml")
    yaml.write_text(f"path: {file}\nclasses: [run, sit]\n{text}\n")
    return load_settings(yaml, with_formats(DatasetSettings))


def test_it_is_recognised_and_opened_and_a_bad_line_costs_itself_alone(file: Path) -> None:
    assert recognise(file) == "jsonl"
    data = open_dataset(settings(file))
    assert (data.labels.tolist(), data.origin.kind) == ([1, 0], "jsonl")
    assert data.batch(np.array([1]))[0].tolist() == [[5, 6]]
    assert [sentence.partition(": ")[0] for sentence in data.origin.left_out] == [
        f"{file}:{line}" for line in (2, 3, 4)
    ]
    findings = examine(data)
    assert (findings.records, findings.classes) == (2, (("run", 1), ("sit", 1)))


def test_its_settings_are_checked_with_line_and_key(file: Path) -> None:
    assert settings(file, "kind: jsonl\njsonl: {width: 2}").kind == "jsonl"
    for text, problem in (
        ("jsonl: {width: 0}", "data.yaml:3: jsonl.width: got 0"),
        ("jsonl: {w: 1}", "width, "),
    ):
        with pytest.raises(ConfigurationError, match=problem):
            settings(file, text)
    with pytest.raises(ConfigurationError, match=r"not declared: max_records, jsonl\.width are missing"):
        open_declared(settings(file, "kind: jsonl"))
    assert open_dataset(settings(file, "")).shape == (2,)
    table = file.with_name("x.csv")
    table.write_text("x,label\n1,run\n2,sit\n")
    with pytest.raises(ConfigurationError, match=r"`jsonl\.width` is set, and .* is taken for csv"):
        open_dataset(settings(table))


def test_what_no_format_recognises_is_told_of_it(file: Path) -> None:
    with pytest.raises(DataError, match=r"Give the path of the file: .*walks\.jsonl"):
        recognise(file.parent)
    (file.parent / "x.txt").write_text("?")
    with pytest.raises(DataError, match="or a file of JSON lines"):
        recognise(file.parent / "x.txt")


def test_it_grows_and_shrinks_between_rounds(file: Path) -> None:
    declared, _ = declare(settings(file))
    before = list_declared(declared, growing=False).stamps(b"key").tolist()
    with file.open("a") as stream:
        stream.write('{"inputs": [7, 8], "label": "sit"}\n' * 2)
    now = list_declared(declared, growing=True)
    assert now.labels.tolist() == [1, 0, 1, 1]
    stamps = now.stamps(b"key").tolist()
    assert stamps[:2] == before  # known again by what they hold
    assert len(set(stamps)) == 4  # and equal ones are told apart
    assert "record 2" in now.place_of(2)


def test_a_model_is_asked_about_lines_with_and_without_labels(file: Path, tmp_path: Path) -> None:
    model = ExportedModel(write_model(tmp_path / "model.onnx", (2,), 2, ["run", "sit"]))
    said: list[str] = []
    labelled = list(InputReader(model, settings(file), said.append).read(file))
    assert [one.label for one in labelled] == [1, 0]
    assert len(said) == 3
    file.write_text('{"inputs": [1, 2]}\n{"inputs": "?"}\n{"inputs": [3, 4]}\n')
    first, second, third = InputReader(model, settings(file), said.append).read(file)
    assert first.values is not None
    assert third.values is not None
    assert (first.values.tolist(), third.values.tolist()) == ([1, 2], [3, 4])
    assert "no record" in second.problem
    assert {one.label for one in (first, second, third)} == {None}
