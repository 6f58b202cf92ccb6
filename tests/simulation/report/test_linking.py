"""The report says who could tell which device a fragment is from, and shows what a mixer did to the order."""

from __future__ import annotations

import random
import re
from dataclasses import replace
from pathlib import Path

import pytest
from run_records import record_of, with_settings, words_of

from simulation.record import RunRecord
from simulation.report.linking import mixing_picture
from simulation.report.page import render_report

pytestmark = pytest.mark.usefixtures("unrendered")


def mixed(record: RunRecord) -> RunRecord:
    """As if each round's fragments had left a mixer in random order."""
    draw, arrivals = random.Random(4), []
    for number in range(1, record.settings.rounds + 1):
        of_round = [arrival for arrival in record.arrivals if arrival.round == number]
        last = max(arrival.arrived_at for arrival in of_round)
        places = draw.sample(range(len(of_round)), len(of_round))
        arrivals += [
            replace(arrival, arrived_at=last + 0.001 * place)
            for arrival, place in zip(of_round, places, strict=True)
        ]
    return replace(with_settings(record, mixer=True), arrivals=tuple(arrivals))


def test_without_a_mixer_broker_and_coordinator_know_all(tmp_path: Path) -> None:
    page = render_report(record_of(rounds=3), tmp_path)
    assert "Both in one hand know which device each fragment is from" in words_of(page)
    assert "mixer" not in page
    assert page.count("<svg") == 5


def test_with_a_mixer_there_is_a_row_for_each_coalition_and_a_picture(tmp_path: Path) -> None:
    page = render_report(mixed(record_of(rounds=3)), tmp_path)
    rows = re.findall(r"<dt>(.*?)</dt>", page.split('id="linking"')[1].split("</dl>")[0])
    assert [row.lower() for row in rows] == [
        "the broker", "the mixer", "the coordinator", "broker and coordinator in one hand",
        "mixer and broker in one hand", "mixer and coordinator in one hand", "all three in one hand", "here",
    ]  # fmt: skip
    assert page.count("<svg") == 6
    assert "Through the mixer, fragments arrive in another order" in words_of(page)


def test_the_title_tells_an_order_that_was_kept() -> None:
    kept = with_settings(record_of(rounds=3), mixer=True)
    assert "still tells" in mixing_picture(kept).title
    assert "still tells" not in mixing_picture(mixed(kept)).title


@pytest.mark.parametrize("fragments", [0, 1])
def test_too_few_fragments_for_an_order_are_drawn_too(tmp_path: Path, fragments: int) -> None:
    record = with_settings(record_of(devices=2, rounds=1, fragments=1), mixer=True)
    page = render_report(replace(record, arrivals=record.arrivals[:fragments]), tmp_path)
    assert ("No fragment came through the mixer" in page) == (fragments == 0)
    assert "nan" not in words_of(page)
