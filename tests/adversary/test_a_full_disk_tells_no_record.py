"""A coordinator chooses how many bytes an update takes, and waits whether a board whose disk is nearly full
answers. The records lie on the same disk, as on most boards.

**Claim.** The board answers, however full the disk is: what it writes in a round, it wrote into room that it
took when it started. **Before**, the board kept its update where the disk had room, and else ended with exit
code 8, after the charge and without a word: one picture of 24 kB more decided that, and the charge may be of
any ε, however small. **Power**: certainty, with an update as long as the disk has room without that picture.

Or the coordinator announces plans that no device can run, each with a description that is refused at length.

**Claim.** The board goes on to answer, however many there were. **Before**, the reason of each stood in the
books with all that it quotes, 13 kB, of 2,000 plans: 26 MB, where some 15 MB were taken for everything, in a
minute and without any charge. **Power**: certainty.
"""

from __future__ import annotations

import os
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import cbor2
import numpy as np
import pytest
import yaml
from brokers import Broker, wait_until
from fleets import Program, agent_values, write_agent
from lone_agents import WEIGHTS, charges, ids, plan_for, rows
from observers import Announcer
from PIL import Image
from PIL.PngImagePlugin import PngInfo
from small_disks import fill, leave, on_disks_of_their_own

from agent.custody import begin_ledger
from agent.settings import load_agent_settings

ROOM = 158_000
"""With the picture: less than what the round took of the disk, some 170 kB. Without it, it is more."""
FRAGMENTS = 100
WAIT_S = 30.0


def picture(file: Path, seed: int, comment_bytes: int = 0) -> None:
    file.parent.mkdir(parents=True, exist_ok=True)
    info = PngInfo()
    info.add_text("comment", os.urandom(comment_bytes // 2).hex())
    pixels = np.random.default_rng(seed).integers(0, 256, (8, 8), np.uint8)
    Image.fromarray(pixels).save(file, pnginfo=info)
    then = time.time() - 3_600
    os.utime(file, (then, then))


def answers(disk: Path, broker: Broker, *, has_picture: bool) -> tuple[int, int]:
    """How many fragments a board sends whose disk is nearly full, and how many rounds it has charged."""
    fleet = f"full-{has_picture}".lower()
    with Announcer(broker, fleet) as announcer:
        announcer.announce_model(WEIGHTS)
        section = {"size": [8, 8], "mode": "grey", "folder": "."}
        values = agent_values(
            broker, announcer.signer.public_key, fleet=fleet, budget={"epsilon": 100.0, "delta": 1e-2}
        )
        values["data"] = {
            "name": "digits", "kind": "images", "path": "data", "classes": 10, "max_records": 60,
            "images": section,
        }  # fmt: skip
        values["limits"] |= {"maximum_fragments": 4_096, "minimum_compute_slot_s": 0.3}
        for seed in range(20):
            picture(disk / f"data/{seed % 10}/{seed}.png", seed)
        rest = disk / "data/3/more.png"
        picture(rest, 20, 24_000)
        file = disk / "agent.yaml"
        file.write_text(yaml.safe_dump(values))
        settings = load_agent_settings(file)
        begin_ledger(settings.ledger_files, settings.lifetime_budgets)
        # Of the log that a person reads, which may lie anywhere.
        with Program("run", "--config", file, log=disk.with_name(f"{fleet}.log")) as agent:
            wait_until(lambda: "waiting for a plan" in agent.said(), "the start")
            leave(disk, ROOM)
            if not has_picture:
                rest.unlink()
            plan = plan_for(fleet, compute_slot_s=0.3, jitter_window_s=0.5, wire={"block": 100})
            announcer.announce(plan)
            ends_at = time.monotonic() + WAIT_S
            while time.monotonic() < ends_at and len(ids(announcer, fleet)) < FRAGMENTS:
                if agent.process.poll() is not None:
                    break
                time.sleep(0.05)
            return len(ids(announcer, fleet)), len(charges(file))


REFUSED = 1_300
DECLINED = "SELECT count(*) FROM rounds WHERE state = 'declined'"
_LARGE = (1 << 63) - 1
_CONVOLUTION = {"conv2d": {"channels": _LARGE, "kernel": _LARGE, "stride": _LARGE, "padding": _LARGE}}
AT_LENGTH = cbor2.dumps(
    {
        "name": "m", "input_shape": [8, 8, 1], "classes": 10,
        "layers": [{"residual": {"body": [_CONVOLUTION] * 105}}, {"dense": 10}],
    },
    canonical=True,
)  # fmt: skip


def a_board_answers_after_plans_that_are_refused_at_length(disk: Path, home: Path) -> None:
    broker = Broker("mosquitto", home).start()
    try:
        with Announcer(broker, "refused") as announcer:
            announcer.announce_model(WEIGHTS)
            file = write_agent(
                disk, broker, announcer.signer.public_key, fleet="refused", has_room=False,
                budget={"epsilon": 100.0, "delta": 1e-2},
                limits={"maximum_fragments": 4_096, "minimum_compute_slot_s": 0.3, "maximum_charges": 10},
            )  # fmt: skip
            with Program("run", "--config", file, log=home / "refused.log") as agent:
                wait_until(lambda: "waiting for a plan" in agent.said(), "the start")
                fill(disk)
                for number in range(REFUSED):
                    announcer.announce(
                        plan_for(
                            "refused",
                            job=number.to_bytes(16, "big"),
                            compute_slot_s=0.3,
                            jitter_window_s=0.5,
                            model={"description": AT_LENGTH},
                            wire={"block": 100},
                        )
                    )
                    wait_until(lambda number=number: rows(file, DECLINED)[0][0] > number, "its refusal")
                announcer.announce(
                    plan_for("refused", compute_slot_s=0.3, jitter_window_s=0.5, wire={"block": 100})
                )
                wait_until(lambda: len(ids(announcer, "refused")) == FRAGMENTS, "the answer")
    finally:
        broker.give_up()


@pytest.mark.slow
def test_a_board_answers_whatever_was_refused_before(tmp_path: Path) -> None:
    disks = {tmp_path / "disk": "300m", tmp_path / "home": "64m"}
    on_disks_of_their_own(a_board_answers_after_plans_that_are_refused_at_length, disks)


def both_boards_answer(one: Path, other: Path, home: Path) -> None:
    broker = Broker("mosquitto", home).start()
    try:
        with ThreadPoolExecutor() as boards:
            both = [
                boards.submit(answers, disk, broker, has_picture=has_picture)
                for disk, has_picture in ((one, True), (other, False))
            ]
            found = [board.result() for board in both]
    finally:
        broker.give_up()
    assert found == [(FRAGMENTS, 1)] * 2


def test_a_board_whose_disk_one_record_fills_answers_like_another(tmp_path: Path) -> None:
    disks = {tmp_path / name: "300m" for name in ("one", "other")}
    on_disks_of_their_own(both_boards_answer, disks | {tmp_path / "home": "64m"})
