"""The ledgers of simulated devices, begun as integrators of real ones begin theirs: on purpose, and once."""

from __future__ import annotations

from agent.custody import begin_ledger
from agent.settings import load_agent_settings
from simulation.layout import Layout


def begin_ledgers(layout: Layout, devices: int) -> None:
    """Begin the ledger of every device that has never had one.

    Args:
        layout: Where the configurations are, already written.
        devices: How many there are.

    Raises:
        DpagentError: One cannot be begun.
    """
    for number in range(1, devices + 1):
        settings = load_agent_settings(layout.agent_file(number))
        if not settings.ledger_files.second_head.exists():
            begin_ledger(settings.ledger_files, settings.lifetime_budgets)
