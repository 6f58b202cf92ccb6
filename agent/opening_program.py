"""The process of an agent's start: ``python -m agent.opening_program DESCRIPTOR``, started by
:mod:`agent.opening`."""

from __future__ import annotations

from typing import cast

from agent.data_form import DataForm
from agent.errand_program import answer
from agent.first_rows import open_records
from agent.opening import OpenQuestion
from agent.pricing_messages import ReplayQuestion
from agent.replay import replay
from agent.row_files import CACHED_BYTES
from dpagent.learning.data.dataset import Dataset
from dpagent.learning.data.declared import DType
from dpagent.learning.data.opening import require_declared
from dpagent.learning.front_end.features import keep_in_memory, reserve
from dpagent.shared_blocks import take_own_blocks


def opened(question: OpenQuestion) -> DataForm:
    """The form of the records, once they are decoded and the features have their room.

    Raises:
        ConfigurationError, DataError, StorageError: as of :meth:`agent.opening.Opening.form`.
    """
    settings, state_dir = question.settings, question.state_dir
    require_declared(settings)
    dataset = open_records(settings, state_dir).dataset
    size = settings.features_mib << 20
    assert settings.max_records is not None  # or there were no records
    reserve(state_dir, size, settings.max_records)
    if size <= CACHED_BYTES:
        keep_in_memory(state_dir)
    return form_of(dataset)


def form_of(dataset: Dataset) -> DataForm:
    """The form of records."""
    return DataForm(dataset.shape, cast(DType, str(dataset.dtype)), dataset.classes, dataset.class_names)


def answered(question: OpenQuestion | ReplayQuestion) -> DataForm | None:
    """The answer to a question.

    Raises:
        DpagentError: the ledger is wrong, or the records cannot be opened; the text says why.
    """
    match question:
        case ReplayQuestion(records=records):
            replay(records)
            return None
        case OpenQuestion():
            take_own_blocks(question.state_dir)  # Here, and not where somebody has the ledger open.
            return opened(question)


if __name__ == "__main__":
    answer(answered)
