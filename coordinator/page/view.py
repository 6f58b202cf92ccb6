"""What the page shows, as plain values: read from the database beside the daemon, and never written.

Texts in it that others have a say in (names, reasons) are values of JSON; the page puts them in as text
alone.
"""

from __future__ import annotations

import contextlib
import json
import math
import time
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any, Final

from coordinator.budget_export import has_export
from coordinator.columns import promised_by, spent_in
from coordinator.database.opening import is_there
from coordinator.measurements import Measured
from coordinator.page.guarantee import columns_of, in_words
from coordinator.page.health import findings
from coordinator.page.rejections import rejections_of
from coordinator.participation import Participation, participation_of
from coordinator.queue import current_in, find
from coordinator.queued_job import QueuedJob
from coordinator.reader import RoundRecord, StoreReader
from coordinator.settings import CoordinatorSettings
from coordinator.shared_store import GONE_S
from coordinator.status import Link, Status, read_status
from dpagent.errors import DpagentError
from dpagent.learning.inference.model_bytes import metadata_of
from dpagent.privacy.methods import method_named
from dpagent.protocol.tokens import LINKABILITY_MEANINGS
from dpagent.status_file import Presence
from dpagent.wording import lasting

MOST_ORDERS: Final = 100
WORKERS_SEEN_S: Final = 3_600.0
"""How long a worker that has ended is shown."""
_MOST_MODEL_BYTES: Final = 256 << 20


