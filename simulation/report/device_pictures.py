"""The pictures with a row for each device: the arrivals of its fragments, and its remaining budget."""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import partial
from typing import Final

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from dpagent.notation import plain_bound, upwards
from dpagent.wording import counted
from simulation.record import DeviceBudget, RunRecord
from simulation.report.drawing import COLOURS, DEVICE_COLOURS, Picture, draw_picture
from simulation.report.interleaving import Interleaving, by_round, measure_interleaving
from simulation.report.notation import percent, span

#: With more devices than this, pictures with a row for each show as many.
MAX_ROWS: Final = 20


def arrivals_picture(record: RunRecord) -> Picture:
    """Two rounds' fragments as they arrive, by device and as the coordinator sees them."""
    rounds = by_round(record.arrivals)
    if not rounds:
        return Picture("arrivals", "No fragment arrived", "The record holds no arrivals.")
    seen = sorted(rounds)
    middle = len(seen) // 2
    chosen = seen[max(middle - 1, 0) : middle + 1]
    devices = sorted({arrival.device for arrival in record.arrivals})
    shown = devices[:MAX_ROWS]
    title, caption = _interleaving_words(measure_interleaving(record.arrivals), len(devices), len(seen))
    numbers = " and ".join(map(str, chosen))
    note = f"A mark is a fragment; shown {'are rounds' if len(chosen) > 1 else 'is round'} {numbers}"
    if len(shown) < len(devices):
        note += (
            f" and {len(shown)} of {counted(len(devices), 'device')}; the last row has the arrivals of all"
        )
    note += (
        ". Only the simulation, which owns the devices’ disks, can tell the rows apart. The broker sees the "
        "sender; no privacy figure on this page relies on the mixing."
    )

    def draw(figure: Figure) -> None:
        panels = figure.subplots(1, len(chosen), sharey=True, squeeze=False)[0]
        bottom = len(shown)
        for axes, number in zip(panels, chosen, strict=True):
            members = rounds[number]
            start = min(arrival.sent_at for arrival in members)
            times_of_all = [arrival.arrived_at - start for arrival in members]
            axes.axhspan(bottom - 0.1, bottom + 1.1, color=COLOURS["stone"], alpha=0.13, linewidth=0)
            for row, device in enumerate(shown):
                times = [arrival.arrived_at - start for arrival in members if arrival.device == device]
                colour = COLOURS[DEVICE_COLOURS[row % len(DEVICE_COLOURS)]]
                axes.axhline(row, color=COLOURS["grid"], linewidth=0.7, zorder=0)
                _ticks(axes, times, row, colour, 1.5)
            _ticks(axes, times_of_all, bottom + 0.5, COLOURS["ink"], 1.1)
            axes.set_title(f"round {number}")
            axes.set_xlabel("seconds since the first fragment was sent")
            axes.spines["left"].set_visible(False)
            axes.tick_params(axis="y", length=0)
            width = max(*times_of_all, 1e-3)
            axes.set_xlim(min(0.0, *times_of_all) - 0.01 * width, 1.02 * width)
        labels = [*(f"device {device}" for device in shown), "all, as the\ncoordinator sees"]
        panels[0].set_yticks([*range(bottom), bottom + 0.5], labels=labels)
        panels[0].set_ylim(bottom + 1.15, -0.6)

    return draw_picture("arrivals", title, caption, note, 1.7 + 0.24 * len(shown), draw)


def _ticks(axes: Axes, times: Sequence[float], row: float, colour: str, width: float) -> None:
    """A vertical mark for each time, as one path: thousands of marks stay small in the page."""
    xs = [x for time in times for x in (time, time, math.nan)]
    ys = [y for _ in times for y in (row - 0.33, row + 0.33, math.nan)]
    axes.plot(xs, ys, color=colour, linewidth=width, solid_capstyle="butt")


def _interleaving_words(measured: Interleaving | None, devices: int, rounds: int) -> tuple[str, str]:
    """Title and caption."""
    where = f"Over {counted(rounds, 'round')}" if rounds > 1 else "In the one round"
    if measured is None:
        return "Too few fragments arrived to see an order", "No round has two fragments to compare."
    if devices == 1:
        return "One device has no others to mix with", f"{where} all fragments came from the same device."
    excess = measured.mixed - measured.expected_mixed
    if abs(excess) <= 3 * measured.deviation + 1e-9:
        title = "Fragments of all devices arrive mixed, as in a random order"
    else:
        often = "more" if excess < 0 else "less"
        title = f"Fragments of a device arrive together {often} often than in a random order"
    caption = (
        f"{where} {percent(measured.share)} of {counted(measured.pairs, 'pair')} of consecutive arrivals "
        "came from different devices; a uniformly random order would give "
        f"{percent(measured.expected_share)}, give or take {300 * measured.deviation / measured.pairs:.1f} "
        "points (three standard deviations)."
    )
    return title, caption


