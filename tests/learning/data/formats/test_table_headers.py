"""Tables as R, pandas and spreadsheets write them: columns without a name, and decimal commas."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from formats import open_table

from dpagent.errors import DataError
from dpagent.learning.data.dataset import Dataset
from dpagent.learning.data.formats.tables.settings import CsvSettings


def written(path: Path, text: str) -> Path:
    path.write_text(text)
    return path


def all_of(data: Dataset) -> Any:
    return data.batch(np.arange(len(data)))[0]


R = "x,label\nr1,1,a\nr2,2,b\n"
PANDAS = ",x,label\nr1,1,a\nr2,2,b\n"


def test_a_first_column_that_the_header_leaves_out_is_named(tmp_path: Path) -> None:
    """As ``write.table`` writes row names. What one row holds decides nothing: the setting does."""
    path = written(tmp_path / "x.csv", R)
    with pytest.raises(
        DataError, match=r"No row fits.*has 3 cells; expected 2.*name of the first column"
    ) as caught:
        open_table(path)
    assert "`first_column: id`" in str(caught.value)
    assert "no rows" not in str(caught.value)
    data = open_table(path, CsvSettings(first_column="id"))
    assert (all_of(data).tolist(), data.columns, data.class_names) == ([[1], [2]], ("x",), ("a", "b"))
    path = written(tmp_path / "x.csv", R.replace("r", ""))
    assert all_of(open_table(path, CsvSettings(first_column="id", features=["id", "x"]))).tolist() == [
        [1, 1],
        [2, 2],
    ]
    assert open_table(path, CsvSettings(first_column="person", group="person", window=1)).groups is not None
    data = open_table(path, CsvSettings(first_column="class", label="class", features=["x"]))
    assert data.labels.tolist() == [1, 2]


def test_a_column_without_a_name_is_no_input(tmp_path: Path) -> None:
    """As pandas writes its index."""
    data = open_table(written(tmp_path / "x.csv", PANDAS))
    assert data.columns == ("x",)
    assert any("leaves the name of column 1 empty" in warning for warning in data.origin.warnings)
    named = open_table(tmp_path / "x.csv", CsvSettings(first_column="id"))
    assert all_of(named).tolist() == all_of(data).tolist()
    assert not any("empty" in warning for warning in named.origin.warnings)
    assert open_table(written(tmp_path / "y.csv", "x,,label,\n1,,a,\n2,,b,\n")).columns == ("x",)


def test_a_first_column_that_the_header_does_name_is_told(tmp_path: Path) -> None:
    path = written(tmp_path / "x.csv", "x,label\n1,a\n2,b\n")
    with pytest.raises(DataError, match=r"has 2 cells; expected 3.*leave `first_column` out"):
        open_table(path, CsvSettings(first_column="id"))


def test_decimal_commas_are_read_when_they_are_set_and_told_when_they_are_not(tmp_path: Path) -> None:
    path = written(tmp_path / "x.csv", "x;y;label\n1,5;-2,25e1;a\n,5;3;b\n;NaN;b\n1.500;1;a\n")
    with pytest.raises(DataError, match=r"'x' holds '1,5'.*`decimal: ','`"):
        open_table(written(tmp_path / "y.csv", "x;label\n1,5;a\n"), CsvSettings(delimiter=";"))
    data = open_table(path, CsvSettings(delimiter=";", decimal=",", offset=0.5))
    assert np.array_equal(all_of(data), [[1, -23], [0, 2.5], [np.nan, np.nan]], equal_nan=True)
    (sentence,) = data.origin.left_out
    assert "x.csv:5: the column 'x' holds '1.500'; expected a number with a decimal comma" in sentence
    quoted = written(tmp_path / "z.csv", 'x,label\n"1,5",a\n"2,5",b\n')
    assert all_of(open_table(quoted, CsvSettings(decimal=","))).tolist() == [[1.5], [2.5]]