class View:
    """What a coordinator keeps and does, for its page.

    Args:
        settings: ``fleet.yaml``.
    """

    def __init__(self, settings: CoordinatorSettings) -> None:
        self._settings = settings
        self._of_ended: dict[int, dict[str, Any]] = {}
        """What does not change of jobs that are over, by number."""
        self._class_names: dict[bytes, list[str]] = {}

    def state(self) -> dict[str, Any]:
        """What changes while somebody looks: the daemon, the queue, the open round, the last orders."""
        now = time.time()
        values: dict[str, Any] = {
            "at": now,
            "fleet": self._settings.fleet,
            "devices": self._settings.devices,
            "coordinator": self._coordinator(now),
            "health": [
                {"check": each.check, "verdict": str(each.verdict), "text": each.text, "remedy": each.remedy}
                for each in findings(self._settings, now)
            ],
            "jobs": [], "current": None, "open": None, "orders": [], "workers": None, "problem": None,
        }  # fmt: skip
        try:
            if not is_there(self._settings.store_place):
                return values
            with self._reader() as reader:
                jobs = reader.jobs()
                current = current_in(jobs)
                values["jobs"] = [self._job(reader, each) for each in jobs]
                values["current"] = None if current is None else current.name
                begun = next((each for each in jobs if each.is_open), None)
                if begun is not None:
                    values["open"] = self._open(reader, begun)
                values["orders"] = [asdict(each) for each in reader.orders(MOST_ORDERS)]
                if self._settings.store.url is not None:
                    values["workers"] = _workers(reader)
        except DpagentError as error:
            values["problem"] = str(error)
        return values

    def job(self, name: str, after: int = 0) -> dict[str, Any]:
        """A job, and its rounds after one of them.

        Raises:
            ConfigurationError: There is none of that name.
            StorageError: The database cannot be read.
        """
        with self._reader() as reader:
            queued = find(reader.jobs(), name)
            rounds = reader.rounds_of(queued.number)
            measured = reader.measured_of(queued.number)
            counters = reader.counters_of(queued.number)
            promised, spent = promised_by(queued.job), spent_in(queued.job, rounds)
            over = [each for each in rounds if each.is_over]
            evaluated = [each for each in over if each.number in measured and measured[each.number].by_class]
            last = measured[evaluated[-1].number] if evaluated else None
            return self._job(reader, queued) | {
                "columns": columns_of(promised, spent),
                "guarantee": in_words(queued.job, promised),
                "linkability": queued.job.linkability,
                "linkability_in_words": LINKABILITY_MEANINGS[queued.job.linkability],
                "minimum_devices": _minimum_of(queued),
                "settings": _flattened(json.loads(queued.settings)),
                "counters": rejections_of(counters),
                "rounds_from": after,
                "rows": _rows([each for each in over if each.number > after], measured),
                "classes": None if last is None else self._classes(queued, last, evaluated[-1].number),
                "majority_class_accuracy": None if last is None else last.majority_class_accuracy,
                "out_of_range": list(dict.fromkeys(layer for each in over for layer in each.out_of_range)),
                "downloads": self._downloads(queued),
            }

    def require(self, name: str) -> None:
        """See that there is a job of that name.

        Raises:
            ConfigurationError: There is none.
            StorageError: The database cannot be read.
        """
        with self._reader() as reader:
            find(reader.jobs(), name)

    def model_file(self, name: str) -> Path:
        """The file of a job's latest model.

        Raises:
            ConfigurationError: There is no such job.
            StorageError: The database cannot be read.
            FileNotFoundError: There is no model yet.
        """
        with self._reader() as reader:
            queued = find(reader.jobs(), name)
        file = self._latest_model(queued)
        if file is None:
            raise FileNotFoundError(name)
        return file

    @contextlib.contextmanager
    def _reader(self) -> Iterator[StoreReader]:
        with contextlib.closing(StoreReader(self._settings.store_place)) as reader:
            yield reader

    # The daemon.

    def _coordinator(self, now: float) -> dict[str, Any]:
        try:
            status = read_status(self._settings.state_dir)
        except DpagentError as error:
            return {"words": str(error), "verdict": "problem", "runs": False, "connected": False}
        verdict, words = daemon_in_words(status, now)
        values: dict[str, Any] = {"words": words, "verdict": verdict, "runs": False, "connected": False}
        if status is None:
            return values
        runs = status.presence() in (Presence.RUNS, Presence.ELSEWHERE)
        return values | {
            "runs": runs, "connected": runs and status.link is Link.CONNECTED, "broker": status.broker,
            "since": status.since, "reason": status.reason, "activity": status.activity,
            "received": status.received, "published": status.published, "seen_at": status.written_at,
        }  # fmt: skip

    # A job, and its open round.

    def _job(self, reader: StoreReader, queued: QueuedJob) -> dict[str, Any]:
        if queued.number in self._of_ended:
            return self._of_ended[queued.number]
        terms: Any = queued.job.terms
        values = reader.progress_of(queued.number)
        promised = promised_by(queued.job)[0]
        is_over = queued.state.is_over
        shown = {
            "name": queued.name, "id": queued.job.id.hex(), "state": str(queued.state),
            "words": queued.state_in_words(), "is_over": is_over, "paused": queued.is_paused,
            "trouble": queued.trouble_now, "rounds": queued.job.rounds, "closed": queued.closed_rounds,
            "over": queued.over_rounds,
            "method": terms["privacy"].get("method", "dp-sgd"), "model": terms["model"]["name"],
            "method_in_words": method_named(terms["privacy"].get("method", "dp-sgd")).title,
            "epsilon_spent": _finite(values.epsilon), "accuracy": values.accuracy,
            "epsilon_target": _finite(promised.epsilon), "delta": promised.delta,
            "added_at": queued.added_at, "begun_at": queued.begun_at, "ended_at": queued.ended_at,
            "deadline_s": queued.deadline_s,
            "may": {
                "pause": not is_over and not queued.state.is_ending and not queued.is_paused,
                "resume": not is_over and not queued.state.is_ending and queued.is_paused,
                "cancel": not is_over and not queued.state.is_ending,
            },
        }  # fmt: skip
        if is_over:
            self._of_ended[queued.number] = shown
        return shown

    def _open(self, reader: StoreReader, queued: QueuedJob) -> dict[str, Any] | None:
        rounds = [each for each in reader.rounds_of(queued.number, queued.over_rounds) if not each.is_over]
        if not rounds:
            return None
        last, devices = rounds[-1], self._settings.devices
        status = read_status(self._settings.state_dir)
        # Where the daemon does not say it: at most so many.
        blocks = (status.blocks if status is not None else 0) or queued.job.fragments_per_update
        counts = reader.counts_of(last.number)
        least = min((counts.get(position, 0) for position in range(blocks)), default=0)
        taking_part = self._participation(queued, last)
        return {
            "job": queued.name, "round": last.number, "rounds": queued.job.rounds,
            "opened_at": last.opened_at, "announced_at": last.announced_at, "deadline": last.deadline,
            "counted": sum(counts.values()), "expected": blocks * devices, "blocks": blocks,
            "counters": rejections_of(reader.counters_of(queued.number)),
            "least": least, "most": max(counts.values(), default=0), "devices": devices,
            "participation": None if taking_part is None else {
                "members": taking_part.members, "takes_part": taking_part.takes_part,
                "not_seen": taking_part.not_seen, "reasons": taking_part.reasons,
                "words": taking_part.sentence(),
                "dead_end": taking_part.dead_end(last.number, _minimum_of(queued), least),
            },
        }  # fmt: skip

    def _participation(self, queued: QueuedJob, opened: RoundRecord) -> Participation | None:
        if queued.job.linkability == "none":
            return None
        return participation_of(self._settings, queued.job.id, opened.number, opened.opened_at)

    # The model, and what it answers.

    def _classes(self, queued: QueuedJob, last: Measured, number: int) -> dict[str, Any]:
        names = self._names(queued, len(last.by_class))
        return {
            "round": number,
            "names": names,
            "records": [each[0] for each in last.by_class],
            "right": [each[1] for each in last.by_class],
            "answers": [each[2] for each in last.by_class],
            "confusion": None if last.confusion is None else last.confusion.tolist(),
        }

    def _names(self, queued: QueuedJob, number: int) -> list[str]:
        terms: Any = queued.job.terms
        given = terms["model"].get("classes")
        if given:
            return [str(each) for each in given][:number]
        if queued.job.id not in self._class_names and (file := self._latest_model(queued)) is not None:
            with contextlib.suppress(OSError, ValueError, DpagentError):
                if file.stat().st_size <= _MOST_MODEL_BYTES:
                    found = metadata_of(file.read_bytes()).get("dpagent.classes", "[]")
                    self._class_names[queued.job.id] = [str(each) for each in json.loads(found)]
        names = self._class_names.get(queued.job.id, [])
        return names if len(names) == number else [str(each) for each in range(number)]

    def _latest_model(self, queued: QueuedJob) -> Path | None:
        directory = self._settings.directory_of(queued.name)
        final = directory / "model.onnx"
        if final.is_file():
            return final
        return max((directory / "models").glob("round-*.onnx"), default=None)

    def _has_export(self) -> bool:
        try:
            return has_export(self._settings.members_place)
        except DpagentError:
            return False

    def _downloads(self, queued: QueuedJob) -> dict[str, Any]:
        model = self._latest_model(queued)
        return {
            "model": None if model is None else model.name,
            "report": queued.closed_rounds > 0,
            "audit": self._has_export(),
        }


