"""A board's metrics, for Prometheus: opt-in, and no more than others may see.

They are read beside the running agent, as ``dpagent status`` reads. What they hold is what the broker sees,
what `agent.yaml` and the plans say, and what the ledger has reserved and spent. Left out, as
from a file for support, is what may tell of records or of the time that training takes: temperature, load,
memory, room on the disk, and when a model was kept, which needs room that records may take. Where
``limits.dummy_traffic`` hides whether the board takes part in a round, so do its metrics: what is reserved,
spent and receipted is left out.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from pathlib import Path

from cryptography import x509
from prometheus_client import CollectorRegistry
from prometheus_client.core import GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from agent.overview import Account, Overview
from agent.settings import AgentSettings
from agent.status import Doing, Link
from dpagent import __version__


def registry_of(settings: AgentSettings, look: Callable[[], Overview]) -> CollectorRegistry:
    """A board's metrics, read when they are asked for.

    Args:
        settings: ``agent.yaml``, with the profile's.
        look: at the board (:func:`agent.overview.overview_of`).
    """
    registry = CollectorRegistry(auto_describe=False)
    registry.register(_Board(settings, look))
    return registry


class _Board(Collector):
    def __init__(self, settings: AgentSettings, look: Callable[[], Overview]) -> None:
        self._settings, self._look = settings, look

    def collect(self) -> Iterator[Metric]:
        """All of them; the library calls this."""
        overview = self._look()
        status, hides = overview.status, self._settings.limits.dummy_traffic
        yield _gauge("dpagent_agent_build_info", "The version of dpagent.", 1, version=__version__)
        yield _gauge("dpagent_agent_up", "Whether the agent runs.", overview.runs)
        yield _gauge(
            "dpagent_agent_connected", "Whether it is connected to its broker.",
            overview.runs and status is not None and status.link is Link.CONNECTED,
        )  # fmt: skip
        yield _gauge(
            "dpagent_agent_ledger_readable", "Whether its ledger can be read.", overview.problem is None
        )
        if status is not None and status.round is not None:
            announced = status.round
            yield _gauge(
                "dpagent_agent_announced_round", "The round that the plan announces.", announced.round
            )
            yield _gauge("dpagent_agent_announced_rounds", "Rounds of the announced job.", announced.rounds)
            yield _gauge(
                "dpagent_agent_job_finished", "Whether the announced job is over.",
                announced.doing is Doing.FINISHED,
            )  # fmt: skip
        yield from _budget(overview.accounts, hides=hides)
        if not hides and overview.last_receipt_at is not None:
            yield _gauge(
                "dpagent_agent_last_receipt_timestamp_seconds", "When a fragment was last confirmed.",
                overview.last_receipt_at,
            )  # fmt: skip
        if (ends_at := _end_of(self._settings.mqtt.cert_file)) is not None:
            yield _gauge(
                "dpagent_agent_certificate_end_timestamp_seconds",
                "When the board's certificate ends.",
                ends_at,
            )


def _budget(accounts: tuple[Account, ...], *, hides: bool) -> Iterator[Metric]:
    figures: list[tuple[str, str, Callable[[Account], float]]] = [
        ("budget", "ε for the device's life.", lambda each: each.epsilon_budget),
    ]
    if not hides:
        figures += [
            ("reserved", "ε that jobs have reserved.", lambda each: each.epsilon_reserved),
            ("spent", "ε that rounds have spent.", lambda each: each.epsilon_spent),
        ]
    for name, text, figure in figures:
        family = GaugeMetricFamily(f"dpagent_agent_epsilon_{name}", text, labels=("account",))
        for each in accounts:
            value = figure(each)
            family.add_metric((each.name,), value if math.isfinite(value) else math.inf)
        yield family


def _end_of(file: Path | None) -> float | None:
    try:
        data = None if file is None else file.read_bytes()
        return None if data is None else x509.load_pem_x509_certificate(data).not_valid_after_utc.timestamp()
    except (OSError, ValueError):
        return None


def _gauge(name: str, text: str, value: float, **labels: str) -> Metric:
    family = GaugeMetricFamily(name, text, labels=tuple(labels))
    family.add_metric(tuple(labels.values()), value)
    return family
