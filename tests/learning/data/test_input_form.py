"""What the inputs of a model are: written, read back whoever wrote it, and compared."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from dpagent.errors import ConfigurationError, DataError
from dpagent.learning.data.input_form import InputForm
from dpagent.learning.data.settings import DatasetSettings
from dpagent.schema.problems import SchemaError

WALKS = {"features": ["ax", "ay"], "offset": {"ay": 9.81}, "scale": 10.0, "window": 64}


def form_of(csv: dict[str, Any]) -> InputForm:
    return InputForm.checked({"csv": csv})


def data(**csv: Any) -> DatasetSettings:
    return DatasetSettings.checked({"path": Path("x"), "kind": "csv", "csv": csv})


def test_what_is_written_is_read_back() -> None:
    form = InputForm.checked({"csv": WALKS, "images": {"size": [8, 4], "mode": "rgb"}})
    assert InputForm.parse(form.text()) == form
    assert json.loads(form.text())["csv"]["offset"] == {"ay": 9.81}


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("", "expected a JSON object"),
        ("[1]", "expected a JSON object"),
        ("[" * 100_000, "expected a JSON object"),
        ("{}", "of no version; expected version 1"),
        ('{"version": 2}', "of version 2; expected version 1. Update dpagent"),
        (f'{{"version": {"9" * 4_000}}}', f"of version {'9' * 20}; expected"),
        (f'{{"version": {"[" * 500}{"]" * 500}}}', "of no version; expected"),
        ('{"version": 1, "csv": {"features": []}}', "csv.features"),
        ('{"version": 1, "csv": {"features": ["a", "a"]}}', "stands in"),
        ('{"version": 1, "csv": {"features": ["a"], "scale": 0}}', "expected numbers above 0"),
        ('{"version": 1, "csv": {"features": ["a"], "scale": NaN}}', "csv.scale"),
        ('{"version": 1, "csv": {"features": ["a"], "offset": {"b": 1}}}', "no input"),
        ('{"version": 1, "csv": {"features": ["a"], "window": 1e9}}', "csv.window"),
        ('{"version": 1, "csv": {"features": ["a"], "window": 99999999}}', "csv.window"),
        ('{"version": 1, "csv": {"features": ["a"], "delimiter": ";"}}', "csv.delimiter"),
        ('{"version": 1, "images": {"size": [4096, 99999]}}', "images.size"),
        ('{"version": 1, "shell": {}}', "shell"),
        ('{"version": 1, "csv": ' + " " * (4 << 20) + "{}}", "expected at most 4,194,304"),
    ],
)
def test_metadata_of_anyone_are_read_or_refused_in_a_sentence(text: str, said: str) -> None:
    with pytest.raises(DataError) as caught:
        InputForm.parse(text)
    assert said in str(caught.value).replace("`", "")
    assert len(str(caught.value)) < 1_000


def test_a_form_fits_a_model_or_says_why_not() -> None:
    form = form_of(WALKS)
    assert form.misfit((64, 2)) == form.misfit((8, 16, 1)) == ""
    assert "(64, 2), and the model takes (64, 3)" in form.misfit((64, 3))
    assert "does not settle" in form_of({"scale": 2}).misfit((4,))
    assert "does not settle" in InputForm.checked({"images": {"size": [8, 8]}}).misfit((8, 8, 1))
    assert InputForm().misfit((4,)) == ""


def test_a_form_is_that_of_data_as_declared() -> None:
    declared = data(**WALKS, label="activity", group="person", delimiter=";")
    assert InputForm.of(declared) == form_of(WALKS)
    assert InputForm.of(DatasetSettings(path=Path("x"), kind="npz", shape=[4])) is None


@pytest.mark.parametrize(
    "csv",
    [
        WALKS,
        WALKS | {"scale": {"ax": 10, "ay": 10}},
        WALKS | {"offset": {"ax": 0.0, "ay": 9.81}, "stride": 3},
    ],
)
def test_what_means_the_same_is_no_difference(csv: dict[str, Any]) -> None:
    assert form_of(WALKS).differences(form_of(csv)) == form_of(csv).differences(form_of(WALKS)) == []
    form_of(WALKS).require_same(data(**csv), "walks")


@pytest.mark.parametrize(
    ("key", "value"),
    [("features", ["ay", "ax"]), ("offset", 0.0), ("scale", {"ay": 10.0}), ("window", 32), ("window", None)],
)
def test_what_makes_other_records_is_named(key: str, value: Any) -> None:
    other = form_of(WALKS | {key: value})
    assert form_of(WALKS).differences(other) == [(f"csv.{key}", WALKS[key], value)]
    with pytest.raises(ConfigurationError, match=f"csv.{key}"):
        form_of(WALKS).require_same(data(**WALKS | {key: value}), "walks")


def test_forms_of_different_formats_say_nothing_of_each_other() -> None:
    pictures = InputForm.checked({"images": {"size": [8, 8], "mode": "rgb"}})
    assert form_of(WALKS).differences(pictures) == []
    pictures.require_same(data(**WALKS), "pictures")


def test_a_file_keeps_its_own_settings_and_gets_the_rest_of_the_model() -> None:
    whole = form_of(WALKS).completed(data(delimiter=";", label="activity"), "csv", (64, 2))
    section = whole.as_dict()["csv"]
    assert section == section | WALKS | {"delimiter": ";", "label": "activity", "group": None}
    assert whole.shape == [64, 2]
    other = DatasetSettings(path=Path("x"), kind="npz")
    assert form_of(WALKS).completed(other, "npz", (64, 2)) is other


def test_a_section_of_a_fleet_file_is_as_strict_as_the_section_of_data() -> None:
    for wrong in ({"features": []}, {"window": 0}, {"label": "x"}, {"scale": -1}):
        with pytest.raises(SchemaError):
            form_of({"features": ["a"]} | wrong)
