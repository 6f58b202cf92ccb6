"""A plan's guarantee in plain words, with the plan's numbers."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final

from cli.notation import factor, figure, percent, plain
from cli.plan.comparison import Comparison
from cli.plan.page import fill, headline, setting, verdict
from dpagent.errors import ParameterError
from dpagent.notation import plain_bound, upwards
from dpagent.privacy.accounting.groups import group_event
from dpagent.privacy.events import ApproximateEvent
from dpagent.privacy.odds import detection, guessing
from dpagent.privacy.schedules import Schedule
from dpagent.wording import counted

_GAUSSIAN_DELTA: Final = (
    "Gaussian noise does not fail in that way: its guarantee weakens gradually, in rare cases."
)
_LAPLACE_DELTA: Final = "Laplace noise alone needs no δ: here it pays for a tighter sum over the rounds."
_FALSE_ALARMS: Final = 0.01
_WEAK_EPSILON: Final = 8.0
_GROUP: Final = 10


@dataclass(frozen=True, slots=True)
class _Scope:
    """The words for what is hidden from whom.

    Attributes:
        against: against whom the guarantee holds.
        unknown: what the attacker does not know; and what changes the odds, a plural.
        found: which units a test finds.
        people: what does not follow for a person.
        among: of whom a δ reveals some, the units' place.
        data: of other jobs, which add to this one.
    """

    against: str
    unknown: str
    found: str
    people: str
    among: str
    data: str


_RECORDS: Final = _Scope(
    "the broker, the coordinator, all other devices and every user of the model, even if they collude and "
    "record everything.",
    "whether one record is present: all other records, the program, the plan, and every message of the job. "
    "The device's messages",
    "records that are present",
    "A person or a device as a whole: a person with k records on a device has roughly k·ε; with 10 records "
    "that is {group}, which {worth}.",
    "a device",
    "records",
)
_DEVICES: Final = _Scope(
    "the broker, all other devices and every user of the models, even if they collude and record everything; "
    "but not against the coordinator, which sees every update.",
    "whether one device sent its update or zeros: all other updates, the program, the plan, and the model of "
    "every round. These models",
    "devices that sent their updates",
    "A person whose records are on k devices has roughly k·ε; with 10 devices that is {group}, which "
    "{worth}.",
    "a fleet",
    "device",
)


@dataclass(frozen=True, slots=True)
class Section:
    """A title and its text, one string per paragraph."""

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
    """The explanation, in reading order."""
    target, statement = comparison.target, comparison.statement
    epsilon, delta, unit = statement.epsilon, statement.delta, statement.unit
    scope = _DEVICES if target.sums_updates else _RECORDS
    yield Section(
        "What is protected",
        (
            f"Unit: {unit.meaning}. Adjacency: {statement.adjacency}, which hides its "
            f"{statement.adjacency.meaning}. Trusted: {statement.trust.meaning}. So the "
            f"guarantee holds against {scope.against}",
            *_against_the_coordinator(comparison),
        ),
    )
    yield Section(
        f"What ε = {plain_bound(epsilon)} means",
        (
            f"Assume an attacker who knows everything except {scope.unknown} change the "
            f"attacker's odds at most {factor(epsilon)}-fold (e^ε), apart from δ. From even odds, a guess "
            f"is correct at most {_bound(guessing(epsilon, delta))} of the time. A test with "
            f"{percent(_FALSE_ALARMS, 0)} false positives detects at most "
            f"{_bound(detection(epsilon, delta, _FALSE_ALARMS))} of the {scope.found}.",
            "These are bounds for the best possible attack; a typical attack achieves less.",
            *(
                (f"With ε = {plain_bound(epsilon)} these bounds are weak. Lower ε, if the accuracy allows.",)
                if epsilon >= _WEAK_EPSILON
                else ()
            ),
        ),
    )
    units = target.devices if target.sums_updates else target.records_per_device
    yield Section(
        f"What δ = {plain_bound(delta)} means",
        (
            f"An allowance beyond ε: in the worst case, a {unit} is revealed entirely with a probability "
            f"of {plain_bound(delta)}. Over the {counted(units, unit)} of {scope.among} that "
            f"is {plain_bound(delta * units)} of them on average, so δ should be well below one over that "
            f"number. "
            f"{_LAPLACE_DELTA if comparison.shares_epsilon else _GAUSSIAN_DELTA}",
        ),
    )
    yield Section("Why it holds", tuple(_means(comparison)))
    yield Section(
        "Assumptions",
        (*statement.assumptions, "Each device keeps one ledger for its data, and charges this job to it."),
    )
    yield Section(
        "What is not covered",
        (
            scope.people.format(group=plain_bound(_GROUP * epsilon), worth=_worth(epsilon, delta)),
            "Participation: the broker sees that a device takes part, and when.",
            f"Other jobs on the same {scope.data}: their ε and δ add to these, up to the device's own "
            "budget.",
            "Choosing clip norm, learning rate or this plan by trials on the private data.",
            "False updates, code that runs on the board, and other sources about a person.",
        ),
    )


def _means(comparison: Comparison) -> Iterator[str]:
    target, chosen = comparison.target, comparison.chosen
    sigmas = chosen.plan.noise_multipliers
    span = (
        f"{figure(sigmas[0])} in every round"
        if sigmas[0] == sigmas[-1]
        else f"{figure(sigmas[0])} in round 1 and {figure(sigmas[-1])} in round {target.rounds:,}"
    )
    width = "scale" if comparison.shares_epsilon else "deviation"
    if target.sums_updates:
        yield (
            "Noise: a device clips the change of its weights, whole, to one clip norm; the coordinator adds "
            f"the updates up, and adds noise once. On each coordinate it has a {width} of σ times the "
            f"sensitivity; here σ is {span}. Divided by {counted(target.devices, 'device')}, the fleet's "
            f"mean update has noise of about {figure(chosen.mean_noise[-1], 3)} clip norms in the last round."
        )
        yield "Sampling: every device that takes part counts in every round; none is drawn in secret."
    else:
        yield from _means_of_lots(comparison, width, span)
    yield (f"Schedule: {_rule(chosen.plan.schedule)} {verdict(comparison)} The total is the same for all.")
    half = comparison.target.rounds // 2
    if half:
        yield (
            "Accounting: the figure bounds the composition of all rounds. Stopping at a round "
            f"fixed in advance costs less: {upwards(chosen.plan.epsilon_by_round[half - 1])} after round "
            f"{half:,}."
        )


def _means_of_lots(comparison: Comparison, width: str, span: str) -> Iterator[str]:
    target, chosen = comparison.target, comparison.chosen
    yield (
        "Noise: a device clips every record's gradient to one clip norm, adds up the lot, and adds noise. "
        f"On each coordinate the noise has a {width} of σ times the sensitivity; here σ is {span}. "
        f"Averaging over {counted(target.devices, 'device')} reduces it: the fleet's mean gradient has "
        f"noise of about {figure(chosen.mean_noise[-1], 3)} clip norms in the last round."
    )
    yield (
        f"Sampling: a record is in a lot with probability {plain(target.sampling_rate)}, and the lot stays "
        "secret. That reduces the privacy cost of a round. In "
        f"{counted(target.rounds * target.local_steps, 'lot')} a record is used about "
        f"{target.rounds * target.local_steps * target.sampling_rate:,.4g} times."
        if target.sampling_rate < 1
        else "Sampling: every record is in every lot. A rate below 1 would make rounds cheaper."
    )


def _against_the_coordinator(comparison: Comparison) -> Iterator[str]:
    """What noise of devices gives besides, if they add any."""
    if (statement := comparison.device_statement) is not None:
        yield (
            f"Against the coordinator too, everybody together: ε = {plain_bound(statement.epsilon)}, for any "
            "other records on the device, by the noise that it adds to its own update. The two figures are "
            "never added."
        )


def _rule(schedule: Schedule) -> str:
    return {
        "uniform": "uniform; every round has the same share of the budget.",
        "incrementing": "incrementing; each round has slightly more of the budget than the last.",
        "linear": f"linear; the budget of a round rises to {plain(schedule.ratio)} times the first round's.",
    }.get(schedule.kind, f"{schedule.kind}, with the given shares.")


def _bound(share: float) -> str:
    return f"{upwards(100 * share, 1)} %"


def _worth(epsilon: float, delta: float) -> str:
    """What a guarantee for one unit is for ten, whose δ is more than ten times as large."""
    try:
        group = group_event(ApproximateEvent(epsilon, delta), _GROUP)
    except ParameterError:  # Of a group of so many, nothing is left of δ.
        return "protects little"
    if group.epsilon >= _WEAK_EPSILON:
        return "protects little"
    return f"limits a guess from even odds to {_bound(guessing(group.epsilon, group.delta))}"
