"""The pricing process: ``python -m agent.pricing_program DESCRIPTOR``, started by :mod:`agent.pricing`."""

from __future__ import annotations

import numpy as np

from agent.admission import JobPrices, admit, require_finite
from agent.errand_program import answer
from agent.plan_limits import require_within
from agent.priced_charges import charge_of
from agent.pricing_messages import Priced, PriceQuestion, ReplayQuestion
from agent.replay import replay
from dpagent.learning.data.dataset import ArrayDataset
from dpagent.protocol.task import RoundTask
from dpagent.resident_memory import stay_in_memory


def answered(question: PriceQuestion | ReplayQuestion) -> Priced | None:
    """The answer to a question.

    Raises:
        DpagentError: the round may not run, or the ledger is wrong; the text says why.
    """
    match question:
        case PriceQuestion():
            return priced(question)
        case ReplayQuestion(records=records):
            replay(records)
            return None


def priced(question: PriceQuestion) -> Priced:
    """What a round costs.

    Raises:
        DpagentError: it may not run.
    """
    task = RoundTask.of(question.plan)
    if question.is_charged:  # The device's limits may have changed since.
        require_within(task, question.limits)
        return Priced(())
    weights = task.weights_from(question.weights)
    require_finite(weights)
    task.release.require_derived(weights)
    form, known = question.form, JobPrices(question.known)
    nothing = ArrayDataset(
        np.zeros((0, *form.shape), form.dtype), np.zeros(0, np.int64), form.classes, form.class_names
    )
    prices = admit(
        task, nothing, question.books, question.dataset, question.limits, now=question.now, known=known
    )
    return Priced(tuple(charge_of(task, each, charged_at="") for each in prices), dict(known))


if __name__ == "__main__":
    stay_in_memory()
    answer(answered)
