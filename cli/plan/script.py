"""The comparison as JSON. Keys are added, never changed."""

from __future__ import annotations

from typing import Any

from cli.plan.comparison import Candidate, Comparison
from cli.plan.explain import sections
from dpagent.privacy.mechanisms.cap_costs import BoundedPrices
from dpagent.privacy.schedules import Schedule


def as_json(comparison: Comparison, *, explained: bool) -> dict[str, Any]:
    """The chosen schedule's figures at the top, and all schedules under ``schedules``.

    Args:
        comparison: of the schedules.
        explained: whether to include the explanation.
    """
    target, statement = comparison.target, comparison.statement
    chosen = comparison.chosen
    explanation = {
        "explanation": [
            {"title": section.title, "paragraphs": list(section.paragraphs)}
            for section in sections(comparison)
        ]
    }
    return {
        "noise_multipliers": list(chosen.plan.noise_multipliers),
        "epsilon": list(chosen.plan.epsilon_by_round),
        "epsilon_target": target.epsilon,
        "delta": target.delta,
        "sampling_rate": target.sampling_rate,
        "local_steps": target.local_steps,
        "schedule": schedule_as_json(chosen.plan.schedule),
        "unit": str(statement.unit),
        "adjacency": str(statement.adjacency),
        "trust": str(statement.trust),
        "statement": statement.as_dict(),
        "rounds": target.rounds,
        "fleet": {
            "devices": target.devices,
            "records_per_device": target.records_per_device,
            "parameters": target.parameters,
            "expected_lot": None if target.sums_updates else target.expected_lot,
        },
        "schedules": [_candidate(candidate) for candidate in comparison.candidates],
        "caps": [
            {"kind": cap.kind, "costs": cap.costs, "statement": cap.statement.as_dict()}
            for cap in comparison.caps
        ],
        "bounded_cap": None if comparison.bounded is None else _bounded(comparison.bounded),
        "device_noise": _device_noise(comparison),
        "remarks": list(comparison.remarks),
    } | (explanation if explained else {})


def _device_noise(comparison: Comparison) -> dict[str, Any] | None:
    statement, device = comparison.device_statement, comparison.chosen.device
    if statement is None or device is None:
        return None
    return {
        "statement": statement.as_dict(),
        "noise_multipliers": list(device.noise_multipliers),
        "epsilon": list(device.epsilon_by_round),
    }


def _bounded(bounded: BoundedPrices) -> dict[str, Any]:
    return {
        "step_delta": bounded.step_delta,
        "first_round_l1_clip_norms": bounded.first_allowed,
        "last_round_l1_clip_norms": bounded.last_allowed,
        "prices": [
            {
                "cap_l1_clip_norms": price.cap,
                "release_epsilon": price.release_epsilon,
                "step_epsilon": price.step_epsilon,
                "job_epsilon": price.job_epsilon,
            }
            for price in bounded.examples
        ],
    }


def schedule_as_json(schedule: Schedule) -> dict[str, Any]:
    """Its kind, and the parameters of this kind."""
    named: dict[str, Any] = {"kind": schedule.kind}
    if schedule.kind == "incrementing":
        named["step"] = schedule.step
    if schedule.kind == "linear":
        named["ratio"] = schedule.ratio
    if schedule.kind == "custom":
        named["weights"] = list(schedule.weights)
    return named


def _candidate(candidate: Candidate) -> dict[str, Any]:
    return {
        "schedule": schedule_as_json(candidate.plan.schedule),
        "chosen": candidate.chosen,
        "noise_multipliers": list(candidate.plan.noise_multipliers),
        "epsilon": list(candidate.plan.epsilon_by_round),
        "shares": list(candidate.shares),
        "coordinate_noise_clip_norms": list(candidate.coordinate_noise),
        "mean_noise_clip_norms": list(candidate.mean_noise),
    }
