"""A job's guarantee in plain words, with its numbers: what is hidden, from whom, how well; what is not."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, Final

from coordinator.job import Job
from dpagent.notation import plain_bound, upwards
from dpagent.privacy.odds import guessing
from dpagent.privacy.statement import BudgetStatement, Trust, Unit

_LARGEST_EXPONENT: Final = 20.0
"""Above, e^ε is a number that says nothing to anybody."""


def columns_of(promised: Sequence[BudgetStatement], spent: Sequence[BudgetStatement]) -> list[dict[str, Any]]:
    """The figures of a job, a column each, never added: what it may cost, what it has cost, and what is left.

    Args:
        promised: of whoever takes part in all rounds (:func:`coordinator.columns.promised_by`).
        spent: so far (:func:`coordinator.columns.spent_in`).
    """
    targets = {each.scope: each for each in promised}
    figures = {each.scope: each for each in spent}
    return [_column(targets.get(scope), figures.get(scope)) for scope in dict.fromkeys((*targets, *figures))]


def _column(target: BudgetStatement | None, spent: BudgetStatement | None) -> dict[str, Any]:
    known = target or spent
    assert known is not None
    most, so_far = _epsilon(target), 0.0 if spent is None else _epsilon(spent)
    is_bounded = most is not None and so_far is not None
    return {
        "unit": str(known.unit),
        "unit_in_words": known.unit.meaning,
        "adjacency": str(known.adjacency),
        "trust": str(known.trust),
        "trust_in_words": known.trust.meaning,
        "delta": known.delta if known.is_guarantee else None,
        "target": most,
        "spent": so_far,
        "left": max(0.0, most - so_far) if is_bounded and most is not None and so_far is not None else None,
        "is_guarantee": known.is_guarantee,
        "assumptions": list((spent or known).assumptions),
    }


def _epsilon(statement: BudgetStatement | None) -> float | None:
    return statement.epsilon if statement is not None and math.isfinite(statement.epsilon) else None


def in_words(job: Job, promised: Sequence[BudgetStatement]) -> list[dict[str, Any]]:
    """The statement, as titles with paragraphs.

    Args:
        job: whose it is.
        promised: its figures, its own guarantee first.
    """
    own = promised[0]
    if not own.is_guarantee:
        nothing = (
            "Nothing. This job runs under a method, or a noise cap, without a proof. Whoever sees the models "
            "can learn of single records, and the ledgers of the boards say so."
        )
        return [{"title": "What is guaranteed", "paragraphs": [nothing]}]
    hidden = [
        f"Hidden is {own.unit.meaning}: its {own.adjacency.meaning}, from everybody who sees all messages of "
        f"the job and all of its models. Trusted: {own.trust.meaning}.",
        _odds(own),
    ]
    hidden += [
        f"Besides, trusting {each.trust.meaning}: {each.sentence()}. The figures are never added."
        for each in promised[1:]
    ]
    hidden += list(own.assumptions)
    not_hidden = [
        "That a board takes part, and when: the broker sees that.",
        "What other jobs cost: a board that takes part in several adds them up in its own ledger, and "
        "declines the job that would exceed its budget.",
        "What was tried before: choosing settings by trials on private data costs budget that nobody counts.",
    ]
    if own.unit is Unit.RECORD:
        not_hidden.insert(
            0, "A person, or a board, with many records: for k of them, ε is about k times as large."
        )
    if own.trust is Trust.COORDINATOR:
        not_hidden.insert(0, "Anything from this coordinator: it sees the updates before it adds the noise.")
    not_hidden.append(
        "False updates: one that no honest board sends is rejected by its norm, but a dishonest board may "
        "pull the model a little in every round."
    )
    return [
        {"title": "What is guaranteed", "paragraphs": hidden},
        {"title": "What is not", "paragraphs": not_hidden},
    ]


def _odds(own: BudgetStatement) -> str:
    chance = guessing(own.epsilon, own.delta)
    share = f"{math.ceil(1e4 * chance * (1 - 1e-12)) / 100:.2f} %" if chance < 0.9999 else "nearly all"
    change = f"e^{upwards(own.epsilon, 2)}"
    if own.epsilon <= _LARGEST_EXPONENT:
        change = f"{upwards(math.exp(own.epsilon), 1)}"
    return (
        f"The whole job costs at most ε = {upwards(own.epsilon)} at δ = {plain_bound(own.delta)}. Whoever "
        f"knows all else sees their odds change at most {change}-fold, apart from δ; from even odds, a guess "
        f"is right in at most {share} of all cases."
    )
