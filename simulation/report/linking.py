"""Who could tell which device a fragment is from: in words, and as a picture of a run with a mixer."""

from __future__ import annotations

import math
from collections.abc import Collection
from typing import Final

import numpy as np
from matplotlib.figure import Figure
from numpy.typing import NDArray

from dpagent.wording import counted
from simulation.job_record import JobRecord
from simulation.record import Arrival, RunRecord
from simulation.report.drawing import COLOURS, DEVICE_COLOURS, Picture, draw_picture
from simulation.report.interleaving import by_round

_WITHOUT_MIXER: Final = (
    ("The broker", "sees which device sends a message and when, and cannot open it."),
    (
        "The coordinator",
        "opens every fragment and sees one block of {sends}: no name, and nothing of what belongs together.",
    ),
    ("Both in one hand", "know which device each fragment is from, and put each device’s update together."),
)
_WITH_MIXER: Final = (
    _WITHOUT_MIXER[0],
    (
        "The mixer",
        "takes the outer seal off, and can neither open what is inside nor see which device has sent it: "
        "messages come from the broker. It knows in which order they came and left.",
    ),
    _WITHOUT_MIXER[1],
    (
        "Broker and coordinator in one hand",
        "know that a fragment is from one of the devices in its batch, and guess no better than by chance as "
        "long as they only look. Resends show which devices had no receipt yet. If they act, and withhold "
        "messages or receipts or fill a batch with their own, they learn more.",
    ),
    (
        "Mixer and broker in one hand",
        "know which device each sealed fragment is from, and cannot open it.",
    ),
    (
        "Mixer and coordinator in one hand",
        "know what each message held, in the order in which they came, and not from which device.",
    ),
    ("All three in one hand", "know which device each fragment is from, as without a mixer."),
    (
        "Here",
        "one person runs all three, so this mixer hides nothing from her. In a fleet, let someone else run "
        "it than broker and coordinator (docs/decisions/2026-11-23-a-mixer.md).",
    ),
)


def who_could_link(record: JobRecord) -> tuple[tuple[str, str], ...]:
    """Each party, and its knowledge of which device a fragment is from."""
    parties: tuple[tuple[str, str], ...] = _WITH_MIXER if record.settings.mixer else _WITHOUT_MIXER
    if not isinstance(record, RunRecord):
        parties = tuple(each for each in parties if each[0] != "Here")
    return tuple((party, knowledge.format(sends=record.settings.sends)) for party, knowledge in parties)


def mixing_picture(record: RunRecord) -> Picture:
    """A round's fragments by the order in which they left the devices and came out of the mixer."""
    rounds = by_round(record.arrivals)
    if not rounds:
        return Picture("mixing", "No fragment came through the mixer", "The record holds no arrivals.")
    number = sorted(rounds)[len(rounds) // 2]
    entering, leaving = _places(rounds[number])
    devices = [arrival.device for arrival in rounds[number]]
    correlation, deviation = _correlation(rounds.values())
    is_mixed = abs(correlation) <= 4 * deviation
    title = (
        "Through the mixer, fragments arrive in another order than they left the devices"
        if is_mixed
        else "Through the mixer, fragments arrive in an order that still tells of the one in which they left"
    )
    caption = (
        f"Over {counted(len(rounds), 'round')}, the place of a fragment among those that left the devices "
        f"and its place among those that arrived have a rank correlation of {correlation:+.2f}. Uniformly "
        f"random orders would give 0, give or take {4 * deviation:.2f} (four standard deviations); a round "
        "that goes in several batches leaves some."
    )
    note = (
        f"A dot is a fragment of round {number}, its colour a device; without a mixer, the dots would lie "
        "near the diagonal. Only the simulation, which owns the devices’ disks, can colour them. No privacy "
        "figure on this page relies on the mixing."
    )

    def draw(figure: Figure) -> None:
        axes = figure.add_subplot()
        axes.plot([1, len(devices)], [1, len(devices)], color=COLOURS["grid"], linewidth=1.0, zorder=0)
        colours = [COLOURS[DEVICE_COLOURS[device % len(DEVICE_COLOURS)]] for device in devices]
        axes.scatter(entering + 1, leaving + 1, c=colours, s=14.0, linewidths=0)
        axes.set_xlabel("place among the fragments that left the devices")
        axes.set_title("place among the fragments that the coordinator counted")

    return draw_picture("mixing", title, caption, note, 3.6, draw)


def _places(arrivals: Collection[Arrival]) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """The places of a round's fragments as they left the devices, and as they arrived, from 0."""
    sent = np.argsort(np.argsort([each.sent_at for each in arrivals], kind="stable"))
    arrived = np.argsort(np.argsort([each.arrived_at for each in arrivals], kind="stable"))
    return sent, arrived


def _correlation(rounds: Collection[list[Arrival]]) -> tuple[float, float]:
    """The mean rank correlation of the rounds with two fragments or more, and its standard deviation if each
    round's order is uniformly random: of n places, Spearman's ρ has a variance of 1 / (n − 1)."""
    known = [arrivals for arrivals in rounds if len(arrivals) >= 2]
    if not known:
        return 0.0, 0.0
    total = math.fsum(float(np.corrcoef(*_places(arrivals))[0, 1]) for arrivals in known)
    variance = math.fsum(1 / (len(arrivals) - 1) for arrivals in known)
    return total / len(known), math.sqrt(variance) / len(known)
