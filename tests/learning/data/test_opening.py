"""What a path is taken for, what settings may say, and that no file, however odd, ends in a traceback."""

from __future__ import annotations

import os
import re
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml
from formats import two_records
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from pictures import encoded, folder_of, noise, write, zip_of

from dpagent.configuration import load_settings
from dpagent.errors import ConfigurationError, DataError, DpagentError
from dpagent.learning.data.opening import fitted, has_test_half, open_dataset, recognise, section_of
from dpagent.learning.data.registry import FORMATS
from dpagent.learning.data.settings import DatasetSettings
from dpagent.schema.problems import SchemaError


def test_the_page_lists_every_format() -> None:
    page = (Path(__file__).parents[3] / "docs" / "data.md").read_text()
    rows = re.findall(r"^\| `(\w+)` \|", page.partition("## Formats")[2].partition("\n## ")[0], re.MULTILINE)
    assert rows == list(FORMATS)


@pytest.mark.parametrize("kind", FORMATS)
def test_every_kind_is_recognised_and_opened(tmp_path: Path, kind: str) -> None:
    path = two_records(kind, tmp_path / "data")
    assert recognise(path) == kind
    data = open_dataset(DatasetSettings(path=path))
    assert (len(data), data.labels.tolist(), data.origin.kind) == (2, [0, 1], kind)
    assert "(recognised)" in data.origin.source
    told = open_dataset(DatasetSettings(path=path, kind=kind))
    assert (told.shape, told.classes) == (data.shape, data.classes)
    assert "(recognised)" not in told.origin.source


def test_single_files_and_archives_are_recognised(tmp_path: Path) -> None:
    assert recognise(two_records("csv", tmp_path / "c") / "x.csv") == "csv"
    assert recognise(two_records("cifar", tmp_path / "b") / "data_batch_1.bin") == "cifar"
    assert recognise(zip_of(tmp_path / "photos.zip", {"a/1.png": encoded(noise(1))})) == "images"
    two_records("npz", tmp_path / "n").rename(tmp_path / "renamed.zip")
    assert recognise(tmp_path / "renamed.zip") == "npz"
    folder_of(tmp_path / "halves", "train/a/1.png", "test/a/2.png")
    assert recognise(tmp_path / "halves") == "images"


def test_what_is_unknown_or_ambiguous_says_what_to_do(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="There is no file or directory"):
        recognise(tmp_path / "missing")
    with pytest.raises(DataError, match="is an empty folder; expected an NPZ file, a folder of IDX files"):
        recognise(tmp_path)
    write(tmp_path / "notes.txt", b"?")
    with pytest.raises(DataError, match="is of no known format; expected an NPZ file, a folder of IDX files"):
        recognise(tmp_path)
    for name in ("a.png", "b.png"):
        write(tmp_path / "loose" / name, encoded(noise(1)))
    with pytest.raises(DataError, match=r"holds 2 pictures, and none .* such as .*loose/CLASS/a\.png"):
        recognise(tmp_path / "loose")
    with pytest.raises(DataError, match="is a single picture"):
        recognise(tmp_path / "loose" / "a.png")
    (tmp_path / "notes.txt").unlink()
    shutil.rmtree(tmp_path / "loose")
    two_records("npz", tmp_path)
    with pytest.raises(DataError, match=r"Give the path of the file: .*data\.npz\?"):
        recognise(tmp_path)
    with pytest.raises(DataError, match="Unpack it first"):
        recognise(write(tmp_path / "x.tar.gz", b"?"))
    two_records("images", tmp_path)
    two_records("csv", tmp_path)
    with pytest.raises(DataError, match=r"could be images or csv\. Set `kind`"):
        recognise(tmp_path)
    path = two_records("idx", tmp_path / "idx") / "train-labels-idx1-ubyte"
    with pytest.raises(DataError, match="path of the folder that holds the IDX files"):
        recognise(path)
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(DataError, match="neither a file nor a directory"):
        recognise(tmp_path / "pipe")
    (tmp_path / "loop").symlink_to("loop")
    with pytest.raises(DataError, match=r"Cannot read .*loop|no file or directory .*loop"):
        recognise(tmp_path / "loop")