def ledgers_picture(record: RunRecord) -> Picture:
    """The spent and the remaining lifetime budget of each device, by its ledger."""
    budgets = sorted(record.budgets, key=lambda budget: budget.device)
    if not budgets:
        return Picture("left", "No ledger was read", "The record holds no budgets.")
    if not record.is_private:
        gone = f"{counted(len(budgets), 'ledger')}: no budget is left, and no other job is admitted."
        return Picture("left", "No device has any privacy budget left", gone)
    if record.is_virtual:
        all_devices = counted(record.settings.devices, "virtual device")
        return Picture(
            "left",
            f"Each device has {percent(_share_left(budgets[0]))} of the lifetime budget left",
            f"One ledger stands for {all_devices}, which all pay the same: ε = "
            f"{_spent(budgets[0])} spent of {plain_bound(budgets[0].epsilon_total)} in "
            f"{counted(budgets[0].charges, 'charge')}.",
        )
    has, show = ("The device has", "shows") if len(budgets) == 1 else ("Devices have", "show")
    title = f"{has} {span(map(_share_left, budgets), percent)} of the lifetime budget left"
    charges = span((budget.charges for budget in budgets), "{:,.0f}".format)
    verified = sum(budget.verified for budget in budgets)
    least = min(budget.epsilon_total for budget in budgets)
    caption = (
        f"{counted(len(budgets), 'ledger')} {show} "
        f"ε = {span((budget.epsilon_spent for budget in budgets), partial(upwards, of=least))} spent "
        f"of {span((budget.epsilon_total for budget in budgets), plain_bound)} "
        f"in {charges} {'charge' if charges == '1' else 'charges'}, "
        f"and {verified:,} of {len(budgets):,} verified."
    )
    note = (
        "The device enforces its lifetime budget itself, over all jobs and coordinators, and declines "
        "a round that would exceed it. The charge is on its disk before a byte leaves, so a crash can waste "
        "budget but never under-count it."
    )
    shown = _with_least_left(budgets)
    if len(shown) < len(budgets):
        which = "unverified ledgers first, then the least left"
        note = f"Shown are {len(shown)} of {counted(len(budgets), 'device')}: {which}. {note}"

    def draw(figure: Figure) -> None:
        axes = figure.add_subplot()
        rows = range(len(shown))
        spent = [budget.epsilon_spent for budget in shown]
        rest = [_share_left(budget) * budget.epsilon_total for budget in shown]
        axes.barh(rows, spent, height=0.62, color=COLOURS["blue"], linewidth=0, label="spent")
        axes.barh(rows, rest, left=spent, height=0.62, color=COLOURS["left"], linewidth=0, label="left")
        for row, budget in enumerate(shown):
            broken = "" if budget.verified else ", ledger not verified"
            axes.annotate(
                f"{_spent(budget)} of {plain_bound(budget.epsilon_total)}{broken}",
                (max(budget.epsilon_total, budget.epsilon_spent), row),
                xytext=(6, 0),
                textcoords="offset points",
                va="center",
                color=COLOURS["ink" if budget.verified else "orange"],
                annotation_clip=False,
            )
        axes.set_yticks(rows, labels=[f"device {budget.device}" for budget in shown])
        axes.set_ylim(len(shown) - 0.4, -0.6)
        axes.margins(x=0)
        axes.set_xlabel("ε")
        axes.spines["left"].set_visible(False)
        axes.tick_params(axis="y", length=0)
        figure.legend(loc="outside upper left", ncols=2, frameon=False, handlelength=1.2)

    return draw_picture("left", title, caption, note, 1.2 + 0.27 * len(shown), draw)


def _spent(budget: DeviceBudget) -> str:
    return upwards(budget.epsilon_spent, of=budget.epsilon_total)


def _share_left(budget: DeviceBudget) -> float:
    return max(1 - budget.epsilon_spent / budget.epsilon_total, 0.0) if budget.epsilon_total else 0.0


def _with_least_left(budgets: Sequence[DeviceBudget]) -> list[DeviceBudget]:
    """At most :data:`MAX_ROWS` of them, unverified ledgers first of all, in the devices' order."""
    scarce = sorted(budgets, key=lambda b: (b.verified, b.epsilon_total - b.epsilon_spent, b.device))
    return sorted(scarce[:MAX_ROWS], key=lambda budget: budget.device)
