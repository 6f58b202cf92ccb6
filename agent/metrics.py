"""A board's metrics, for Prometheus: opt-in, and no more than others may see (:mod:`agent.disclosed`)."""

from __future__ import annotations

import math
from collections.abc import Iterator

from prometheus_client import CollectorRegistry
from prometheus_client.core import GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from agent.disclosed import Disclosed, DisclosedAccount, Look, disclosed
from agent.settings import AgentSettings
from dpagent import __version__


def registry_of(settings: AgentSettings, look: Look) -> CollectorRegistry:
    """A board's metrics, read when they are asked for.

    Args:
        settings: ``agent.yaml``, with the profile's.
        look: at the board.
    """
    registry = CollectorRegistry(auto_describe=False)
    registry.register(_Board(settings, look))
    return registry


class _Board(Collector):
    def __init__(self, settings: AgentSettings, look: Look) -> None:
        self._settings, self._look = settings, look

    def collect(self) -> Iterator[Metric]:
        """All of them; the library calls this."""
        yield _gauge("dpagent_agent_build_info", "The version of dpagent.", 1, version=__version__)
        board = disclosed(self._settings, self._look())
        for name, text, value in _figures(board):
            if value is not None:
                yield _gauge(f"dpagent_agent_{name}", text, value)
        yield from _budget(board.accounts)


def _figures(board: Disclosed) -> Iterator[tuple[str, str, float | None]]:
    yield "up", "Whether the agent runs.", board.runs
    yield "connected", "Whether it is connected to its broker.", board.is_connected
    yield "ledger_readable", "Whether its ledger can be read.", board.is_ledger_readable
    yield "announced_round", "The round that the plan announces.", board.round
    yield "announced_rounds", "Rounds of the announced job.", board.rounds
    yield "job_finished", "Whether the announced job is over.", board.is_job_over
    yield "last_receipt_timestamp_seconds", "When a fragment was last confirmed.", board.last_receipt_at
    yield (
        "certificate_end_timestamp_seconds",
        "When the board's certificate ends.",
        board.certificate_ends_at,
    )


def _budget(accounts: tuple[DisclosedAccount, ...]) -> Iterator[Metric]:
    for name, text in (
        ("budget", "ε for the device's life."),
        ("reserved", "ε that jobs have reserved."),
        ("spent", "ε that rounds have spent."),
    ):
        family = GaugeMetricFamily(f"dpagent_agent_epsilon_{name}", text, labels=("account",))
        for each in accounts:
            value: float | None = getattr(each, name)
            if value is not None:
                family.add_metric((each.name,), value if math.isfinite(value) else math.inf)
        if family.samples:
            yield family


def _gauge(name: str, text: str, value: float, **labels: str) -> Metric:
    family = GaugeMetricFamily(name, text, labels=tuple(labels))
    family.add_metric(tuple(labels.values()), value)
    return family