def test_a_section_that_does_not_go_with_the_data_is_told(tmp_path: Path) -> None:
    path = two_records("images", tmp_path / "data")
    with pytest.raises(ConfigurationError, match=r"`csv.label` is set, and .* is taken for images"):
        open_dataset(DatasetSettings.checked({"path": path, "csv": {"label": "x"}}))


def test_shape_classes_and_sections_reach_the_data(tmp_path: Path) -> None:
    path = write(tmp_path / "x.csv", b"a;b;c;d;y\n1;2;3;4;cat\n5;6;7;8;ant\n")
    text = {
        "path": str(path), "shape": [2, 2, 1], "classes": ["cat", "ant", "bee"],
        "csv": {
            "label": "y", "delimiter": ";", "features": ["d", "c", "b", "a"], "scale": {"a": 2}, "offset": 1,
        },
    }  # fmt: skip
    file = tmp_path / "data.yaml"
    file.write_text(yaml.safe_dump(text))
    data = open_dataset(load_settings(file, DatasetSettings))
    assert data.shape == (2, 2, 1)
    assert data.labels.tolist() == [0, 1]
    assert data.batch(np.array([0]))[0].ravel().tolist() == [3, 2, 1, 0]
    folder_of(tmp_path / "photos", "cat/1.png", "ant/2.png")
    given: dict[str, Any] = {"path": tmp_path / "photos", "images": {"size": [4, 6], "mode": "grey"}}
    assert open_dataset(DatasetSettings.checked(given)).shape == (6, 4, 1)


def test_pictures_take_the_form_of_a_model_where_no_setting_says_another(tmp_path: Path) -> None:
    folder_of(tmp_path / "p", "a/1.png", "b/2.png")

    def form(wanted: tuple[int, ...] = (6, 9, 1), **given: Any) -> tuple[list[int] | None, str | None]:
        made = fitted(DatasetSettings.checked({"path": tmp_path / "p"} | given), wanted)
        section = section_of(made, FORMATS["images"])
        return section.size, section.mode

    assert form() == ([9, 6], "grey")
    assert form(images={"mode": "rgb"}) == ([9, 6], "rgb")
    assert form(images={"size": [5, 4]}) == ([5, 4], "grey")
    assert form((32, 32, 3)) == ([32, 32], "rgb")
    assert form(shape=[54]) == (None, None)
    assert form((54,)) == (None, None)
    write(tmp_path / "x.csv", b"a,label\n1,0\n")
    assert form(path=tmp_path / "x.csv") == (None, None)


def test_data_in_two_halves_are_known_as_such(tmp_path: Path) -> None:
    def halves(path: Path) -> bool:
        return has_test_half(DatasetSettings(path=path))

    for kind in FORMATS:
        assert not halves(two_records(kind, tmp_path / kind))
    labels = tmp_path / "idx" / "train-labels-idx1-ubyte"
    write(labels.with_name("t10k-labels-idx1-ubyte"), labels.read_bytes())
    write(tmp_path / "cifar" / "test_batch.bin", bytes(3073))
    folder_of(tmp_path / "photos", "train/a/1.png", "train/b/2.png", "val/a/3.png")
    assert all(map(halves, (tmp_path / "idx", tmp_path / "cifar", tmp_path / "photos")))
    picture = encoded(noise(1))
    for names, expected in (
        (["a/1.png", "b/1.png"], False),
        (["x/a/1.png", "x/b/1.png"], False),
        (["x/train/a/1.png", "x/test/a/1.png"], True),
        (["train/a/1.png"], False),
    ):
        assert halves(zip_of(tmp_path / "x.zip", dict.fromkeys(names, picture))) == expected


