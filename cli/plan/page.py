"""The output of ``dpagent plan``: the guarantee, the schedules, the chart, the rounds and the caps."""

from __future__ import annotations

import math
import textwrap
from collections.abc import Callable
from typing import Final

from cli.notation import bound, figure, plain
from cli.plan.chart import noise_chart
from cli.plan.comparison import Comparison
from cli.plan.tables import bounded_table, caps_table, legend, rounds_table, schedules_table
from cli.plan.target import PlanTarget
from dpagent.privacy.mechanisms.cap_costs import BoundedPrices
from dpagent.wording import counted

WIDEST: Final = 100
_NARROWEST: Final = 40
_ALIKE: Final = 5e-4  # largest relative difference of noise that is not mentioned


def page(comparison: Comparison, *, every_round: bool, width: int, encoding: str) -> str:
    """The comparison as text.

    Args:
        comparison: of the schedules.
        every_round: whether to show all rounds instead of about a dozen.
        width: of the terminal, in characters.
        encoding: of the output.
    """
    chosen = comparison.chosen

    def words(text: str) -> str:
        return fill(text, width)

    parts = [
        words(headline(comparison)) + words(setting(comparison)),
        schedules_table(comparison) + words(f"* requested. {legend(comparison)}"),
        words(verdict(comparison)),
        words(device_words(comparison)) if comparison.device_statement else "",
        noise_chart(
            {candidate.name: candidate.plan.noise_multipliers for candidate in comparison.candidates},
            first=chosen.name,
            width=width,
            encoding=encoding,
        ),
        rounds_table(comparison, every=every_round),
        *_caps(comparison, words),
        *(words(f"Note: {remark}") for remark in comparison.remarks),
        words("--explain explains this guarantee; --picture plan.svg draws the schedules."),
    ]
    return "\n".join(part for part in parts if part)


def _caps(comparison: Comparison, words: Callable[[str], str]) -> list[str]:
    if (bounded := comparison.bounded) is None:
        return []  # no cap goes with noise of the coordinator
    return [
        caps_table(comparison) + words(bounded_words(bounded, comparison.target)),
        bounded_table(bounded, comparison.target),
    ]


def fill(text: str, width: int, *, indent: str = "") -> str:
    """A paragraph that fits the terminal and stays readable."""
    return (
        textwrap.fill(
            text, max(min(width, WIDEST), _NARROWEST), initial_indent=indent, subsequent_indent=indent
        )
        + "\n"
    )


def headline(comparison: Comparison) -> str:
    """The guarantee, with its scope."""
    return f"{comparison.statement.sentence()}."


def setting(comparison: Comparison) -> str:
    """The job and the fleet."""
    target = comparison.target
    if target.sums_updates:
        return (
            f"{counted(target.rounds, 'round')}; {counted(target.devices, 'device')}, each of which sends an "
            f"update a round, clipped whole; a model of {counted(target.parameters, 'parameter')}."
        )
    steps = f" of {counted(target.local_steps, 'local step')}" if target.local_steps > 1 else ""
    return (
        f"{counted(target.rounds, 'round')}{steps}, sampling rate {plain(target.sampling_rate)}; "
        f"{counted(target.devices, 'device')} with about {counted(target.records_per_device, 'record')} "
        f"each, so lots of about {target.expected_lot:,.4g}; a model of "
        f"{counted(target.parameters, 'parameter')}."
    )


def verdict(comparison: Comparison) -> str:
    """The chosen schedule against uniform, in a sentence."""
    chosen, uniform = comparison.chosen, comparison.uniform
    first, last = (
        chosen.plan.noise_multipliers[place] / uniform.plan.noise_multipliers[place] for place in (0, -1)
    )
    if max(abs(first - 1), abs(last - 1)) < _ALIKE:
        return "Every round has the same noise."
    return (
        f"For the same total, the noise of {chosen.name} is {_against(first)} that of uniform in round 1 and "
        f"{_against(last)} it in round {comparison.target.rounds:,}."
    )


def device_words(comparison: Comparison) -> str:
    """The noise that devices add besides, and its guarantee."""
    statement, device = comparison.device_statement, comparison.chosen.device
    assert statement is not None
    assert device is not None
    first, last = (figure(device.noise_multipliers[place], 3) for place in (0, -1))
    span = first if first == last else f"{first} in round 1 and {last} in round {comparison.target.rounds:,}"
    return (
        f"Each device adds noise to its own update besides, {span} times twice the clip norm: "
        f"{statement.sentence()}. The noise on the mean counts both."
    )


def bounded_words(bounded: BoundedPrices, target: PlanTarget) -> str:
    """The requirements of the ``bounded`` cap, and the tightest cap within the target."""
    first, last = (_cap(allowed) for allowed in (bounded.first_allowed, bounded.last_allowed))
    caps = first if first == last else f"{first} in round 1 and {last} in round {target.rounds:,}"
    return (
        "bounded draws truncated Laplace noise that never exceeds A on a coordinate. It needs records "
        f"clipped in L1 (a gradient of {counted(target.parameters, 'parameter')} is up to "
        f"{plain(math.sqrt(target.parameters))} times as long in L1 as in L2). It costs by pure "
        f"composition: the ε of its rounds add up. This target permits {caps} L1 clip norms. published is "
        "Algorithm 1 of the paper, unchanged: it is not private, and a device runs it only where "
        "its owner allows that."
    )


def _cap(allowed: float | None) -> str:
    return "no noise that the sampler can draw" if allowed is None else f"A = {bound(allowed, 3)}"


def _against(ratio: float) -> str:
    if ratio >= 2:
        return f"{figure(ratio, 3)} times"
    return f"{abs(100 * (ratio - 1)):.1f} % {'above' if ratio > 1 else 'below'}"
