"""The agent's records between rounds: what cannot be read does not stop it, and does not show."""

from __future__ import annotations

import logging
import math
from pathlib import Path

import numpy as np
import pytest
from pictures import encoded, folder_of, noise, write

from agent.records import Records
from agent.settings import DataSettings
from dpagent.errors import DataError
from dpagent.learning import ArrayDataset, Dataset, save_npz
from dpagent.privacy import poisson_lot


def settings(path: Path) -> DataSettings:
    return DataSettings(name="mine", path=path)


def sizes(dataset: Dataset) -> int:
    """Reads everything."""
    return sum(len(labels) for _, labels in dataset.batches())


def test_records_that_vanish_or_break_are_left_out_of_the_second_attempt(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    folder_of(tmp_path, *(f"a/{number}.png" for number in range(5)), "b/x.png")
    records = Records(settings(tmp_path))
    (tmp_path / "a" / "1.png").unlink()
    (tmp_path / "a" / "3.png").write_bytes(encoded(noise(3))[:30])
    with caplog.at_level(logging.WARNING):
        assert records.attempt(sizes) == 4
    assert "a/1.png: it has vanished" in caplog.text
    assert "left out: a/3.png" in caplog.text
    assert len(records.dataset) == 4


def test_a_refresh_says_once_what_it_leaves_out(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    folder_of(tmp_path, "a/1.png", "b/2.png")
    records = Records(settings(tmp_path))
    write(tmp_path / "a" / "2.png", encoded(noise(2)))
    write(tmp_path / "a" / "bad.png", b"no picture")
    with caplog.at_level(logging.INFO):
        for _ in range(3):
            records.refresh()
    assert len(records.dataset) == 3
    assert caplog.text.count("the data changed: 3 records, 2 before") == 1
    assert caplog.text.count("left out: a/bad.png") == 1


def test_what_no_refresh_helps_against_is_an_error(tmp_path: Path) -> None:
    folder_of(tmp_path, "a/1.png", "b/2.png")
    records = Records(settings(tmp_path))
    calls = []

    def work(dataset: Dataset) -> int:
        calls.append(len(dataset))
        raise DataError("the disk is broken")

    with pytest.raises(DataError, match="the disk is broken"):
        records.attempt(work)
    assert calls == [2]


def test_the_lot_of_a_second_attempt_is_a_lot_of_the_others(tmp_path: Path) -> None:
    """Each of the others is in it with probability 0.3, whether or not the broken one was met before."""
    count, rate, repeats = 12, 0.3, 400
    folder_of(tmp_path, *(f"a/{number:02}.png" for number in range(count)), "b/x.png", width=3, height=3)
    drawn = np.zeros(count, np.int64)
    for _ in range(repeats):
        write(tmp_path / "a" / "broken.png", encoded(noise(99, 3, 3)))
        records = Records(settings(tmp_path))
        (tmp_path / "a" / "broken.png").unlink()

        def lot_of(dataset: Dataset) -> list[str]:
            lot = poisson_lot(len(dataset), rate)
            dataset.batch(lot)
            return [dataset.names[number] for number in lot]  # type: ignore[attr-defined]

        for name in records.attempt(lot_of):
            assert name != "a/broken.png"
            if name.startswith("a/"):
                drawn[int(name[2:4])] += 1
    # Six standard deviations for each of twelve.
    assert np.abs(drawn - repeats * rate).max() < 6 * math.sqrt(repeats * rate * (1 - rate))


def test_records_that_are_not_finite_are_told_to_the_owner(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    inputs = np.zeros((3, 2), np.float32)
    inputs[1, 0] = np.nan
    save_npz(tmp_path / "x.npz", ArrayDataset(inputs, np.zeros(3, np.int64), 2))
    with caplog.at_level(logging.WARNING):
        Records(settings(tmp_path / "x.npz"))
    assert "1 of 3 records hold NaN or infinity" in caplog.text