@pytest.mark.parametrize(
    ("text", "error"),
    [
        ("{path: x, kind: tar}", "kind: got 'tar'"),
        ("{path: x, classes: [yes, no]}", "put it in quotes"),
        ("{path: x, classes: [a]}", "a list of at least 2"),
        ("{path: x, classes: [a, b, a]}", "a name stands twice"),
        ("{path: x, classes: [a, '']}", "at least 1 character"),
        ("{path: x, shape: [0]}", "a number of at least 1"),
        ("{path: x, shape: [1, 2, 3, 4]}", "a list of at most 3"),
        ("{path: x, images: {size: [32]}}", "a list of at least 2"),
        ("{path: x, images: {size: [32, 99999]}}", "a number of at most 4096"),
        ("{path: x, csv: {window: 0}}", "csv.window: got 0"),
        ("{path: x, csv: {stride: 5}}", "`stride` is given without `window`"),
        ("{path: x, csv: {scale: {a: many}}}", "a number"),
        ("{path: x, csv: {delimiter: '::'}}", "csv.delimiter: got '::'"),
        ("{path: x, csv: {features: [label]}}", "stands in `label` and in `features`"),
        ("{path: x, cvs: {}}", "unknown key"),
        ("{kind: csv}", "path: this key is missing"),
    ],
)
def test_settings_that_cannot_be_are_sentences_with_line_and_key(
    tmp_path: Path, text: str, error: str
) -> None:
    file = tmp_path / "data.yaml"
    file.write_text(text)
    with pytest.raises(ConfigurationError) as caught:
        load_settings(file, DatasetSettings)
    assert error in str(caught.value)
    assert f"{file}:1:" in str(caught.value)


def test_whole_numbers_are_names_too_and_tab_is_a_word() -> None:
    made = DatasetSettings.checked(
        {"path": Path("x"), "classes": [3, 1, "two"], "csv": {"delimiter": "tab", "label": 7}}
    )
    assert made.classes == ["3", "1", "two"]
    section = section_of(made, FORMATS["csv"])
    assert (section.delimiter, section.label) == ("\t", "7")
    with pytest.raises(SchemaError):
        DatasetSettings(path=Path("x"), classes=[1.5, 2.5])  # type: ignore[list-item]


def parts_of(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, bytes]]:
    """The files of a small dataset of each kind, and of zipped ones."""
    root = tmp_path_factory.mktemp("whole")
    made = {}
    for kind in FORMATS:
        two_records(kind, root / kind)
        made[kind] = parts_of(root / kind)
    np.savez(root / "stored.npz", inputs=np.zeros((2, 3)), labels=np.array([0, 1]))
    made["stored"] = {"data.npz": (root / "stored.npz").read_bytes()}
    zip_of(root / "x.zip", made["images"], 8)
    made["zip"] = {"x.zip": (root / "x.zip").read_bytes()}
    return made


@settings(deadline=None, max_examples=300, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.sampled_from([*FORMATS, "stored", "zip"]), st.data())
def test_whatever_is_done_to_a_file_the_answer_is_records_or_a_sentence(
    tmp_path: Path, whole: dict[str, dict[str, bytes]], kind: str, data: st.DataObject
) -> None:
    files = dict(whole[kind])
    victim = data.draw(st.sampled_from(sorted(files)))
    content = bytearray(files[victim])
    for _ in range(data.draw(st.integers(1, 4))):
        place = data.draw(st.integers(0, max(len(content) - 1, 0)))
        match data.draw(st.sampled_from(["flip", "cut", "insert", "blow up"])):
            case "flip" if content:
                content[place] ^= data.draw(st.integers(1, 255))
            case "cut":
                del content[place:]
            case "insert":
                content[place:place] = data.draw(st.binary(max_size=40))
            case "blow up":
                content[place : place + 4] = b"\xff\xff\xff\xff"
    files[victim] = bytes(content)
    root = tmp_path / "x"
    for name, part in files.items():
        write(root / name, part)
    path = root / victim if kind in ("npz", "stored", "zip") else root
    told = {"stored": "npz", "zip": "images"}.get(kind, kind)
    refusal: str | None = None
    try:
        opened = open_dataset(DatasetSettings(path=path, kind=told))
        inputs, labels = opened.batch(np.arange(len(opened)))
    except DpagentError as error:
        refusal = str(error)
    if refusal is not None:
        assert len(refusal) > 20
        assert "Traceback" not in refusal
        return
    assert inputs.shape == (len(opened), *opened.shape)
    assert inputs.dtype == opened.dtype
    assert labels.min() >= 0
    assert labels.max() < opened.classes
