"""The comparison as tables: schedules side by side, and the chosen one round by round."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from cli.notation import bound, figure, plain
from cli.plan.comparison import Candidate, Comparison
from cli.plan.target import PlanTarget
from cli.tables import render_table
from dpagent.notation import upwards
from dpagent.privacy.mechanisms.cap_costs import BoundedPrices
from dpagent.wording import counted

_ROWS: Final = 12


def legend(comparison: Comparison) -> str:
    """The columns in words."""
    parameter, shared = ("scale", "ε") if comparison.shares_epsilon else ("deviation", "zCDP")
    summand = "update" if comparison.target.sums_updates else "gradient"
    return (
        f"σ: noise multiplier, the noise's {parameter} divided by the sensitivity. share: of the budget, in "
        f"{shared}. noise: expected L2 norm of the noise on the fleet's mean {summand}, in clip norms; the "
        f"{summand} is at most 1 long. ε at: ε spent after that round."
    )


def schedules_table(comparison: Comparison) -> str:
    """A line per schedule: first and last round, and the budget in between."""
    first, *more = comparison.milestones
    header = [
        "schedule", "σ\nfirst", "\nlast", "share %\nfirst", "\nlast", "noise\nfirst", "\nlast",
        f"ε at\n{first}", *(f"\n{number}" for number in more),
    ]  # fmt: skip

    def row(candidate: Candidate) -> list[str]:
        plan = candidate.plan
        return [
            f"{candidate.name}{' *' if candidate.chosen else ''}",
            *(figure(plan.noise_multipliers[place]) for place in (0, -1)),
            *(figure(100 * candidate.shares[place], 2) for place in (0, -1)),
            *(figure(candidate.mean_noise[place], 3) for place in (0, -1)),
            *(upwards(plan.epsilon_by_round[number - 1]) for number in comparison.milestones),
        ]

    return render_table(header, [row(candidate) for candidate in comparison.candidates])


def rounds_table(comparison: Comparison, *, every: bool) -> str:
    """The chosen schedule next to uniform: about a dozen rounds, or ``every`` one."""
    chosen, uniform = comparison.chosen, comparison.uniform
    beside: Sequence[Candidate] = (chosen,) if chosen.chosen is uniform.chosen else (chosen, uniform)
    header = ["\nround"]
    for candidate in beside:
        header += [f"{candidate.name}\nσ", "\nnoise", "\nε so far"]
    rounds = comparison.target.rounds
    return render_table(
        header,
        [
            [
                str(number),
                *(
                    cell
                    for candidate in beside
                    for cell in (
                        figure(candidate.plan.noise_multipliers[number - 1]),
                        figure(candidate.mean_noise[number - 1], 3),
                        upwards(candidate.plan.epsilon_by_round[number - 1]),
                    )
                ),
            ]
            for number in (range(1, rounds + 1) if every else telling_rounds(rounds))
        ],
    )


def caps_table(comparison: Comparison) -> str:
    """The cost and the guarantee of each kind of noise cap."""
    return render_table(
        ["noise cap", "guarantee", "costs"],
        [
            [
                f"{cap.kind}{' *' if cap.kind == comparison.target.cap else ''}",
                "as above" if cap.statement.is_guarantee else "none",
                cap.costs,
            ]
            for cap in comparison.caps
        ],
        words=3,
    )


def bounded_table(bounded: BoundedPrices, target: PlanTarget) -> str:
    """Prices of the ``bounded`` cap, a column for each example cap."""
    prices = bounded.examples
    rows = [
        ("ε of a round", [target.local_steps * price.step_epsilon for price in prices]),
        (f"ε of {counted(target.rounds, 'round')}", [price.job_epsilon for price in prices]),
    ]
    return render_table(
        ["A, in L1 clip norms", *(plain(price.cap) for price in prices)],
        [[name, *(bound(value, 3) for value in values)] for name, values in rows],
    )


def telling_rounds(rounds: int) -> list[int]:
    """All rounds of a short job; otherwise the first, the last and ten evenly spaced between them."""
    if rounds <= _ROWS:
        return list(range(1, rounds + 1))
    return [1 + round(place * (rounds - 1) / (_ROWS - 1)) for place in range(_ROWS)]