def _workers(reader: StoreReader) -> list[dict[str, Any]]:
    """Programs that count fragments, also those that have ended within the hour, the last seen first. Ages
    are by the database's clock, which wrote the times."""
    now = reader.now()
    return [
        {
            "name": each.name, "version": each.version, "fragments": each.fragments,
            "counts": each.ended_at is None and now - each.seen_at < GONE_S,
            "began_s": max(0.0, now - each.began_at), "seen_s": max(0.0, now - each.seen_at),
        }
        for each in sorted(
            reader.workers(seen_within_s=WORKERS_SEEN_S), key=lambda each: each.seen_at, reverse=True
        )
    ]  # fmt: skip


def daemon_in_words(status: Status | None, now: float) -> tuple[str, str]:
    """Whether the daemon gets on: a verdict (``ok``, ``warning``, ``problem``), and a sentence.

    Args:
        status: its last one.
        now: Unix time.
    """
    if status is None:
        return "warning", "No coordinator runs here: `dpagent coordinator run --stay` starts it."
    match status.presence():
        case Presence.ENDED:
            return "warning", f"The coordinator stopped {lasting(now - status.written_at)} ago."
        case Presence.KILLED:
            return "problem", (
                "The coordinator does not run: it was killed, or the machine lost power. Its last sign of "
                f"life came {lasting(now - status.written_at)} ago."
            )
    if status.is_late(now):
        return "problem", f"The coordinator has given no sign of life for {lasting(now - status.written_at)}."
    match status.link:
        case Link.CONNECTED:
            return "ok", f"The coordinator runs, connected to {status.broker}."
        case Link.DISCONNECTED:
            why = f": {status.reason}" if status.reason else ""
            away = lasting(now - status.since)
            return "problem", f"The broker {status.broker} has been away for {away}{why}. Rounds wait for it."
        case _:
            return "warning", f"The coordinator is connecting to {status.broker}."


def _rows(rounds: list[RoundRecord], measured: dict[int, Measured]) -> dict[str, list[Any]]:
    """Rounds that are over, a list for each figure: there may be thousands of them."""
    nothing = Measured(None, (), None, 0, 0)
    details = [measured.get(each.number, nothing) for each in rounds]
    return {
        "number": [each.number for each in rounds],
        "opened_at": [each.opened_at for each in rounds],
        "closed_at": [each.closed_at for each in rounds],
        "given_up_at": [each.given_up_at for each in rounds],
        "epsilon": [_finite(each.epsilon) for each in rounds],
        "noise": [each.noise_multiplier for each in rounds],
        "accuracy": [each.accuracy for each in rounds],
        "loss": [each.loss for each in details],
        "fragments": [each.fragments for each in rounds],
        "least": [each.least_counted for each in rounds],
        "clamped": [each.clamped for each in rounds],
        "kept": [each.kept for each in rounds],
        "clip_norm": [each.clip_norm for each in rounds],
        "received": [each.received for each in details],
        "published": [each.published for each in details],
    }


def _flattened(values: dict[str, Any], prefix: str = "") -> list[list[str]]:
    """Keys with dots, and values as text."""
    rows: list[list[str]] = []
    for key, value in values.items():
        if isinstance(value, dict) and value:
            rows += _flattened(value, f"{prefix}{key}.")
        else:
            rows.append([f"{prefix}{key}", value if isinstance(value, str) else json.dumps(value)])
    return rows


def _minimum_of(queued: QueuedJob) -> int:
    """Devices that a round of it needs."""
    if queued.minimum_devices is not None:
        return queued.minimum_devices
    return int(json.loads(queued.settings).get("round", {}).get("minimum_devices", 1))


def _finite(value: float | None) -> float | None:
    return value if value is not None and math.isfinite(value) else None
