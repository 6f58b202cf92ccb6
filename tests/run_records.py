"""The record of a run as the demo leaves it, without a run, and the words of its report."""

from __future__ import annotations

import functools
import math
import random
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

from dpagent.learning.models.built_ins import built_in
from simulation.choices import settle
from simulation.layout import Layout
from simulation.notes import RunNotes
from simulation.outlook import Outlook
from simulation.record import Arrival, DeviceBudget, FragmentTally, RunRecord
from simulation.request import Request
from simulation.settings import DataForm, RunSettings


def arrivals_of(devices: int, rounds: int, fragments: int, *, window_s: float = 4.0) -> tuple[Arrival, ...]:
    """Fragments sent at independent uniform times in each round's window, as agents do."""
    draw = random.Random(20)
    arrivals = []
    for number in range(1, rounds + 1):
        opens_at = 1.7e9 + 6.0 * number
        for device in range(1, devices + 1):
            for _ in range(fragments):
                sent = opens_at + draw.uniform(0.0, window_s)
                arrivals.append(Arrival(device, number, sent, sent + draw.uniform(0.002, 0.03)))
    return tuple(arrivals)


@functools.cache
def settled_for(devices: int) -> tuple[RunSettings, Outlook]:
    form = DataForm(1_437, 360, (8, 8, 1), 10)
    return settle(Request(devices=devices, epsilon=2), form, "digits", built_in("digits"))


def record_of(devices: int = 5, rounds: int = 30, fragments: int = 16) -> RunRecord:
    """A record as a run of the demo leaves it."""
    draw = random.Random(7)
    progress = [(t + 1) / rounds for t in range(rounds)]
    sent = devices * rounds * fragments
    settings, outlook = settled_for(devices)
    return RunRecord(
        settings=settings.with_values({"rounds": rounds}),
        notes=RunNotes(
            broker="amqtt", seconds=187.3, agent_peak_mib=71.4, coordinator_peak_mib=143.2, restarts=1,
            finished=True,
        ),
        outlook=replace(outlook, signal_to_noise=5.3),
        layout=Layout(Path("demo")),
        model="digits",
        parameters=2_410,
        clip_norms=(),
        numbers=tuple(range(1, rounds + 1)),
        noise_multipliers=tuple(2.61 / math.sqrt(1 + 0.3 * (2 * p - 1)) for p in progress),
        epsilon_spent=tuple(1.99231 * p**0.6 for p in progress),
        accuracy_history=tuple(0.913 - 0.62 * math.exp(-7 * p) + draw.gauss(0, 0.006) for p in progress),
        baseline_history=tuple(0.958 - 0.60 * math.exp(-9 * p) + draw.gauss(0, 0.003) for p in progress),
        majority_class_accuracy=0.103,
        clamped=tuple(draw.randrange(180, 260) for _ in progress),
        out_of_range=(),
        kept=tuple(0.5 + 0.25 * p for p in progress),
        columns=(settings.mechanism.job_statement(1.99231, settings.delta),),
        budgets=tuple(DeviceBudget(d, 1.99231, 4.0, rounds, True) for d in range(1, devices + 1)),
        fragments=FragmentTally(
            charged=sent, sent=sent - 1, counted=sent - 3, expired=3, duplicates=12, rejected=1, lost=0
        ),
        arrivals=arrivals_of(devices, rounds, fragments),
        bytes_up=104_862.0,
        bytes_down=48_211.0,
        seconds_by_round=tuple(6.0 + draw.random() for _ in progress),
    )  # fmt: skip


def with_settings(record: RunRecord, **changes: Any) -> RunRecord:
    settings = record.settings.with_values(changes)
    if {"method", "noise"} & {*changes}:
        own = settings.mechanism.job_statement(record.epsilon, settings.delta)
        record = replace(record, columns=(own,))
    return replace(record, settings=settings)


def with_notes(record: RunRecord, **changes: Any) -> RunRecord:
    return replace(record, notes=replace(record.notes, **changes))


def words_of(page: str) -> str:
    """The text of the page with its white space made single."""
    text = re.sub(r"<(style|svg).*?</\1>", " ", page, flags=re.DOTALL)
    return " ".join(re.sub(r"<[^>]*>", " ", text).split())
