"""``dpagent plan``: what a target costs in noise, before anything is trained."""

from __future__ import annotations

from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from cli.output import write_json
from cli.tables import print_table

if TYPE_CHECKING:
    from dpagent.privacy import BudgetPlan


class ScheduleKind(StrEnum):
    """How a budget is spread over the rounds."""

    INCREMENTING = "incrementing"
    UNIFORM = "uniform"
    LINEAR = "linear"


def plan(
    epsilon: Annotated[float, typer.Option(help="Target ε of the whole job, per record.")] = 2.0,
    delta: Annotated[float, typer.Option(help="Target δ of the whole job.")] = 1e-5,
    rounds: Annotated[int, typer.Option(help="Rounds of the job, up to 5000.")] = 100,
    sampling_rate: Annotated[
        float, typer.Option(help="Probability that a record is in a round's lot.")
    ] = 0.1,
    schedule: Annotated[
        ScheduleKind, typer.Option(help="How the budget is spread.")
    ] = ScheduleKind.INCREMENTING,
    step: Annotated[
        float, typer.Option(help="incrementing: the step, as a fraction (0 to 0.99) of its allowed maximum.")
    ] = 0.3,
    ratio: Annotated[
        float, typer.Option(help="linear: the last round's budget over the first round's.")
    ] = 3.0,
    local_steps: Annotated[int, typer.Option(help="Noisy steps a device takes in a round.")] = 1,
    json_file: Annotated[
        Path | None,
        typer.Option("--json", help="Write JSON to this file (`-`: standard output) instead of a table."),
    ] = None,
) -> None:
    """Print the noise multiplier and the running ε of every round.

    The table shows the uniform schedule beside the one asked for. Figures are bounds for the
    mechanism as implemented: record-level, add-or-remove-one adjacency, no trusted party.
    """
    from dpagent.errors import require_count
    from dpagent.privacy import Schedule, calibrate

    require_count("rounds", rounds, maximum=5000)

    def solve(chosen: Schedule) -> BudgetPlan:
        return calibrate(
            chosen,
            epsilon=epsilon,
            delta=delta,
            rounds=rounds,
            sampling_rate=sampling_rate,
            steps=local_steps,
        )

    result = solve(Schedule(kind=schedule.value, step=step, ratio=ratio))
    if json_file is not None:
        write_json(json_file, as_json(result))
        return
    uniform = solve(Schedule(kind="uniform"))
    typer.echo(
        f"Record-level (ε = {epsilon:g}, δ = {delta:g}), add-or-remove-one adjacency, no trusted party; "
        f"{rounds} rounds, sampling rate {sampling_rate:g}."
    )
    print_table(
        [
            "round",
            f"noise multiplier ({schedule.value})",
            "ε so far",
            "noise multiplier (uniform)",
            "ε so far",
        ],
        [
            [str(number), f"{noise:.4f}", f"{spent:.4f}", f"{uniform_noise:.4f}", f"{uniform_spent:.4f}"]
            for number, (noise, spent, uniform_noise, uniform_spent) in enumerate(
                zip(
                    result.noise_multipliers,
                    result.epsilon_by_round,
                    uniform.noise_multipliers,
                    uniform.epsilon_by_round,
                    strict=True,
                ),
                start=1,
            )
        ],
    )


def as_json(result: BudgetPlan) -> dict[str, Any]:
    """The plan as a script reads it."""
    schedule: dict[str, Any] = {"kind": result.schedule.kind}
    if result.schedule.kind == "incrementing":
        schedule["step"] = result.schedule.step
    if result.schedule.kind == "linear":
        schedule["ratio"] = result.schedule.ratio
    return {
        "noise_multipliers": list(result.noise_multipliers),
        "epsilon": list(result.epsilon_by_round),
        "epsilon_target": result.epsilon_target,
        "delta": result.delta,
        "sampling_rate": result.sampling_rate,
        "local_steps": result.steps,
        "schedule": schedule,
        "unit": "record",
        "adjacency": "add-or-remove-one",
        "trust": "none",
    }
