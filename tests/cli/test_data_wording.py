"""What a command line says and takes: options for keys, and sizes."""

from __future__ import annotations

import pytest
import typer

from cli.data.values import size
from cli.data.wording import as_options, told_as_options
from dpagent.errors import ChildProcessError, DataError, ExitCode
from dpagent.wording import counted


@pytest.mark.parametrize(
    ("key", "option"),
    [
        ("Set `label` to one of them.", "Set `--label` to one of them."),
        ("set `shape: [28, 28, 1]`.", "set `--shape 28,28,1`."),
        ("with `size: [32, 24]` and `mode: rgb`", "with `--size 32x24` and `--mode rgb`"),
        ("`csv.window` is set", "`--window` is set"),
        ("Use `stride: 64`, or", "Use `--stride 64`, or"),
        ("set `header: false`", "set `--no-header`"),
        ("a model's `input_offset`", "a model's `input_offset`"),
        ("the label, and its classes", "the label, and its classes"),
        ("`dpagent model show digits --yaml`", "`dpagent model show digits --yaml`"),
    ],
)
def test_keys_are_said_as_options(key: str, option: str) -> None:
    assert as_options(key) == option
    assert as_options(option) == option


def test_errors_that_pass_keep_their_kind_and_code() -> None:
    with pytest.raises(DataError, match="Set `--kind` to one"), told_as_options():
        raise DataError("Set `kind` to one.")
    with pytest.raises(ChildProcessError, match="`--label`") as caught, told_as_options():
        raise ChildProcessError("`label`", ExitCode.DATA)
    assert caught.value.exit_code == ExitCode.DATA


def test_a_size_is_width_and_height_or_a_square() -> None:
    assert size(None) is None
    assert size("32x24") == size("32X24") == size("32×24") == [32, 24]
    assert size("32") == [32, 32]
    for wrong in ("", "x", "32x", "1x2x3", "wide", "3.5"):
        with pytest.raises(typer.BadParameter, match="expected WIDTHxHEIGHT, such as 32x32"):
            size(wrong)


def test_words_are_counted() -> None:
    made = [counted(1, "file"), counted(0, "file"), counted(1200, "class")]
    assert made == [
        "1 file",
        "0 files",
        "1,200 classes",
    ]
