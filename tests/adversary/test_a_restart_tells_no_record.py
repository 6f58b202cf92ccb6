"""A coordinator that can have a board restart (its power, its memory) times its first connection afterwards.

Claim: what a start takes, and whether there is one, depends on no record that came since the last look.
Parameters: a picture of 20,000 scans that takes seconds to decode, others, and one more than declared, which
    come while the agent is down.

Before, an agent decoded what was new before it connected: 7 to 9 s with the slow picture, 1.4 to 2.1 s
without it. With one record more than declared it did not start at all.

Power: no randomness. A start that looks at anything has a child whose processor time is counted.
"""

from __future__ import annotations

from pathlib import Path

from hostile_files import slow_jpeg
from neighbours import children_s, look_again
from pictures import folder_of, write

from agent.data_settings import DataSettings
from agent.records import Records
from dpagent.learning.data.opening import declare

COUNT = 12


def test_a_restart_looks_at_no_record_and_an_ordinary_look_finds_what_is_new(tmp_path: Path) -> None:
    root, state = tmp_path / "photos", tmp_path / "state"
    state.mkdir()
    folder_of(root, *(f"{number % 3}/{number}.png" for number in range(COUNT)), width=8, height=8)
    given = DataSettings.model_validate({"name": "mine", "path": root, "max_records": COUNT})
    settings = DataSettings.model_validate(declare(given)[0].model_dump(exclude_unset=True))
    first = Records(settings, state)
    used_before = first.attempt(lambda dataset: dataset.digests().tobytes())
    write(root / "0" / "slow.jpg", slow_jpeg())
    folder_of(root, *(f"0/more{number}.png" for number in range(3)), width=8, height=8)
    (root / "1" / "1.png").unlink()

    used_s = children_s()
    again = Records(settings, state)
    assert children_s() == used_s
    assert again.attempt(lambda dataset: dataset.digests().tobytes()) == used_before
    look_again(again)
    assert len(again.dataset) == COUNT - 1, "the picture that is gone"
    look_again(again)
    assert len(again.dataset) == COUNT, "its row goes to one of those that wait"
