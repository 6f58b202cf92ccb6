"""Rows brought up to date: what is new is decoded, what is known stays, and no reader is disturbed."""

from __future__ import annotations

import os
import resource
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from children import PATIENCE_S
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from pictures import aged, damaged_inside, encoded, folder_of, noise, write
from row_boards import contents, expected, killed, named, pictures, sign_of, table, tables, values_in

from agent import bounded_decoding, decoding, effort
from agent.bounded_decoding import Outcome
from agent.decoding import bring_up_to_date
from agent.first_rows import decode_at_once, open_records
from agent.look_messages import NICENESS, LookOrder
from agent.row_files import COUNTS_AFTER_S
from agent.rows import RowStore
from dpagent.errors import ConfigurationError, DataError


@pytest.fixture
def decoded(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """How many records each look decoded."""
    counts: list[int] = []
    real = decoding.decode_apart

    def counting(dataset: Any, numbers: Any, *others: Any) -> Any:
        counts.append(len(numbers))
        return real(dataset, numbers, *others)

    monkeypatch.setattr(decoding, "decode_apart", counting)
    return counts


def test_only_what_is_new_or_changed_is_decoded(tmp_path: Path, decoded: list[int]) -> None:
    board = pictures(tmp_path)
    folder_of(board.root, *named(0, 1, 2))
    assert contents(board.look(at_once=True)) == expected(0, 1, 2)
    sign = sign_of(board)
    for at_once in (True, False):
        assert contents(board.look(at_once=at_once)) == expected(0, 1, 2)
    assert sign_of(board) == sign  # nothing was written
    write(board.root / "0" / "3.png", encoded(noise(3)))
    write(board.root / "1" / "1.png", encoded(noise(4)), age_s=30)
    (board.root / "2" / "2.png").unlink()
    assert contents(board.look()) == expected(0, 3, 4)
    assert decoded == [3, 0, 0, 2]


def test_a_broken_picture_is_not_tried_again_until_it_changes(tmp_path: Path, decoded: list[int]) -> None:
    board = pictures(tmp_path)
    folder_of(board.root, *named(0, 1))
    broken = write(board.root / "2" / "2.png", damaged_inside(encoded(noise(2))))
    for _ in range(2):
        rows = board.look(at_once=True)
        assert contents(rows) == expected(0, 1)
        (sentence,) = rows.origin.left_out
        assert sentence == f"{board.root}: 2/2.png: broken data stream when reading image file."
    write(broken, encoded(noise(2)), age_s=30)
    rows = board.look()
    assert (contents(rows), rows.origin.left_out) == (expected(0, 1, 2), ())
    assert decoded == [3, 0, 1]


def test_other_limits_try_a_broken_record_again(tmp_path: Path, decoded: list[int]) -> None:
    folder_of(tmp_path / "data", *named(0, 1))
    write(tmp_path / "data" / "2" / "2.png", damaged_inside(encoded(noise(2))))
    for seconds in (5, 5, 6):
        board = pictures(tmp_path, decoding={"seconds": seconds})
        rows = board.look(at_once=True)
        assert contents(rows) == expected(0, 1)
        assert len(rows.origin.left_out) == 1
    assert decoded == [3, 0, 1]


def test_what_the_board_had_no_time_for_is_tried_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    board = tables(tmp_path)
    table(board, [1, 2, 3])
    real = decoding.decode_apart

    def late(dataset: Any, numbers: Any, *others: Any) -> Any:
        for number, outcome in zip(numbers, real(dataset, numbers, *others), strict=True):
            yield Outcome(0, "row 2: late.", is_final=False) if number == 1 else outcome

    with monkeypatch.context() as patch:
        patch.setattr(decoding, "decode_apart", late)
        rows = board.look(at_once=True)
    assert (values_in(rows), rows.origin.left_out) == ([1, 3], ("row 2: late.",))
    rows = board.look()
    assert (values_in(rows), rows.origin.left_out) == ([1, 2, 3], ())


LOOK = """
import sys
from agent import decoding
decoding.main()
print("numpy.ma" in sys.modules)
"""


@pytest.mark.parametrize("kind", ["pictures", "tables"])
def test_a_look_loads_no_masked_arrays(tmp_path: Path, kind: str) -> None:
    """They are 10 MiB, and most of a look's start, where there is no bytecode of them."""
    if kind == "pictures":
        board = pictures(tmp_path)
        folder_of(board.root, *named(0, 1))
    else:
        board = tables(tmp_path)
        table(board, [1, 2])
    for at_once in (True, False):
        theirs, ours = os.pipe()  # That stays open: the look ends with it.
        try:
            looked = subprocess.run(
                [sys.executable, "-c", LOOK, str(theirs)], pass_fds=[theirs], process_group=0,
                input=LookOrder(board.settings, board.state, at_once).to_bytes(), stderr=subprocess.PIPE,
                check=False, timeout=PATIENCE_S,
            )  # fmt: skip
        finally:
            os.close(theirs)
            os.close(ours)
        assert looked.stderr == b"False\n"
    assert len(board.newest()) == 2


def test_tables_that_did_not_change_are_not_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    board = tables(tmp_path)
    table(board, [1, 2])
    board.look(at_once=True)
    with monkeypatch.context() as patch:
        patch.setattr(decoding, "list_declared", None)
        assert values_in(board.look()) == [1, 2]
    table(board, [1, 2, 3])
    assert values_in(board.look()) == [1, 2, 3]


@pytest.mark.parametrize("at_once", [True, False])
def test_a_reader_keeps_its_records_while_a_look_replaces_them(tmp_path: Path, at_once: bool) -> None:
    """With all rows taken, a look has to wait with what is new; when the agent starts, nobody reads yet."""
    board = tables(tmp_path, max_records=3)
    table(board, [1, 2, 3])
    reader = board.look(at_once=True)
    table(board, [1, 4, 5])
    now = board.look(at_once=at_once)
    if at_once:
        assert values_in(now) == [1, 4, 5]
        assert reader.try_read(np.arange(3))[1].keys() == {1, 2}  # it notices, and mixes nothing up
        return
    assert (values_in(reader), values_in(now)) == ([1, 2, 3], [1])
    os.utime(board.root / "1.csv")  # as any change to the folder does
    assert values_in(board.look()) == [1, 4, 5]


def test_a_look_that_is_killed_leaves_the_rows_of_before(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    board = tables(tmp_path, max_records=4)
    table(board, [1, 2, 3])
    board.look(at_once=True)
    table(board, [2, 4, 5])
    with killed(monkeypatch):
        board.look(at_once=True)
    assert values_in(board.newest()) == [2]
    assert values_in(board.look(at_once=True)) == [2, 4, 5]


def test_what_is_decoded_is_published_on_the_way(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(decoding, "_PUBLISH_S", 0.0)
    board = pictures(tmp_path)
    folder_of(board.root, *named(0, 1, 2))
    seen, publish = [], RowStore.publish

    def noted(store: RowStore, index: Any) -> None:
        publish(store, index)
        seen.append(contents(store.open(index)))

    monkeypatch.setattr(RowStore, "publish", noted)
    board.look(at_once=True)
    assert seen[0] == []
    assert [len(each) for each in seen][-4:] == [1, 2, 3, 3], "the last says that these are all"
    assert seen[-1] == expected(0, 1, 2)


def test_other_settings_begin_anew(tmp_path: Path, decoded: list[int]) -> None:
    folder_of(tmp_path / "data", *named(0, 1))
    pictures(tmp_path).look(at_once=True)
    small = {"size": [2, 2], "mode": "grey", "folder": "."}
    other = pictures(tmp_path, images=small)
    assert other.store.load() is None
    assert other.look(at_once=True).shape == (2, 2, 1)
    assert other.store.rows_file.stat().st_size == 8 * 4
    # The rows of before are gone: going back finds none of them.
    again = pictures(tmp_path)
    assert again.store.load() is None
    assert contents(again.look(at_once=True)) == expected(0, 1)
    # Limits and the ledger's name give no row its meaning.
    named_otherwise = pictures(tmp_path, name="yours", features_mib=3, decoding={"seconds": 1})
    assert contents(named_otherwise.look(at_once=True)) == expected(0, 1)
    assert decoded == [2, 2, 2, 0]


def test_with_more_than_declared_a_board_does_not_start(tmp_path: Path) -> None:
    board = pictures(tmp_path, max_records=3)
    folder_of(board.root, *named(0, 1, 2, 3))
    with pytest.raises(DataError, match=r"holds 4 records; expected at most 3\. Raise `max_records`"):
        board.look(at_once=True)


def test_a_record_that_is_used_stays_and_a_free_row_goes_to_the_first_that_waits(tmp_path: Path) -> None:
    board = pictures(tmp_path, max_records=2)
    folder_of(board.root, "1/1.png", "2/2.png")
    before = contents(board.look(at_once=True))
    write(board.root / "0" / "3.png", encoded(noise(3)))
    rows = board.look()
    assert contents(rows) == before
    assert rows.origin.left_out == (
        "1 record beyond `max_records: 2` are not used. Raise it, or remove records.",
    )
    (board.root / "2" / "2.png").unlink()
    board.look()
    now = contents(board.look())
    assert len(now) == 2
    assert set(before) - set(now) == {(noise(1).tobytes(), 2)}


@pytest.mark.heavy
@settings(
    max_examples=25, deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)  # fmt: skip
@given(
    stages=st.lists(st.sets(st.integers(0, 12), max_size=6), min_size=1, max_size=4),
    most=st.integers(2, 8),
    newcomer=st.integers(20, 30),
    begins=st.integers(0, 3),
    restarts=st.lists(st.booleans(), min_size=4, max_size=4),
)
def test_one_record_more_changes_itself_alone_and_at_the_bound_one_other(
    tmp_path_factory: pytest.TempPathFactory,
    stages: list[set[int]],
    most: int,
    newcomer: int,
    begins: int,
    restarts: list[bool],
) -> None:
    """Sets that grow only, as folders and tables do, with restarts between."""
    folder = tmp_path_factory.mktemp("boards")
    boards = []
    for name in ("one", "other"):
        (folder / name).mkdir()
        boards.append(tables(folder / name, max_records=most))
    grown = [sorted(set().union(*stages[: stage + 1])) for stage in range(len(stages))]
    more = [sorted({*each, newcomer}) if stage >= begins else each for stage, each in enumerate(grown)]
    for stage, sets in enumerate(zip(grown, more, strict=True)):
        used = []
        for board, values in zip(boards, sets, strict=True):
            table(board, values)
            fits = len(values) <= most
            used.append(set(values_in(board.look(at_once=fits and (stage == 0 or restarts[stage])))))
        assert len(used[0] ^ used[1]) <= (1 if len(sets[1]) <= most else 2)


def test_a_limit_on_address_space_that_a_look_may_need_keeps_the_agent_from_starting(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """At such a limit one row more took all that were new along; whether it starts depends on no record."""
    board = tables(tmp_path)
    table(board, [1])
    board.look(at_once=True)
    wanted = decoding.listing_bytes(board.settings)
    monkeypatch.setattr(resource, "getrlimit", lambda _: (wanted - (1 << 20), wanted - (1 << 20)))
    with pytest.raises(ConfigurationError, match=r"ulimit -v.*data\.max_records 8"):
        open_records(board.settings, board.state)
    monkeypatch.setattr(resource, "getrlimit", lambda _: (wanted + (64 << 20), wanted + (64 << 20)))
    assert len(open_records(board.settings, board.state).dataset) == 1


def test_what_a_look_had_found_counts_at_a_start_that_decodes_and_is_not_decoded_again(
    tmp_path: Path, decoded: list[int]
) -> None:
    board = pictures(tmp_path)
    folder_of(board.root, *named(0, 1))
    board.look(at_once=True)
    write(board.root / "2" / "2.png", encoded(noise(2)))
    bring_up_to_date(LookOrder(board.settings, board.state, at_once=False))
    assert contents(board.look(at_once=True)) == expected(0, 1, 2)
    assert decoded == [2, 1, 0]


def test_a_look_forgets_what_one_before_it_found_also_where_nothing_is_new(tmp_path: Path) -> None:
    board = pictures(tmp_path)
    folder_of(board.root, *named(0, 1))
    board.look(at_once=True)
    file, away = board.root / named(1)[0], tmp_path / "away.png"
    file.rename(away)
    bring_up_to_date(LookOrder(board.settings, board.state, at_once=False))
    away.rename(file)
    assert contents(board.look()) == expected(0, 1)


def test_what_is_gone_is_used_no_more_and_comes_back(tmp_path: Path) -> None:
    board = pictures(tmp_path)
    folder_of(board.root, *named(0, 1))
    write(board.root / "2" / "2.png", damaged_inside(encoded(noise(2))))
    board.look(at_once=True)
    board.root.rename(tmp_path / "elsewhere")
    rows = board.look()
    assert len(rows) == 0
    (sentence,) = rows.origin.left_out
    assert "There is no file or directory" in sentence
    (tmp_path / "elsewhere").rename(board.root)
    aged(board.root, 30)
    assert contents(board.look()) == expected(0, 1)


def test_data_that_were_away_for_several_looks_come_back(tmp_path: Path) -> None:
    """Whether a table changed is seen by its size and its time, which are those of before."""
    board = tables(tmp_path)
    table(board, [1, 2])
    board.look(at_once=True)
    board.root.rename(tmp_path / "elsewhere")
    left = []
    for _ in range(2):
        assert values_in(board.look()) == []
        index = board.store.load()
        assert index is not None
        left.append(len(index.stale))
    assert left == [2, 0], "a reader may have had them, the first time"
    (tmp_path / "elsewhere").rename(board.root)
    assert values_in(board.look()) == [1, 2]


def test_a_look_beside_training_on_one_core_is_done_when_it_counts_and_training_keeps_its_slots() -> None:
    """A step of niceness is a factor of 1.25 (sched(7))."""
    share = 1 / (1 + 1.25**NICENESS)
    assert decoding.LOOK_S / share < COUNTS_AFTER_S
    assert 1 / (1 - share) < effort._SPARE
    assert 1 / share < decoding.PATIENCE, "no record is left for later that needs all of its time"


def test_records_have_less_time_by_the_clock_while_an_agent_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    board, real, patience = tables(tmp_path), decoding.decode_apart, []

    def noted(*arguments: Any) -> Any:
        patience.append(arguments[-1])
        return real(*arguments)

    monkeypatch.setattr(decoding, "decode_apart", noted)
    table(board, [1])
    board.look(at_once=True)
    table(board, [1, 2])
    board.look()
    assert patience == [bounded_decoding.PATIENCE, decoding.PATIENCE]


def test_an_error_about_a_file_whose_name_is_not_utf_8_is_said(tmp_path: Path) -> None:
    """It could not be printed, so that the owner was told nothing."""
    board = tables(tmp_path)
    write(board.root / os.fsdecode(b"\xff.csv"), b"y,label\n1,1\n")
    with pytest.raises(DataError, match=r"udcff\.csv has no column 'x'"):
        decode_at_once(board.settings, board.state)


def test_what_a_look_has_no_time_for_is_looked_at_in_the_next_though_no_file_changes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    board = tables(tmp_path)
    monkeypatch.setattr(decoding, "LOOK_S", 0.8)  # two rows: 0.2 s each, tried twice
    table(board, [1])
    board.look(at_once=True)
    table(board, [1, 2, 3, 4, 5])
    assert [len(board.look()) for _ in range(3)] == [3, 5, 5]


def test_at_once_files_that_did_not_change_are_listed(tmp_path: Path) -> None:
    """Whether there are more records than declared is settled there, and not while the agent runs."""
    board = tables(tmp_path, max_records=3)
    table(board, [1, 2, 3])
    board.look(at_once=True)
    table(board, [1, 2, 3, 4])
    for _ in range(2):
        assert values_in(board.look()) == [1, 2, 3]
    with pytest.raises(DataError, match="holds 4 records; expected at most 3"):
        board.look(at_once=True)
