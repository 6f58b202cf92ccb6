"""Orders of the page's operators: the same changes of the queue as those of ``dpagent coordinator job …``.

Each opens the database beside the daemon, changes it in one transaction that also notes who ordered it, and
closes it. The daemon notices within a second.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

from coordinator.database.opening import open_beside
from coordinator.page.access import Visitor
from coordinator.queue import Queue, cancelled_in_words
from coordinator.running_job import add_job
from coordinator.settings import CoordinatorSettings, JobSettings, load_job_settings
from dpagent.errors import ConfigurationError
from dpagent.learning.model_files import is_model_file


class Orders:
    """Carries orders out, and says what came of each.

    Args:
        settings: ``fleet.yaml``.
        directory: that it is in: paths of a job that is added here are relative to it, and lie in it.
    """

    def __init__(self, settings: CoordinatorSettings, directory: Path) -> None:
        self._settings, self._directory = settings, directory

    def add(self, by: Visitor, name: str, text: str, *, is_paused: bool) -> str:
        """Put a job at the end of the queue.

        Args:
            by: who orders it.
            name: of the job.
            text: the job file, as YAML.
            is_paused: whether it waits until it is started.

        Raises:
            ConfigurationError, DataError, PlanError, StorageError, UsageError: It cannot be added.
        """
        source = Path(f"{name or 'job'}.yaml".replace("/", "_").replace("\0", "_"))
        try:
            own = load_job_settings(self._directory / source, text=text)
        except ConfigurationError as error:
            raise ConfigurationError(str(error).replace(f"{self._directory}/", "")) from error
        self._require_inside(own)
        with self._queue(by) as queue:
            return add_job(self._settings, own, name, str(source), queue, time.time(), is_paused=is_paused)

    def pause(self, by: Visitor, name: str) -> str:
        """Open no further round of a job; see :meth:`~coordinator.queue.Queue.pause`."""
        with self._queue(by) as queue:
            known = queue.pause(name)
        if known.is_open:
            return f"Job {name} is paused: its open round closes as it would, and no further one opens."
        return f"Job {name} is paused: no further round of it opens."

    def resume(self, by: Visitor, name: str) -> str:
        """Let a paused job go on."""
        with self._queue(by) as queue:
            queue.resume(name)
        return f"Job {name} goes on when its turn comes."

    def cancel(self, by: Visitor, name: str, *, sends_model: bool) -> str:
        """Cancel a job for good."""
        with self._queue(by) as queue:
            return cancelled_in_words(queue.cancel(name, time.time(), sends_model=sends_model))

    def set_deadline(self, by: Visitor, name: str, seconds: float) -> str:
        """Give the rounds of a job another deadline."""
        with self._queue(by) as queue:
            queue.set_deadline(
                name,
                seconds,
                lambda known: replace(known, deadline_s=seconds).settings_in(self._settings),
            )
        return f"Rounds of job {name} have {seconds:g} s from now on."

    @contextlib.contextmanager
    def _queue(self, by: Visitor) -> Iterator[Queue]:
        with contextlib.closing(open_beside(self._settings.store_place)) as database:
            yield Queue(database, f"{by.name}, by the page")

    def _require_inside(self, own: JobSettings) -> None:
        """Refuse a job that names files elsewhere on this machine: errors about them tell what is in them.

        Raises:
            ConfigurationError: It does.
        """
        named = {}
        if is_model_file(own.model.name):
            named["model.name"] = Path(own.model.name)
        if own.test_data is not None:
            named["test_data.path"] = own.test_data.path
        home = self._directory.resolve()
        for key, path in named.items():
            if not path.resolve().is_relative_to(home):
                raise ConfigurationError(
                    f"{key} is {path}; expected a file in the directory of fleet.yaml: a job that the page "
                    "adds names no others. `dpagent coordinator job add FILE` can."
                )
