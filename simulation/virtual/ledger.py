"""The ledger of a virtual fleet. All devices pay the same for the same rounds, so one ledger stands for all.

It is an agent's own, in a state directory of an agent: each round is admitted by an agent's rules and charged
before a record is read, and ``dpagent budget`` shows, verifies and exports it.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing, contextmanager
from datetime import UTC, datetime
from pathlib import Path
from typing import Final

import numpy as np

from agent.admission import admit
from agent.charges import Budget
from agent.columns import account_name
from agent.custody import begin_ledger
from agent.heads import LedgerFiles, second_head_beside
from agent.limit_settings import LimitSettings
from agent.priced_charges import charge_of
from agent.replay import replay
from agent.rounds import RoundState
from agent.state import AgentState
from dpagent.clock import SystemClock
from dpagent.learning.data.dataset import ArrayDataset
from dpagent.privacy.statement import Trust
from dpagent.protocol.mixing import plan_digest
from dpagent.protocol.task import RoundTask
from simulation.settings import DataForm
from simulation.virtual.settings import VirtualSettings

_MAXIMUM_CHARGES: Final = 20_000


class VirtualLedger:
    """Admits and charges rounds, as each device would.

    Args:
        settings: Of the run.
        state: An agent's.
    """

    def __init__(self, settings: VirtualSettings, state: AgentState) -> None:
        self._state, self._name = state, settings.ledger_name
        self._nothing = _no_records(settings.form)
        self._limits = LimitSettings(
            messages_per_second=100.0,
            minimum_compute_slot_s=0.001,
            minimum_jitter_window_s=0.0,
            minimum_fragments=1,
            maximum_charges=_MAXIMUM_CHARGES,
            methods=(settings.method,),
            trust=(settings.mechanism.trust,),
        )

    def charge(self, task: RoundTask) -> None:
        """Charge a round, unless it is: then it is run again under the charge that it has.

        Raises:
            Declined, BeyondLimitError: No device would take part.
            StorageError: The charge is not durable.
        """
        plan = task.plan
        known = self._state.round(plan.job.hex(), plan.round)
        if known is not None and known.state is RoundState.CHARGED:
            return
        # Virtual rounds have no deadline: what it is compared with is as early as it.
        prices = admit(
            task, self._nothing, self._state.ledger.books, self._name, self._limits, now=-plan.compute_slot_s
        )
        now = SystemClock().unix()
        charged_at = datetime.fromtimestamp(now, UTC).isoformat(timespec="seconds")
        self._state.offer(plan.job.hex(), plan.round, plan_digest(plan), now)
        self._state.charge([charge_of(task, each, charged_at=charged_at) for each in prices], now)


@contextmanager
def opened_ledger(settings: VirtualSettings, state_dir: Path) -> Iterator[VirtualLedger]:
    """The ledger of a run, begun if there is none.

    Raises:
        LedgerError: It does not verify, or is older than its second head.
        StateInUseError, StorageError: It cannot be used.
    """
    files = LedgerFiles(state_dir, second_head_beside(state_dir))
    budgets = _budgets(settings)
    if not files.second_head.exists():
        begin_ledger(files, budgets)
    with closing(AgentState(files, budgets, check=replay)) as state:
        yield VirtualLedger(settings, state)


def _budgets(settings: VirtualSettings) -> dict[str, Budget]:
    """What the job costs, in each account that it is charged to."""
    wanted = Budget(settings.epsilon, settings.delta)
    if settings.mechanism.trust is not Trust.COORDINATOR:
        return {settings.ledger_name: wanted}
    return {
        settings.ledger_name: Budget(settings.device_noise or settings.epsilon, settings.delta),
        account_name(settings.ledger_name, Trust.COORDINATOR): wanted,
    }


def _no_records(form: DataForm) -> ArrayDataset:
    """A data set of the devices' form: what is admitted depends on no record."""
    return ArrayDataset(np.zeros((0, *form.shape), form.dtype), np.zeros(0, np.int64), form.classes)
