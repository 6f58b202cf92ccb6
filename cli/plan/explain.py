"""The guarantee of a plan in plain words, with its own numbers.

The bounds on an attacker are those of (ε, δ)-differential privacy read as a test between two data
sets (Kairouz, Oh, Viswanath, *The composition theorem for differential privacy*, 2015): a test with a
share a of false alarms finds at most e^ε·a + δ, and at most 1 − e^(−ε)·(1 − δ − a). Somebody who
would be right every other time by guessing is right at most a share (e^ε + δ)/(1 + e^ε) of the time.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final

from cli.notation import factor, figure, percent, plain, upwards
from cli.plan.comparison import Comparison
from cli.plan.page import fill, headline, setting, verdict
from dpagent.privacy.schedules import Schedule

_FALSE_ALARMS: Final = 0.01
_WEAK_EPSILON: Final = 8.0


@dataclass(frozen=True, slots=True)
class Section:
    """A question and its answer, a string for each paragraph."""

    title: str
    paragraphs: tuple[str, ...]


def explanation(comparison: Comparison, *, width: int) -> str:
    """All sections as text within ``width`` characters."""
    parts = [fill(headline(comparison), width) + fill(setting(comparison), width)]
    for section in sections(comparison):
        body = "".join(fill(paragraph, width, indent="  ") for paragraph in section.paragraphs)
        parts.append(f"{section.title}\n{body}")
    return "\n".join(parts)


def sections(comparison: Comparison) -> Iterator[Section]:
    """What a newcomer asks, in that order."""
    target, statement = comparison.target, comparison.statement
    epsilon, delta = statement.epsilon, statement.delta
    yield Section(
        "Whose secret is kept",
        (
            f"Unit: {statement.unit.meaning}. Adjacency: {statement.adjacency}, which hides its "
            f"{statement.adjacency.meaning}. Trusted: {statement.trust.meaning}. So the "
            "guarantee holds against the broker, the coordinator, all other devices and everybody who gets "
            "the model, even if they work together and keep all they ever saw.",
        ),
    )
    yield Section(
        f"What ε = {plain(epsilon)} means",
        (
            "Take an attacker who knows everything but whether one record is there: all other records, the "
            "program, the plan, and every message of the job. What the device sends changes the odds "
            f"for them at most {factor(epsilon)}-fold (e^ε), apart from δ. Who would have guessed right half "
            f"of the time is right at most {_bound(guessing(epsilon, delta))} of the time. Who accuses "
            f"wrongly in {percent(_FALSE_ALARMS, 0)} of the cases finds at most "
            f"{_bound(detection(epsilon, delta, _FALSE_ALARMS))} of the records that are there.",
            "These are bounds for the best of all attacks, not what to expect from one.",
            *(
                (f"With ε = {plain(epsilon)} the bounds say little. Lower ε, if the accuracy allows.",)
                if epsilon >= _WEAK_EPSILON
                else ()
            ),
        ),
    )
    expected = delta * target.records_per_device
    yield Section(
        f"What δ = {plain(delta)} means",
        (
            "An allowance beyond ε: at worst, a record may be given away entirely with a probability of "
            f"{plain(delta)}. Over the {target.records_per_device:,g} records of a device that would be "
            f"{plain(expected)} records on average, which is why δ should be well below one over that "
            "number. Gaussian noise does not fail in that way: its guarantee weakens little by little, in "
            "rare cases.",
        ),
    )
    yield Section("What makes it true", tuple(_means(comparison)))
    yield Section(
        "What has to hold",
        (*statement.assumptions, "Each device keeps one ledger for its data, and counts this job in it."),
    )
    yield Section(
        "What is not covered",
        (
            f"A person or a device as a whole: who has k records on a device is covered by roughly k·ε; with "
            f"10 records that is {plain(10 * epsilon)}, which {_worth(10 * epsilon)}.",
            "That a device takes part, and when: the broker sees it.",
            "Other jobs on the same records: their ε and δ add to these, up to the device's own budget.",
            "Choosing clip norm, learning rate or this very plan by trying them on the private data.",
            "False updates, code that runs on the board, and what others tell about a person.",
        ),
    )


def guessing(epsilon: float, delta: float) -> float:
    """The greatest chance of a right guess between two equally likely data sets: (e^ε + δ)/(1 + e^ε)."""
    shrunk = math.exp(-epsilon)
    return (1 + delta * shrunk) / (1 + shrunk)


def detection(epsilon: float, delta: float, false_alarms: float) -> float:
    """The greatest share of records found by a test with that share of false alarms."""
    shrunk = math.exp(-epsilon)
    steep = math.inf if epsilon > 700 else math.exp(epsilon) * false_alarms + delta
    return min(1.0, steep, 1 - shrunk * max(0.0, 1 - delta - false_alarms))


def _means(comparison: Comparison) -> Iterator[str]:
    target, chosen = comparison.target, comparison.chosen
    sigmas = chosen.plan.noise_multipliers
    span = (
        f"{figure(sigmas[0])} in every round"
        if sigmas[0] == sigmas[-1]
        else f"{figure(sigmas[0])} in round 1 and {figure(sigmas[-1])} in round {target.rounds:,}"
    )
    yield (
        "Noise: a device clips every record's gradient to one clip norm, adds the lot up, and adds noise "
        f"whose deviation on each number is σ times what one record can change at most; here σ is {span}. "
        f"The sum of {target.devices:,} devices averages it out: the fleet's mean gradient carries noise of "
        f"about {figure(chosen.mean_noise[-1], 3)} clip norms in the last round."
    )
    yield (
        f"Sampling: a record is in a lot with probability {plain(target.sampling_rate)}, and nobody learns "
        f"which are. That makes a round cheaper, and is counted. In {target.rounds * target.local_steps:,} "
        f"lots a record is used about {target.rounds * target.local_steps * target.sampling_rate:,.4g} times."
        if target.sampling_rate < 1
        else "Sampling: every record is in every lot. A rate below 1 would make rounds cheaper."
    )
    yield (f"Schedule: {_rule(chosen.plan.schedule)} {verdict(comparison)} The total is the same for all.")
    half = comparison.target.rounds // 2
    if half:
        yield (
            "Accounting: the rounds' costs are added up as bounds on the whole job. Stopping at a round "
            f"fixed in advance costs less: {upwards(chosen.plan.epsilon_by_round[half - 1])} after round "
            f"{half:,}."
        )


def _rule(schedule: Schedule) -> str:
    return {
        "uniform": "uniform, so every round has the same share of the budget.",
        "incrementing": "incrementing, so each round has a little more of the budget than the last.",
        "linear": f"linear, so a round's budget rises to {plain(schedule.ratio)} times the first round's.",
    }.get(schedule.kind, f"{schedule.kind}, with the shares that were given.")


def _bound(share: float) -> str:
    return f"{upwards(100 * share, 1)} %"


def _worth(epsilon: float) -> str:
    if epsilon >= _WEAK_EPSILON:
        return "is worth little"
    return f"is right at most {_bound(guessing(epsilon, 0.0))} of the time from even odds"
