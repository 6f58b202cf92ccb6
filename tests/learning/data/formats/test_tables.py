"""CSV as records: against Python's own csv module and numpy, and against what only looks like CSV."""

from __future__ import annotations

import csv
import gzip
import io
import re
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from formats import open_table
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from dpagent.errors import ConfigurationError, DataError
from dpagent.learning.data.dataset import Dataset
from dpagent.learning.data.formats.tables import index
from dpagent.learning.data.formats.tables.settings import CsvSettings
from dpagent.schema.problems import SchemaError
from dpagent.wording import counted


def written(path: Path, text: str, *, encoding: str = "utf-8") -> Path:
    path.write_bytes(text.encode(encoding))
    return path


def all_of(data: Dataset) -> Any:
    return data.batch(np.arange(len(data)))[0]


def test_a_row_is_a_record(tmp_path: Path) -> None:
    path = written(tmp_path / "x.csv", "age,label,height\n30,tall,1.9\n40,short,1.6\n50,tall,2\n")
    data = open_table(path)
    assert (len(data), data.shape, data.dtype) == (3, (2,), np.float32)
    assert data.class_names == ("short", "tall")
    inputs, labels = data.batch(np.array([2, 0, 2]))
    assert np.array_equal(inputs, np.array([[50, 2], [30, 1.9], [50, 2]], np.float32))
    assert labels.tolist() == [1, 1, 1]
    assert "sorted order" in " ".join(data.origin.warnings)


CELLS = st.floats(allow_nan=False, width=32) | st.integers(-1000, 1000)


@settings(max_examples=100, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    st.lists(
        st.tuples(
            st.text(st.characters(codec="utf-8", exclude_characters="\0\r\n"), max_size=8), CELLS, CELLS
        ),
        min_size=1, max_size=30,
    ),
    st.sampled_from([",", ";", "\t"]),
    st.sampled_from(["\n", "\r\n"]),
    st.booleans(),
    st.booleans(),
)  # fmt: skip
def test_what_the_csv_module_writes_is_read_back(
    tmp_path: Path, rows: list[Any], delimiter: str, end: str, bom: bool, packed: bool
) -> None:
    """Notes hold quotes, delimiters and any letter: a column that nobody asked for."""
    buffer = io.StringIO()
    writer = csv.writer(buffer, delimiter=delimiter, lineterminator=end)
    writer.writerow(["note", "a", "label", "b"])
    for number, (note, a, b) in enumerate(rows):
        writer.writerow([note, a, f"class {number % 2}", b])
    content = buffer.getvalue().encode("utf-8-sig" if bom else "utf-8")
    path = tmp_path / ("x.csv.gz" if packed else "x.csv")
    path.write_bytes(gzip.compress(content) if packed else content)
    data = open_table(path, CsvSettings(features=["b", "a"], delimiter=delimiter), ["class 1", "class 0"])
    expected = np.array([[b, a] for _, a, b in rows], np.float32)
    order = np.random.default_rng(len(rows)).permutation(len(rows))
    inputs, labels = data.batch(order)
    assert np.array_equal(inputs, expected[order])
    assert labels.tolist() == [1 - number % 2 for number in order]


@pytest.mark.parametrize("labels", [["3", "0", "1"], ["03", "0", "1"]])
def test_whole_numbers_are_classes_themselves(tmp_path: Path, labels: list[str]) -> None:
    data = open_table(written(tmp_path / "x.csv", "x,label\n" + "".join(f"1,{label}\n" for label in labels)))
    assert (data.classes, data.class_names, data.labels.tolist()) == (4, (), [3, 0, 1])


def test_offset_and_scale_are_applied_column_by_column(tmp_path: Path) -> None:
    path = written(tmp_path / "x.csv", "a,b,label\n10,1e300,0\n20,,1\n30,NaN,0\n")
    data = open_table(path, CsvSettings(offset={"a": 10.0}, scale={"a": 4.0, "b": 1e299}))
    inputs = all_of(data)
    assert inputs[:, 0].tolist() == [0, 2.5, 5]
    assert inputs[0, 1] == 10
    assert np.isnan(inputs[1:, 1]).all()
    assert np.isinf(all_of(open_table(path))[0, 1])
    assert np.array_equal(
        all_of(open_table(path, CsvSettings(offset=1.0, scale=2.0)))[:, 0], [4.5, 9.5, 14.5]
    )


