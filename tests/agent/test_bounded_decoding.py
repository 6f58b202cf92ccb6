"""Records that break, block or bloat their decoder cost themselves alone, by limits that the kernel keeps."""

from __future__ import annotations

import os
import resource
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from agent.bounded_decoding import Limits, Outcome, decode_apart
from dpagent.errors import DataError
from dpagent.learning.data.dataset import Dataset

MIB = 1 << 20
LIMITS = Limits(memory_bytes=64 * MIB, seconds=0.2)
_kept: list[Any] = []


def blocks() -> None:
    time.sleep(60)


def breaks() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def goes_on_for_ever() -> None:
    sum(range(1 << 60))


def bloats() -> None:
    np.empty(1024 * MIB, np.uint8)  # more than a process may have free in its heap


def fails() -> None:
    raise DataError("record 1: no picture.")


def fails_oddly() -> None:
    raise KeyError("odd")


def leaves_memory_behind() -> None:
    _kept.append(np.ones(40 * MIB, np.uint8))


def leaves() -> None:
    os._exit(0)


class Treacherous(Dataset):
    """Records of two values, some of which do something else than to be read."""

    def __init__(self, count: int, deeds: dict[int, Callable[[], None]]) -> None:
        self._deeds = deeds
        super().__init__(np.zeros(count, np.int64), 2, shape=(2,), dtype=np.dtype(np.float32))

    def _read(self, indices: Any) -> Any:
        for number in indices.tolist():
            self._deeds.get(number, lambda: None)()
        return np.stack([np.full(2, number, np.float32) for number in indices])


def outcomes(
    file: Path, count: int, deeds: dict[int, Callable[[], None]], limits: Limits = LIMITS
) -> list[Outcome]:
    """Of all records in the reverse of their order, each in a row of its own number."""
    descriptor = os.open(file, os.O_RDWR | os.O_CREAT)
    try:
        numbers = range(count - 1, -1, -1)
        return list(decode_apart(Treacherous(count, deeds), numbers, numbers, descriptor, limits))[::-1]
    finally:
        os.close(descriptor)


@pytest.mark.parametrize(
    ("deed", "said"),
    [
        (breaks, "record 1: its decoder was ended by signal 9 (Killed)"),
        (goes_on_for_ever, "record 1: decoding it takes more than 0.2 s of processor time"),
        (bloats, "record 1: MemoryError"),
        (fails, "record 1: no picture."),
        (fails_oddly, "record 1: KeyError: 'odd'"),
        (leaves, "record 1: its decoder failed"),
    ],
)
def test_a_record_that_ends_its_decoder_costs_itself_alone(
    tmp_path: Path, deed: Callable[[], None], said: str
) -> None:
    found = outcomes(tmp_path / "rows", 4, {1: deed})
    assert [bool(outcome.problem) for outcome in found] == [False, True, False, False]
    assert said in found[1].problem
    rows = np.fromfile(tmp_path / "rows", np.float32).reshape(4, 2)
    assert rows[[0, 2, 3]].tolist() == [[0, 0], [2, 2], [3, 3]]


def test_a_record_that_blocks_is_left_for_another_time(tmp_path: Path) -> None:
    """It may be the disk, or a board that is busy: no record is left out for good by the clock."""
    found = outcomes(tmp_path / "rows", 3, {1: blocks}, Limits(64 * MIB, 0.05))
    assert [outcome.is_final for outcome in found] == [True, False, True]
    assert "record 1: it is not decoded after 1.5 s" in found[1].problem


def test_a_record_is_not_left_out_for_what_one_before_it_left_behind(tmp_path: Path) -> None:
    """Two of them take more memory than there is; each alone does not."""
    found = outcomes(tmp_path / "rows", 5, dict.fromkeys((0, 1, 3), leaves_memory_behind))
    assert not any(outcome.problem for outcome in found)
    assert np.fromfile(tmp_path / "rows", np.float32)[::2].tolist() == [0, 1, 2, 3, 4]


def test_memory_is_bounded_by_the_limit(tmp_path: Path) -> None:
    for mebibytes, fits in ((64, False), (1_200, True)):
        limits = Limits(mebibytes * MIB, 5.0)
        (outcome,) = outcomes(tmp_path / "rows", 1, {0: bloats}, limits)
        assert bool(outcome.problem) != fits


def test_memory_is_bounded_by_a_limit_of_the_board_s_too(tmp_path: Path) -> None:
    """One below what the decoder may take is kept, and costs no record that fits it."""
    check = (
        "import resource, sys; from pathlib import Path; from agent.bounded_decoding import address_space\n"
        "sys.path[:0] = sys.argv[2:]; from test_bounded_decoding import MIB, bloats, outcomes\n"
        "most = address_space() + 60 * MIB\n"
        "resource.setrlimit(resource.RLIMIT_AS, (most, most))\n"
        "print([bool(one.problem) for one in outcomes(Path(sys.argv[1]), 3, {1: bloats})])"
    )
    here = Path(__file__).parent
    command = [sys.executable, "-c", check, str(tmp_path / "rows"), str(here), str(here.parent)]
    environment = os.environ | {"OPENBLAS_NUM_THREADS": "1"}
    result = subprocess.run(command, capture_output=True, text=True, check=True, env=environment)
    assert result.stdout.strip() == "[False, True, False]"


def test_a_fork_ends_when_nobody_takes_the_rest(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It would go on writing rows that may be another record's by then."""
    file = tmp_path / "rows"
    descriptor = os.open(file, os.O_RDWR | os.O_CREAT)
    dataset = Treacherous(2, {1: blocks})
    forks, fork = [], os.fork
    monkeypatch.setattr(os, "fork", lambda: forks.append(fork()) or forks[-1])
    try:
        outcomes_of = decode_apart(dataset, [0, 1], [0, 1], descriptor, Limits(64 * MIB, 10.0))
        assert next(outcomes_of).problem == ""
        outcomes_of.close()
    finally:
        os.close(descriptor)
    (child,) = forks
    with pytest.raises(ChildProcessError):
        os.waitpid(child, os.WNOHANG)


def test_many_that_fail_are_each_tried_twice_at_most(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    forks, fork = [], os.fork

    def counted() -> int:
        forks.append(1)
        return fork()

    monkeypatch.setattr(os, "fork", counted)
    found = outcomes(tmp_path / "rows", 20, dict.fromkeys(range(0, 20, 2), fails))
    assert [bool(outcome.problem) for outcome in found] == [True, False] * 10
    assert len(forks) == 2 * 10  # with the first; nothing is left after the last


def test_a_row_that_cannot_be_written_costs_its_record_alone(tmp_path: Path) -> None:
    """And not for good."""
    descriptor = os.open(tmp_path / "rows", os.O_RDWR | os.O_CREAT)
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (4_096, hard))
    try:
        found = list(decode_apart(Treacherous(3, {}), [0, 1, 2], [0, 9_999, 1], descriptor, LIMITS))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
        os.close(descriptor)
    assert [(bool(each.problem), each.is_final) for each in found] == [
        (False, True), (True, False), (False, True),
    ]  # fmt: skip
    assert "row 9999 cannot be written" in found[1].problem
