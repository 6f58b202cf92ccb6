"""Attack: a picture that takes more memory than the board has, or a minute to decode, or ends its decoder, so
that the agent is killed at each start, or shows by its silence that the picture is there.

Claim: a picture above the bound on pixels is refused before it is decoded, in a folder and in an archive,
before the agent starts and while it runs. One that breaks, blocks or bloats its decoder is decoded in another
process, within limits on memory and time that the kernel keeps, ahead of rounds, and costs itself alone: the
agent starts, and answers each plan in time with the sum of the other records.

Power: there is no randomness. On the code of before the progressive JPEG of 8000 × 8000 pixels takes some
400 MiB at whatever size it is asked for, and the JPEG of 20,000 scans takes a minute of each round's training
that has it in its lot, so the tests fail each time; by chance they fail never.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import hostile_files as hostile
import pytest
from brokers import Broker, wait_until
from fleets import DIGITS, make_plan, run_agent, write_agent
from neighbours import look_again, opened_by_a_board
from observers import Announcer, in_an_hour
from peaks import read_all
from pictures import damaged_inside, encoded, folder_of, noise, write, zip_of

from agent.data_settings import DataSettings
from agent.first_rows import open_records
from agent.records import Records
from dpagent.protocol.sealing import Opener, new_sealing_secret
from dpagent.protocol.sizes import block_count
from dpagent.protocol.weights import weights_to_bytes

SECTION: dict[str, Any] = {"size": [8, 8], "mode": "rgb", "folder": "."}
DECLARED: dict[str, Any] = {"kind": "images", "classes": 2, "images": SECTION}
MOST_MIB = 32
LARGE = (
    "progressive-cmyk-at-the-bound.jpg", "16-bit-interlaced-at-the-bound.png", "at-the-bound.webp",
    "noise-at-the-bound.png",
)  # fmt: skip
"""The pictures that take the most memory of those that are decoded by default."""


@pytest.mark.heavy
def test_a_progressive_jpeg_costs_itself_alone_and_no_memory(tmp_path: Path) -> None:
    files = {f"0/{number}.png": hostile.small_png() for number in range(3)}
    files["1/large.jpg"] = hostile.progressive()
    for name, data in files.items():
        write(tmp_path / "folder" / name, data)
    archive = zip_of(tmp_path / "x.zip", files)
    found = read_all(*({"path": str(path)} | DECLARED for path in (tmp_path / "folder", archive)))
    for one in found:
        assert (one["used"], one["read"]) == (4, 3)
        assert one["peak"] < MOST_MIB


@pytest.mark.slow
@pytest.mark.heavy
def test_it_may_come_while_the_agent_runs(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    root = tmp_path / "photos"
    write(root / "0" / "1.png", hostile.small_png())
    records = opened_by_a_board(root, **DECLARED)
    write(root / "1" / "large.jpg", hostile.progressive())
    look_again(records)
    assert len(records.dataset) == 1
    assert "large.jpg: it is 8000 × 8000 pixels large; expected at most 8,388,608" in caplog.text


@pytest.mark.slow
@pytest.mark.heavy
def test_the_limit_on_memory_lets_every_picture_within_the_bound_pass_and_is_real(tmp_path: Path) -> None:
    """In the process that decodes: this one may hold memory that a fork of it finds mapped."""
    for name in LARGE:
        write(tmp_path / "photos" / "0" / name, hostile.PICTURES[name]())
    given = {"name": "mine", "path": tmp_path / "photos", "max_records": 9} | DECLARED
    tight = DataSettings.checked(given | {"decoding": {"memory_mib": 16}})
    small = open_records(tight, tmp_path).dataset
    assert len(small) == 0
    assert len(small.origin.left_out) == len(LARGE)
    # Its owner does as the log advises.
    assert len(Records(DataSettings.checked(given), tmp_path).dataset) == len(LARGE)


class Scene:
    """A real agent over a real broker, with digits as pictures, and a coordinator that announces rounds."""

    fleet = "pictures"

    def __init__(self, directory: Path, broker: Broker, announcer: Announcer) -> None:
        self._announcer, self._opener = announcer, Opener(new_sealing_secret(), self.fleet)
        self.root = directory / "photos"
        names = [f"{number % 10}/{number}.png" for number in range(20)]
        folder_of(self.root, *names, width=8, height=8, channels=1)
        self.file = write_agent(
            directory, broker, announcer.signer.public_key, fleet=self.fleet, engine="numpy",
            data={
                "kind": "images", "path": str(self.root), "dtype": "uint8",
                "images": {"size": [8, 8], "mode": "grey", "folder": "."},
                "decoding": {"seconds": 1, "memory_mib": 64},
            },
        )  # fmt: skip

    def round(self, number: int) -> None:
        """Announce one, and wait for all of its fragments."""
        plan = make_plan(
            fleet=self.fleet, round=number, sealing_key=self._opener.public_key, deadline=in_an_hour(),
            compute_slot_s=0.5, jitter_window_s=0.5,
        )  # fmt: skip
        self._announcer.announce(plan)
        blocks = block_count(DIGITS.parameter_count, 1_000)

        def arrived() -> bool:
            opened = [self._opener.open(message, plan.job) for message in self._announcer.fragments]
            return sum(fragment.round == number for fragment in opened) >= blocks

        wait_until(arrived, f"the fragments of round {number}")
        for message in self._announcer.fragments:
            self._announcer.confirm(self._opener.open(message, plan.job).id)


@pytest.fixture
def scene(tmp_path: Path, mosquitto: Broker) -> Iterator[Scene]:
    with Announcer(mosquitto, Scene.fleet) as announcer:
        announcer.announce_model(weights_to_bytes(DIGITS.initial_weights(0), "float32"))
        yield Scene(tmp_path, mosquitto, announcer)


@pytest.mark.slow
@pytest.mark.heavy
def test_pictures_that_end_their_decoder_end_neither_the_agent_nor_a_round(scene: Scene) -> None:
    write(scene.root / "3" / "slow.jpg", hostile.slow_jpeg())
    write(scene.root / "4" / "large.jpg", hostile.PICTURES["progressive-cmyk-at-the-bound.jpg"]())
    write(scene.root / "5" / "broken.png", damaged_inside(encoded(noise(3))))
    state = scene.file.parent / "state"
    index, found = state / "records.index", state / "records.found"
    with run_agent(scene.file) as agent:
        wait_until(lambda: "connected to" in agent.said(), "the start")
        for name, reason in (
            ("3/slow.jpg", "decoding it takes more than 1 s of processor time"),
            ("4/large.jpg", ""),
            ("5/broken.png", "broken data stream"),
        ):
            (line,) = (line for line in agent.said().splitlines() if name in line)
            assert reason in line
        # The same while it runs: no round waits for the decoder.
        write(scene.root / "6" / "later.jpg", hostile.slow_jpeg())
        for number in (1, 2):
            scene.round(number)
        wait_until(found.exists, "the look")
        assert b"6/later.jpg: decoding it takes more" in found.read_bytes()
        scene.round(3)
        assert agent.stop() == 0
    # What was left out is not tried again at the next start.
    before = index.stat().st_mtime_ns
    with run_agent(scene.file) as agent:
        wait_until(lambda: agent.said().count("slow.jpg: decoding it takes more") == 2, "the second start")
        assert agent.stop() == 0
    assert (index.stat().st_mtime_ns, found.exists()) == (before, False)