def windows_of(
    rows: list[tuple[float, str, str]], window: int, stride: int, mixed: str
) -> list[tuple[list[float], str]]:
    """The plainest oracle: slide over all rows."""
    made = []
    for start in range(0, len(rows) - window + 1, stride):
        part = rows[start : start + window]
        if len({group for _, _, group in part}) > 1:
            continue
        counts = Counter(label for _, label, _ in part)
        if len(counts) > 1 and mixed == "drop":
            continue
        best = max(counts.values())
        label = next(label for _, label, _ in part if counts[label] == best)
        made.append(([value for value, _, _ in part], label))
    return made


@settings(max_examples=200, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    st.lists(st.tuples(st.sampled_from("abc"), st.sampled_from("pq")), min_size=1, max_size=40),
    st.integers(1, 6),
    st.integers(1, 9),
    st.sampled_from(["majority", "drop"]),
)
def test_windows_are_those_of_the_plainest_loop(
    tmp_path: Path, rows: list[tuple[str, str]], window: int, stride: int, mixed: Any
) -> None:
    numbered = [(float(number), label, group) for number, (label, group) in enumerate(rows)]
    lines = "".join(f"{value},{label},{group}\n" for value, label, group in numbered)
    path = written(tmp_path / "x.csv", f"x,label,who\n{lines}")
    form = CsvSettings(window=window, stride=stride, group="who", mixed=mixed)
    expected = windows_of(numbered, window, stride, mixed)
    data = open_table(path, form, ["a", "b", "c"])
    assert data.shape == (window, 1)
    assert all_of(data)[..., 0].tolist() == [values for values, _ in expected]
    assert data.labels.tolist() == ["abc".index(label) for _, label in expected]
    used = {value for values, _ in expected for value in values}
    unused = [text for text in data.origin.left_out if "fill no window" in text]
    assert bool(unused) == (len(used) < len(rows))
    assert not unused or unused[0].startswith(counted(len(rows) - len(used), "row"))
    assert data.groups is not None
    assert len(set(data.groups.tolist())) == len({numbered[int(values[0])][2] for values, _ in expected})


def test_windows_that_overlap_are_announced_loudly(tmp_path: Path) -> None:
    path = written(tmp_path / "x.csv", "x,label\n" + "1,a\n2,b\n" * 20)
    (_, warning) = open_table(path, CsvSettings(window=10, stride=4)).origin.warnings
    assert "THE WINDOWS OVERLAP: one reading is in up to 3 records" in warning
    assert "3·ε" in warning
    assert not any("OVERLAP" in text for text in open_table(path, CsvSettings(window=10)).origin.warnings)


def test_files_of_a_folder_come_in_the_order_of_their_names_and_windows_stay_inside(tmp_path: Path) -> None:
    written(tmp_path / "b.csv", "label,x,y\n0,5,50\n1,6,60\n1,7,70\n")
    written(tmp_path / "a.csv", "x,y,label\n1,10,0\n2,20,0\n3,30,1\n")
    written(tmp_path / ".hidden.csv", "nothing")
    written(tmp_path / "notes.txt", "nothing")
    data = open_table(tmp_path, CsvSettings(window=2, stride=1))
    assert all_of(data).tolist() == [
        [[1, 10], [2, 20]], [[2, 20], [3, 30]], [[5, 50], [6, 60]], [[6, 60], [7, 70]],
    ]  # fmt: skip
    assert data.groups is not None
    assert data.groups.tolist() == [0, 0, 1, 1]


def test_without_a_header_columns_are_numbers(tmp_path: Path) -> None:
    path = written(tmp_path / "x.csv", "5,a,7\n6,b,8\n")
    data = open_table(path, CsvSettings(label="2", header=False))
    assert all_of(data).tolist() == [[5, 7], [6, 8]]
    assert data.class_names == ("a", "b")


def test_blank_lines_and_a_missing_last_line_break_do_no_harm(tmp_path: Path) -> None:
    data = open_table(written(tmp_path / "x.csv", "x,label\n\n1,a\n\n\n2,b"), CsvSettings(window=2))
    assert all_of(data).tolist() == [[[1], [2]]]
    assert data.labels.tolist() == [0]  # of two alike the first


