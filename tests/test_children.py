"""A wait says at once which child has failed, rather than run out."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
from brokers import wait_until
from children import Child


def child(tmp_path: Path, program: str) -> Child:
    return Child([sys.executable, "-c", program], tmp_path / "child.log")


def test_a_wait_ends_with_the_code_and_the_last_words_of_a_child_that_failed(tmp_path: Path) -> None:
    with (
        child(tmp_path, "import sys; sys.exit('the disk is full')"),
        pytest.raises(pytest.fail.Exception, match=r"(?s)a moon landing.*exit code 1.*the disk is full"),
    ):
        wait_until(lambda: False, "a moon landing", patience_s=250)


def test_a_wait_that_runs_out_tells_the_state_of_the_children(tmp_path: Path) -> None:
    with child(tmp_path, "print('good night', flush=True); import time; time.sleep(250)") as sleeper:
        wait_until(sleeper.said, "the first words")
        with pytest.raises(pytest.fail.Exception, match=r"(?s)in vain for tea.*runs.*good night"):
            wait_until(lambda: False, "tea", patience_s=0.0)


@pytest.mark.parametrize("program", ["pass", "import time; time.sleep(250)"])
def test_a_child_that_ended_well_or_was_ended_by_its_test_fails_no_wait(tmp_path: Path, program: str) -> None:
    with child(tmp_path, program) as subject:
        if program == "pass":
            wait_until(lambda: not subject.is_running(), "its end")
        else:
            subject.kill()
        looks = iter([False, False, True])
        assert wait_until(lambda: next(looks), "the third look")


def test_a_child_that_a_test_waited_for_fails_no_later_wait(tmp_path: Path) -> None:
    with child(tmp_path, "import sys; sys.exit(9)") as subject:
        assert subject.wait() == 9
        looks = iter([False, True])
        assert wait_until(lambda: next(looks), "the second look")
