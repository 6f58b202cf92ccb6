"""Metrics of a coordinator, for Prometheus: read when they are asked for, from what the page shows.

Counts and figures of the fleet alone, nothing of a board: fragments have no sender, and the budgets of single
devices are the auditor's.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Iterator
from typing import Any

from prometheus_client import CollectorRegistry
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.exposition import choose_encoder
from prometheus_client.registry import Collector

from coordinator.page.health import certificates, free_bytes
from coordinator.page.view import View
from coordinator.queued_job import JobState
from coordinator.settings import CoordinatorSettings
from dpagent import __version__
from dpagent.errors import DpagentError


class Metrics(Collector):
    """The metrics of one coordinator.

    Args:
        settings: ``fleet.yaml``.
        view: reads what is shown.
    """

    def __init__(self, settings: CoordinatorSettings, view: View) -> None:
        self._settings, self._view = settings, view
        self._registry = CollectorRegistry(auto_describe=False)
        self._registry.register(self)

    def exposed(self, accept: str) -> tuple[bytes, str]:
        """The metrics as text, and their media type.

        Args:
            accept: the formats that are wanted, as the header ``Accept`` has them.
        """
        encode, kind = choose_encoder(accept)
        return encode(self._registry), kind

    def collect(self) -> Iterator[Metric]:
        """All of them; the library calls this."""
        state = self._view.state()
        yield _gauge("dpagent_build_info", "The version of dpagent.", 1, version=__version__)
        yield from self._of_daemon(state)
        states = Counter(each["state"] for each in state["jobs"])
        yield _gauges(
            "dpagent_jobs",
            "Jobs in the queue, by state.",
            ("state",),
            [((str(s),), states[s]) for s in JobState],
        )
        yield from self._of_current(state)
        yield from self._of_open(state["open"])
        yield from self._of_workers(state["workers"])
        yield from self._of_machine()

    def _of_daemon(self, state: dict[str, Any]) -> Iterator[Metric]:
        daemon = state["coordinator"]
        yield _gauge("dpagent_coordinator_up", "Whether the coordinator runs.", daemon["runs"])
        yield _gauge(
            "dpagent_coordinator_readable", "Whether its database could be read.", state["problem"] is None
        )
        yield _gauge(
            "dpagent_broker_connected",
            "Whether the coordinator is connected to its broker.",
            daemon["connected"],
        )
        if "seen_at" in daemon:
            yield _gauge(
                "dpagent_coordinator_seen_timestamp_seconds", "The coordinator's last sign of life.",
                daemon["seen_at"],
            )  # fmt: skip
            yield _counter(
                "dpagent_mqtt_received_bytes",
                "Payloads and topics received since its start.",
                daemon["received"],
            )
            yield _counter(
                "dpagent_mqtt_published_bytes", "Payloads and topics published since its start.",
                daemon["published"],
            )  # fmt: skip

    def _of_current(self, state: dict[str, Any]) -> Iterator[Metric]:
        """The job that goes on, or that ended last."""
        if state["current"] is None:
            return
        try:
            job = self._view.job(state["current"])
        except DpagentError:
            return  # It was removed with its database, or that cannot be read; dpagent_coordinator_readable.
        name, rows = job["name"], job["rows"]
        yield _gauge("dpagent_job_running", "Whether the job has begun and is not over.",
                     job["begun_at"] is not None and not job["is_over"], dpagent_job=name)  # fmt: skip
        yield _gauge("dpagent_job_paused", "Whether the job is paused.", job["paused"], dpagent_job=name)
        yield _gauge(
            "dpagent_job_in_trouble", "Whether the coordinator has paused the job by itself.",
            job["trouble"] is not None, dpagent_job=name,
        )  # fmt: skip
        yield _gauge("dpagent_job_rounds", "Rounds of the job.", job["rounds"], dpagent_job=name)
        yield _counter(
            "dpagent_job_rounds_closed", "Rounds of the job that are closed.", job["closed"], dpagent_job=name
        )
        scope = ("dpagent_job", "unit", "trust")
        for key, text in (
            ("spent", "ε of the job's rounds that are over."),
            ("target", "ε of the whole job."),
        ):
            yield _gauges(
                f"dpagent_job_epsilon_{key}", text, scope,
                [((name, each["unit"], each["trust"]), each[key])
                 for each in job["columns"] if each[key] is not None],
            )  # fmt: skip
        for key, metric, text in (
            ("accuracy", "dpagent_job_accuracy_ratio", "Test accuracy of the last model."),
            ("loss", "dpagent_job_loss", "Mean cross-entropy of the last model, in nats."),
            ("least", "dpagent_job_last_round_devices", "Boards in the scarcest block of the last round."),
            ("closed_at", "dpagent_job_last_closed_timestamp_seconds", "When the last round closed."),
        ):
            known = [value for value in rows[key] if value is not None]
            if known:
                yield _gauge(metric, text, known[-1], dpagent_job=name)
        yield _gauge(
            "dpagent_job_minimum_devices", "Boards that a block needs for a round to close.",
            job["minimum_devices"], dpagent_job=name,
        )  # fmt: skip
        family = CounterMetricFamily(
            "dpagent_job_messages_not_counted", "Messages of the job that did not count.",
            labels=("dpagent_job", "reason"),
        )  # fmt: skip
        for each in (*job["counters"]["rejected"], *job["counters"]["others"]):
            family.add_metric((name, each["reason"]), each["count"])
        yield family

    def _of_open(self, current: dict[str, Any] | None) -> Iterator[Metric]:
        yield _gauge("dpagent_round_open", "Whether a round is open.", current is not None)
        if current is None:
            return
        name = current["job"]
        for key, metric, text in (
            ("round", "dpagent_round_number", "The open round."),
            ("opened_at", "dpagent_round_opened_timestamp_seconds", "When it opened."),
            ("deadline", "dpagent_round_deadline_timestamp_seconds", "Its deadline."),
            ("counted", "dpagent_round_fragments", "Fragments that count in it so far."),
            ("expected", "dpagent_round_fragments_expected", "Fragments of all boards."),
            ("least", "dpagent_round_devices", "Boards in its scarcest block."),
            ("devices", "dpagent_round_devices_expected", "Boards that are expected."),
        ):
            yield _gauge(metric, text, current[key], dpagent_job=name)
        if (members := current["participation"]) is not None:
            yield _gauge(
                "dpagent_round_members", "Members of the fleet.", members["members"], dpagent_job=name
            )
            yield _gauge(
                "dpagent_round_members_taking_part", "Members that were granted tokens for it.",
                members["takes_part"], dpagent_job=name,
            )  # fmt: skip

    def _of_workers(self, workers: list[dict[str, Any]] | None) -> Iterator[Metric]:
        """Where several programs count. Those that have ended would leave series for ever: they have none."""
        if workers is None:
            return
        counting = [each for each in workers if each["counts"]]
        yield _gauge("dpagent_workers", "Workers that count fragments.", len(counting))
        seen = Counter[str]()
        fragments = Counter[str]()
        for each in counting:
            seen[each["name"]] = max(seen[each["name"]], round(time.time() - each["seen_s"]))
            fragments[each["name"]] += each["fragments"]
        yield _gauges(
            "dpagent_worker_seen_timestamp_seconds", "A worker's last sign of life.", ("worker",),
            [((name,), at) for name, at in seen.items()],
        )  # fmt: skip
        family = CounterMetricFamily(
            "dpagent_worker_fragments", "Fragments that a worker has counted.", labels=("worker",)
        )
        for name, count in fragments.items():
            family.add_metric((name,), count)
        yield family

    def _of_machine(self) -> Iterator[Metric]:
        if (free := free_bytes(self._settings)) is not None:
            yield _gauge("dpagent_disk_free_bytes", "Room on the disk of the state directory.", free)
        yield _gauges(
            "dpagent_certificate_end_timestamp_seconds", "When a certificate ends.", ("certificate",),
            [((each.what,), each.ends_at) for each in certificates(self._settings)],
        )  # fmt: skip


def _gauge(name: str, text: str, value: float, **labels: str) -> Metric:
    return _gauges(name, text, tuple(labels), [(tuple(labels.values()), value)])


def _gauges(
    name: str, text: str, labels: tuple[str, ...], values: list[tuple[tuple[str, ...], float]]
) -> Metric:
    family = GaugeMetricFamily(name, text, labels=labels)
    for each, value in values:
        family.add_metric(each, value)
    return family


def _counter(name: str, text: str, value: float, **labels: str) -> Metric:
    family = CounterMetricFamily(name, text, labels=tuple(labels))
    family.add_metric(tuple(labels.values()), value)
    return family