@pytest.mark.parametrize(
    ("text", "form", "error"),
    [
        ("", {}, "has no rows"),
        ("x,label\n", {}, "holds no record. There are no rows below the header"),
        ("x,y\n1,2\n", {}, r"no column 'label'; found: x, y\. Set `label`"),
        (
            "x;label\n1;2\n",
            {},
            r"'x;label', seem to be separated by ';' and not by ','\. Set `delimiter: ';'`\.",
        ),
        ("x\tlabel\n1\t2\n", {}, r"separated by '\\t'"),
        ("x|y|label\n1|2|a\n", {"delimiter": ";"}, r"separated by '\|' and not by ';'"),
        ("1,5;2,5;a\n", {"header": False, "label": "3"}, "separated by ';' and not by ','"),
        ("x;y,z\n1,a\n", {}, "no column 'label'; found: x;y, z"),
        ("x,label\n1,a\n", {"features": ["z"]}, "no column 'z'; found: x, label. Set `features`"),
        ("x,label\n1,a\n", {"group": "who"}, "no column 'who'.*Set `group`"),
        ("label\na\n", {}, "no column but that of the label"),
        ("x,x,label\n1,2,a\n", {}, ":1: the column 'x' stands twice"),
        ("x,label\nten,a\n1,\n", {}, ":2: the column 'x' holds 'ten'; expected a number"),
        ("x,label\n1,a\0\n", {}, ":2: holds a null character"),
        ('x,"lab"el\n1,a\n', {}, ":1: not valid CSV"),
        ("x,label\n1,12345678901\n2,1\n", {}, "label is 12345678901.*label column"),
        ("x,label\n1,70000\n2,1\n", {}, "label is 70000; expected whole numbers below 65,536"),
        ("x,label\n1,a\n2,a\n", {}, "bad.csv.*only one class, 'a'"),
        ("x,label\n1,a\n2,b\n", {"window": 3}, "fill no window of 3 rows"),
    ],
)
def test_what_is_wrong_is_named_with_file_and_line(
    tmp_path: Path, text: str, form: dict[str, Any], error: str
) -> None:
    path = written(tmp_path / "bad.csv", text)
    with pytest.raises(DataError, match=error) as caught:
        open_table(path, CsvSettings(**form))
    assert str(path) in str(caught.value) or "classes" in str(caught.value) or "label is" in str(caught.value)


UNFIT = {
    "1,b,c": "the row has 3 cells; expected 2, as in the first row",
    "1": "the row has 1 cell; expected 2",
    "ten,a": "the column 'x' holds 'ten'; expected a number",
    "2,": "the label is ''; expected one of a, b",
    "2,c": "the label is 'c'; expected one of a, b",
    '"2"3,b': "not valid CSV",
    '"2,b': "a quotation mark is open at the end of the line",
    '2,"b': "a quotation mark is open at the end of the line",
    "1,a\0": "holds a null character",
    "1,\udcff": "not UTF-8 text",
    "1" * 1_100_000: "a line has more than 1,048,576 bytes",
}


@pytest.mark.parametrize("quoted", [False, True])
@pytest.mark.parametrize("bad", UNFIT)
@pytest.mark.parametrize("place", [0, 7, 20])
def test_a_row_that_does_not_fit_is_left_out_alone(
    tmp_path: Path, bad: str, place: int, quoted: bool
) -> None:
    """Also where the other rows have quotation marks, which could close one that is open."""
    rows = [f'{number},"a"' if quoted else f"{number},a" for number in range(20)]
    rows.insert(place, bad)
    path = tmp_path / "x.csv"
    path.write_bytes("\n".join(["x,label", *rows, ""]).encode("utf-8", "surrogateescape"))
    data = open_table(path, classes=["a", "b"])
    assert all_of(data)[:, 0].tolist() == list(range(20))
    (sentence,) = data.origin.left_out
    assert re.match(rf"{re.escape(str(path))}:{place + 2}: .*({UNFIT[bad]})", sentence)


def test_an_open_quotation_mark_does_not_swallow_a_row_that_closes_it(tmp_path: Path) -> None:
    lines = ["a,text,label", "7,w,y", '1,"left,y', '2,5",x', "3,z,y", ""]
    data = open_table(
        written(tmp_path / "x.csv", "\n".join(lines)), CsvSettings(label="label", features=["a"]),
        classes=["x", "y"],
    )  # fmt: skip
    assert all_of(data)[:, 0].tolist() == [7, 2, 3]
    (sentence,) = data.origin.left_out
    assert "x.csv:3: a quotation mark is open at the end of the line" in sentence


