"""Rows without labels, read for prediction: as in training, and one bad row costs itself alone."""

from __future__ import annotations

import gzip
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from formats import open_table
from pictures import write

from dpagent.errors import DataError
from dpagent.learning.data.formats.tables.settings import CsvSettings
from dpagent.learning.data.formats.tables.unlabelled import has_labels, unlabelled_rows


def rows_of(path: Path, **form: Any) -> list[Any]:
    """The values of each record, or why it cannot be read."""
    return [
        one.problem if one.values is None else one.values.tolist()
        for one in unlabelled_rows(path, CsvSettings(**form))
    ]


def test_packed_tables_and_byte_order_marks_are_read(tmp_path: Path) -> None:
    text = b"\xef\xbb\xbfa,b\n1,2\n\n3,4"
    plain, packed = tmp_path / "x.csv", tmp_path / "x.csv.gz"
    plain.write_bytes(text)
    packed.write_bytes(gzip.compress(text))
    for file in (plain, packed):
        assert rows_of(file, features=["b", "a"]) == [[2, 1], [4, 3]]


@pytest.mark.parametrize(
    ("bad", "problem"),
    [
        (b"3", "x.csv:3: the row has 1 cell; expected 2"),
        (b"much,2", "x.csv:3: the column 'a' holds 'much'; expected a number"),
        (b"\xff\xfe,2", "x.csv:3: not UTF-8 text"),
        (b"1,\x002", "x.csv:3: holds a null character"),
        (b"1" * 1_100_000 + b",2", "x.csv:3: a line has more than"),
        (b'"1,2', "x.csv:3: a quotation mark is open"),
    ],
)
def test_a_row_that_does_not_fit_is_an_input_that_cannot_be_read(
    tmp_path: Path, bad: bytes, problem: str
) -> None:
    file = write(tmp_path / "x.csv", b"a,b\n1,2\n" + bad + b"\n3,4\n5,6\n")
    before, odd, *after = unlabelled_rows(file, CsvSettings())
    assert before.values is not None
    assert before.values.tolist() == [1, 2]
    assert odd.values is None
    assert problem in odd.problem
    assert [one.values.tolist() for one in after if one.values is not None] == [[3, 4], [5, 6]]
    assert [one.record for one in (before, odd, *after)] == [0, 1, 2, 3]
    first, second, third = rows_of(file, window=2, stride=1)
    assert problem in first
    assert problem in second
    assert third == [[3, 4], [5, 6]]


@pytest.mark.parametrize(
    ("name", "data", "form", "text"),
    [
        ("x.csv", b"a,a\n1,2\n", {}, "the column 'a' stands twice"),
        ("x.csv", b"", {}, "has no rows"),
        ("x.csv", b"a,b\n1,2\n", {"features": ["a", "c"]}, "no column 'c'; found: a, b"),
        ("x.csv.gz", b"\x1f\x8bnonsense", {}, "x.csv.gz"),
    ],
)
def test_a_file_that_cannot_be_read_is_one_input_and_spares_the_others(
    tmp_path: Path, name: str, data: bytes, form: dict[str, Any], text: str
) -> None:
    write(tmp_path / name, data)
    write(tmp_path / "z.csv", b"a,b,c\n1,2,3\n")
    problem, values = rows_of(tmp_path, **{"features": ["a", "b"]} | form)
    assert text in problem
    assert values == ([1, 2] if "features" not in form else [1, 3])


@pytest.mark.parametrize(
    ("form", "text"), [({}, "holds no row below the header"), ({"window": 2}, "holds no window of 2 rows")]
)
def test_a_table_without_a_record_is_refused(tmp_path: Path, form: dict[str, Any], text: str) -> None:
    file = write(tmp_path / "x.csv", b"a,b\n" + b"1,2\n" * ("window" in form))
    with pytest.raises(DataError, match=re.escape(text)):
        rows_of(file, **form)


@pytest.mark.parametrize("form", [{}, {"window": 3}, {"window": 4, "stride": 3, "group": "g"}])
def test_records_are_those_of_training(tmp_path: Path, form: dict[str, Any]) -> None:
    cells = [f"{n};{n / 4:g};{n // 10}".replace(".", ",") for n in range(40)]
    form = form | {"delimiter": ";", "decimal": ",", "scale": 2.0, "first_column": "id"}
    plain = write(tmp_path / "plain.csv", "\n".join(["x;g", *cells]).encode())
    labelled = [f"{row};{'ab'[n % 2]}" for n, row in enumerate(cells)]
    trained = open_table(
        write(tmp_path / "labelled.csv", "\n".join(["x;g;label", *labelled]).encode()), CsvSettings(**form)
    )
    found = rows_of(plain, **form)
    assert np.array_equal(np.array(found, np.float32), trained.batch(np.arange(len(trained)))[0])
    assert len(found) > 5


def test_labels_are_seen_in_the_header_of_the_first_file_that_can_be_read(tmp_path: Path) -> None:
    write(tmp_path / "a.csv", b"\xff\xfe")
    write(tmp_path / "b.csv", b"x,label\n1,a\n")
    assert has_labels(tmp_path, CsvSettings())
    assert not has_labels(write(tmp_path / "c.csv", b"x,y\n1,a\n"), CsvSettings())
    assert has_labels(tmp_path / "c.csv", CsvSettings(label="z"))
    assert has_labels(write(tmp_path / "d.csv", b"x\na,1\n"), CsvSettings(label="y", first_column="y"))
