"""What a run of a virtual fleet leaves: the model's file, and the record that a report is made of."""

from __future__ import annotations

import math
from dataclasses import replace

from agent.columns import account_name
from coordinator.columns import spent_columns
from coordinator.models import ModelFiles
from dpagent.learning.data.dataset import Dataset
from dpagent.learning.models.spec import ModelSpec
from dpagent.privacy.statement import BudgetStatement
from simulation.collection import read_budget
from simulation.layout import Layout
from simulation.notes import RunNotes
from simulation.outlook import Outlook
from simulation.record import FragmentTally, RunRecord
from simulation.virtual.checkpoint import Checkpoint
from simulation.virtual.settings import VirtualSettings


def write_final_model(
    settings: VirtualSettings, layout: Layout, models: ModelFiles, checkpoint: Checkpoint
) -> None:
    """Write the finished model with its metadata.

    Raises:
        StorageError: The disk is full, or cannot be written.
    """
    models.write(
        layout.trained_model,
        checkpoint.model.weights,
        checkpoint.job,
        len(checkpoint.rounds),
        columns_of(settings, checkpoint),
        insecure=settings.insecure,
    )


def columns_of(settings: VirtualSettings, checkpoint: Checkpoint) -> tuple[BudgetStatement, ...]:
    """What the rounds that are done have spent, in each column."""
    rounds = checkpoint.rounds
    columns = spent_columns(
        checkpoint.job,
        rounds=len(rounds),
        epsilon=rounds[-1].epsilon if rounds else 0.0,
        devices=min((each.least_counted for each in rounds), default=0),
    )
    if not settings.insecure:
        return columns
    return tuple(
        replace(each, epsilon=math.inf, delta=1.0, assumptions=(settings.insecure,)) for each in columns
    )


def record_of(
    settings: VirtualSettings,
    notes: RunNotes,
    outlook: Outlook,
    layout: Layout,
    spec: ModelSpec,
    test: Dataset,
    checkpoint: Checkpoint,
) -> RunRecord:
    """The record of a run, as far as it has come.

    Args:
        settings, notes, outlook: Of the run.
        layout: Where its files are.
        spec: Its model.
        test: The test records.
        checkpoint: Where it is.
    """
    rounds = checkpoint.rounds
    counted, rejected = sum(each.counted for each in rounds), sum(each.rejected for each in rounds)
    sent = counted + rejected
    account = account_name(settings.ledger_name, settings.mechanism.trust)
    return RunRecord(
        settings=settings,
        notes=replace(notes, seconds=checkpoint.seconds, finished=checkpoint.is_over),
        outlook=outlook,
        layout=layout,
        model=spec.name,
        parameters=spec.parameter_count,
        numbers=tuple(range(1, len(rounds) + 1)),
        noise_multipliers=tuple(each.noise_multiplier for each in rounds),
        clip_norms=tuple(each.clip_norm for each in rounds if each.clip_norm is not None),
        epsilon_spent=tuple(each.epsilon for each in rounds),
        accuracy_history=tuple(math.nan if each.accuracy is None else each.accuracy for each in rounds),
        baseline_history=tuple(math.nan if each is None else each for each in checkpoint.baseline),
        majority_class_accuracy=int(test.class_counts().max()) / len(test),
        clamped=tuple(each.clamped for each in rounds),
        out_of_range=tuple(dict.fromkeys(layer for each in rounds for layer in each.out_of_range)),
        kept=tuple(each.kept for each in rounds),
        columns=columns_of(settings, checkpoint),
        budgets=(read_budget(1, layout.agent_state(1), account),),
        fragments=FragmentTally(
            charged=sent,
            sent=sent,
            counted=counted,
            expired=0,
            duplicates=0,
            rejected=rejected,
            lost=rejected,
        ),
        arrivals=(),
        bytes_up=_mean([each.bytes_up for each in rounds]),
        bytes_down=_mean([each.bytes_down for each in rounds]),
        seconds_by_round=tuple(each.seconds for each in rounds),
        is_virtual=True,
    )


def _mean(values: list[int]) -> float:
    return sum(values) / len(values) if values else 0.0