def test_spellings_of_declared_labels_are_no_classes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One spelling more than there may be classes left the whole file out."""
    monkeypatch.setattr(index, "MAX_CLASSES", 2)
    path = written(tmp_path / "x.csv", "x,label\n1,0\n2,00\n3,000\n4,1\n")
    assert open_table(path, classes=2).labels.tolist() == [0, 0, 0, 1]
    with pytest.raises(DataError, match="more than 2 different labels"):
        open_table(path)


@pytest.mark.parametrize("more", ['9,"q', '9,"q,a', '9,",a', '9,"', '"', "9,q,a", '9,"q,a\n",a'])
def test_one_line_more_takes_no_other_row_also_where_cells_go_on_in_the_next(
    tmp_path: Path, more: str
) -> None:
    """Whatever may close a quotation mark of that line, were a cell to go on."""
    lines = ['1,"first\nsecond",a', '2,",a\nthird",b', '3,"plain",a', '4,"x",b', '5,"\nq,b",a']
    form = CsvSettings(label="label", features=["x"])
    for place in range(len(lines) + 1):
        found = [
            all_of(
                open_table(
                    written(tmp_path / "x.csv", "\n".join(["x,comment,label", *rows, ""])), form,
                    classes=["a", "b"],
                )
            )[:, 0].tolist()
            for rows in (lines, [*lines[:place], more, *lines[place:]])
        ]  # fmt: skip
        assert [value for value in found[1] if value != 9] == found[0] == [3, 4]


@settings(max_examples=200, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    st.lists(st.tuples(st.sampled_from("ab"), st.sampled_from("pq")), min_size=1, max_size=40),
    st.data(),
    st.integers(1, 6),
    st.integers(1, 9),
    st.sampled_from(["majority", "drop"]),
)
def test_only_windows_with_a_row_that_does_not_fit_are_left_out(
    tmp_path: Path, rows: list[tuple[str, str]], data: st.DataObject, window: int, stride: int, mixed: Any
) -> None:
    """All windows are what they would be had the row been good, but for those that hold it."""
    bad = data.draw(st.integers(0, len(rows) - 1))
    numbered = [(float(number), label, group) for number, (label, group) in enumerate(rows)]
    lines = [f"{value},{label},{group}\n" for value, label, group in numbered]
    lines[bad] = f"oops,{rows[bad][0]},{rows[bad][1]}\n"
    path = written(tmp_path / "x.csv", "x,label,who\n" + "".join(lines))
    form = CsvSettings(window=window, stride=stride, group="who", mixed=mixed)
    expected = [
        (values, label) for values, label in windows_of(numbered, window, stride, mixed) if bad not in values
    ]
    made = open_table(path, form, ["a", "b"])
    assert f"x.csv:{bad + 2}: the column 'x' holds" in made.origin.left_out[0]
    assert all_of(made)[..., 0].tolist() == [values for values, _ in expected]
    assert made.labels.tolist() == ["ab".index(label) for _, label in expected]


EDITS = {
    "a stray quotation mark": lambda line: '"' + line,
    "a cell less": lambda line: line.rpartition(",")[0] + "\n",
    "a cell more": lambda line: "1," + line,
    "no number": lambda line: "oops" + line,
    "another label": lambda line: line.replace("a", "b"),
    "a label that is no class": lambda line: line.replace("a", "zebra"),
    "another group": lambda line: line.replace("p", "q"),
    "no group": lambda line: line.replace("p", ""),
    "a long group": lambda line: line.replace("p", "p" * 300),
    "another group and no number": lambda line: "oops" + line.replace("p", "q"),
}


@pytest.mark.parametrize("edit", EDITS)
@pytest.mark.parametrize("stride", [2, 3, 4])
def test_whatever_becomes_of_a_row_no_window_without_it_changes(
    tmp_path: Path, edit: str, stride: int
) -> None:
    """Windows began anew at each change of the group: one row of another moved all after it, so the sum by as
    many records."""
    form = CsvSettings(window=3, stride=stride, group="who")
    lines = [f"{number},a,p\n" for number in range(20)] + [f"{number},b,q\n" for number in range(20, 40)]

    def made(lines: list[str]) -> set[tuple[tuple[float, ...], int]]:
        data = open_table(written(tmp_path / "x.csv", "x,label,who\n" + "".join(lines)), form, ["a", "b"])
        return {
            (tuple(values), label)
            for values, label in zip(all_of(data)[..., 0].tolist(), data.labels.tolist(), strict=True)
        }

    before = made(lines)
    assert {values[0] % stride for values, _ in before} == {0}
    for row in range(40):
        after = made([*lines[:row], EDITS[edit](lines[row]), *lines[row + 1 :]])
        assert all(row - 2 <= values[0] <= row for values, _ in before ^ after), row


def test_of_many_rows_that_do_not_fit_the_first_are_named_and_the_others_counted(tmp_path: Path) -> None:
    path = written(tmp_path / "x.csv", "x,label\n1,a\n" + "oops,a\n" * 5_000 + "2,b\n")
    data = open_table(path)
    assert all_of(data).tolist() == [[1], [2]]
    assert len(data.origin.left_out) == 101
    assert data.origin.left_out[-1] == f"{path}: 4,900 more rows do not fit."


def test_other_encodings_and_endless_lines_are_refused(tmp_path: Path) -> None:
    text = "größe,label\n1,a\n2,b\n"
    with pytest.raises(DataError, match=r"x\.csv:1: not UTF-8 text"):
        open_table(written(tmp_path / "x.csv", text, encoding="latin-1"))
    with pytest.raises(DataError, match=r"x\.csv:1: not UTF-8|null character"):
        open_table(written(tmp_path / "x.csv", text, encoding="utf-16"))
    with pytest.raises(DataError, match=r"x\.csv:2: a line has more than 1,048,576 bytes"):
        open_table(written(tmp_path / "x.csv", "x,label\n" + "1" * 2_000_000))
    assert len(open_table(written(tmp_path / "x.csv", text, encoding="utf-8-sig"))) == 2


def test_packed_files_that_are_damaged_are_named(tmp_path: Path) -> None:
    path = tmp_path / "x.csv.gz"
    whole = gzip.compress(b"x,label\n1,a\n2,b\n" * 50)
    for content in (b"plain", whole[:20], whole[:-5], whole[:30] + b"\xff\xff" + whole[32:]):
        path.write_bytes(content)
        with pytest.raises(DataError, match=r"Cannot read .*x\.csv\.gz"):
            open_table(path)


@pytest.mark.parametrize(
    ("form", "error"),
    [
        ({"delimiter": ",,"}, "expected one character"),
        ({"delimiter": '"'}, "expected one character"),
        ({"decimal": "·"}, "decimal"),
        ({"stride": 3}, "`stride` is given without `window`"),
        ({"window": 0}, "window"),
        ({"window": 5, "stride": -1}, "stride"),
        ({"features": ["x", "x"]}, "'x' stands in `features` and in `features`"),
        ({"features": ["x", "label"]}, "'label' stands in `label` and in `features`"),
        ({"group": "label"}, "'label' stands in `label` and in `group`"),
        ({"first_column": "id", "header": False}, "`first_column` is given with `header: false`"),
        ({"scale": 0.0}, "`scale` is 0.0; expected numbers above 0"),
        ({"scale": {"x": -1.0}}, "`scale` is {'x': -1.0}"),
        ({"offset": float("nan")}, "offset"),
    ],
)
def test_forms_that_make_no_sense_are_refused(form: dict[str, Any], error: str) -> None:
    with pytest.raises(SchemaError, match=error):
        CsvSettings(**form)


def test_a_constant_for_a_column_that_is_no_input_is_refused(tmp_path: Path) -> None:
    path = written(tmp_path / "x.csv", "x,label\n1,a\n2,b\n")
    with pytest.raises(ConfigurationError, match=r"names the column 'height', which is no input; .* x"):
        open_table(path, CsvSettings(offset={"height": 1.0}))


def test_files_of_a_folder_must_have_the_same_columns(tmp_path: Path) -> None:
    written(tmp_path / "1.csv", "x,label\n1,a\n2,b\n")
    written(tmp_path / "2.csv", "y,label\n1,a\n")
    with pytest.raises(DataError, match=r"2\.csv and .*1\.csv have other columns: x, y"):
        open_table(tmp_path)
    (tmp_path / "2.csv").unlink()
    (tmp_path / "1.csv").unlink()
    with pytest.raises(DataError, match="holds no CSV files"):
        open_table(tmp_path)


@pytest.mark.parametrize("window", [None, 2])
def test_a_byte_order_mark_at_any_line_is_no_part_of_it(tmp_path: Path, window: int | None) -> None:
    """A row in front of the file moved the mark to the second line, which then did not fit: two for one."""
    mark, file = "\ufeff", tmp_path / "x.csv"
    form = CsvSettings(features=["1"], label="2", header=False, width=2, window=window, stride=window)
    file.write_text(f"{mark}1,a\n{mark}2,a\n3,b\n{mark}4,b\n", encoding="utf-8")
    data = open_table(file, form, ["a", "b"])
    assert data.batch(np.arange(len(data)))[0].ravel().tolist() == [1, 2, 3, 4]
    assert data.origin.left_out == ()
