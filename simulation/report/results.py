"""A finished run as plain values, for scripts and for the summary on a terminal."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from simulation.record import RunRecord


def as_json(record: RunRecord) -> dict[str, Any]:
    """The run as a script reads it; the summary on the terminal shows the same figures."""
    settings, notes = record.settings, record.notes
    statement = settings.mechanism.job_statement(settings.epsilon, settings.delta)
    if settings.insecure:
        statement = replace(statement, epsilon=math.inf, delta=1.0, assumptions=(settings.insecure,))
    return {
        "dataset": settings.data.name,
        "data": {
            "records_per_device": float(settings.records_per_device),
            "test_records": settings.form.test_records,
            "shape": list(settings.form.shape),
            "classes": list(settings.form.labels),
            "split": settings.data.split_in_words,
        },
        "outlook": {
            "signal_to_noise": record.outlook.signal_to_noise,
            "verdict": record.outlook.verdict,
            "warning": record.outlook.warning,
        },
        "broker": notes.broker,
        "virtual": record.is_virtual,
        "insecure": settings.insecure or None,
        "mixer": settings.mixer,
        "minds": list(record.cautions),
        "guessing_accuracy": record.majority_class_accuracy,
        "accuracy": _last(record.accuracy_history),
        "accuracy_history": _plain(record.accuracy_history),
        "baseline_accuracy": _last(record.baseline_history),
        "baseline_accuracy_history": _plain(record.baseline_history),
        "devices": settings.devices,
        "rounds": settings.rounds,
        "model": {
            "name": record.model,
            "parameters": record.parameters,
            "file": str(record.layout.trained_model),
        },
        "privacy": {
            "unit": str(statement.unit),
            "adjacency": str(statement.adjacency),
            "trust": str(statement.trust),
            "statement": statement.as_dict(),
            "columns": [column.as_dict() for column in record.columns],
            "method": settings.method,
            "noise": settings.noise,
            "schedule": settings.schedule,
            "sampling_rate": settings.sampling_rate,
            "clip_norm": settings.clip_norm,
            "clipping": settings.clipping,
            "clip_norms": list(record.clip_norms),
            "epsilon_target": settings.epsilon,
            "delta": settings.delta,
            "epsilon_spent": list(record.epsilon_spent),
            "noise_multipliers": list(record.noise_multipliers),
            "ledgers": [
                {
                    "device": budget.device,
                    "epsilon_spent": budget.epsilon_spent,
                    "epsilon_budget": budget.epsilon_total,
                    "charges": budget.charges,
                    "verified": budget.verified,
                }
                for budget in record.budgets
            ],
        },
        "noise_cap": {
            "kind": settings.cap_in_words,
            "coordinates_clamped": list(record.clamped),
            "norm_kept": list(record.kept),
        },
        "fragments": {
            "charged": record.fragments.charged,
            "sent": record.fragments.sent,
            "counted": record.fragments.counted,
            "expired": record.fragments.expired,
            "duplicates": record.fragments.duplicates,
            "rejected": record.fragments.rejected,
            "lost": record.fragments.lost,
        },
        "bytes_per_device_round": {"up": round(record.bytes_up), "down": round(record.bytes_down)},
        "seconds": {
            "total": notes.seconds,
            "per_round_median": statistics.median(record.seconds_by_round)
            if record.seconds_by_round
            else None,
        },
        "peak_memory_mib": {"agent_max": notes.agent_peak_mib, "coordinator": notes.coordinator_peak_mib},
        "restarts": notes.restarts,
        "state_dir": str(record.layout.root),
        "test_file": str(record.layout.test_file),
    }


def _plain(history: Sequence[float]) -> list[float | None]:
    """With None, as JSON has it, where nothing was measured."""
    return [None if math.isnan(value) else value for value in history]


def _last(history: Sequence[float]) -> float | None:
    return _plain(history)[-1] if history else None
