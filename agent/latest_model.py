"""The fleet's latest model, as a file for the board's own programs: of a finished job, or of a round.

It is public: the coordinator sends it to every device, whether that took part or not. Nothing that fails here
has any effect on a round: it is logged, and tried again at the next start. A coordinator that announces one
model after the other wears the disk by one of a kind in ten minutes.

**Whether the file could be written is private.** How full the disk is follows from the records that lie on
it, and a coordinator chooses how large a model is. So which chunks are asked for, and when, follows from what
was announced and what came alone (:meth:`LatestModel.wants`), and a thread writes the files: the agent
does not stand still for as long as that takes, where it would go on at once without room.
"""

from __future__ import annotations

import logging
import math
import os
import shutil
import threading
from pathlib import Path
from typing import Final

from agent.current_model import current_model, weights_digest_of
from agent.data_settings import DataSettings
from agent.owners_command import OwnersCommand
from agent.settings import AgentSettings
from dpagent.clock import Clock
from dpagent.errors import DpagentError, StorageError
from dpagent.learning.data.input_form import METADATA_KEY, InputForm
from dpagent.learning.inference.model_bytes import metadata_of
from dpagent.protocol.fragments import content_digest
from dpagent.protocol.messages import AssetTerms, Plan
from dpagent.storage import SPACE_LEFT, disk_errors, real_path, replace_durably, write_atomically

log = logging.getLogger(__name__)

_COMMAND_S: Final = 60.0
_MOST_SHOWN: Final = 200
_REQUESTS: Final = 5
"""For chunks that do not come, of one model or of several: the broker answers each with all that it has."""
_LEAST_S: Final = 600.0
"""From one model to the next, and from the last of those requests to the next one."""


class LatestModel:
    """Keeps the file, and the one before, and tells a program of the owner's.

    Args:
        settings: ``agent.yaml``.
        clock: the program's.
    """

    def __init__(self, settings: AgentSettings, clock: Clock) -> None:
        self.file, self._command, self._clock = settings.model_file, settings.model.command, clock
        self._data, self.keeps_current = settings.data, settings.model.keep == "current"
        self._settled: bytes | None = None
        """The digest of the last model that was taken or given up: it is not asked for again until the next
        start. Public: not whether it could be written."""
        self._writing: _Writing | None = None
        self._next: tuple[AssetTerms, bytes] | None = None
        """What is written after that."""
        self._requests = 0
        self._not_before = {True: -math.inf, False: -math.inf}
        """When a model is taken again, of a finished job or of a round (monotonic)."""
        self._without: bytes | None = None
        """The last job whose coordinator was found not to send what :attr:`keeps_current` needs."""
        self._running: OwnersCommand | None = None
        self._ends_at = 0.0

    def wants(self, asset: AssetTerms, *, is_finished: bool = True) -> bool:
        """Whether this is another model than the last one, and it is time for one. Public: it follows from
        what was announced and what came since the start, and not from the file, nor from the disk."""
        is_time = self._clock.monotonic() >= self._not_before[is_finished]
        return is_time and asset.digest != self._settled

    def fetched(self, plan: Plan, finished: AssetTerms | None) -> AssetTerms | None:
        """What is to be fetched for the file now, if anything.

        Args:
            plan: the one that holds.
            finished: the model of the job that was finished last, while it is not here.
        """
        if finished is not None and self.wants(finished):
            return finished
        if plan.export is None or not self.keeps_current:
            return None
        return plan.export if self.wants(current_asset(plan), is_finished=False) else None

    def note_request(self, asset: AssetTerms, *, is_finished: bool = True) -> bool:
        """Missing chunks were asked for once more: give a model up that does not come.

        Returns:
            Whether it was given up.
        """
        self._requests += 1
        if self._requests >= _REQUESTS:
            self._settle(asset, is_finished=is_finished)
            log.warning("the latest model did not come whole; is it too large for the broker?")
            return True
        return False

    def take(self, asset: AssetTerms, data: bytes) -> None:
        """Begin to replace the file, if it is another. Raises nothing, and waits for nothing.

        Args:
            asset: what a signed plan says of the model.
            data: the model, of that digest.
        """
        self._settle(asset, is_finished=True)
        self._next = asset, data
        self.tend()

    def take_current(self, plan: Plan, export: bytes, weights: bytes) -> None:
        """As :meth:`take`, of the model of a round.

        Args:
            plan: of the round, signed.
            export, weights: what it names, of its digests.
        """
        asset = current_asset(plan)
        self._settle(asset, is_finished=False)
        try:
            data = current_model(plan, export, weights)
        except Exception as error:  # noqa: BLE001 - no plan ends the agent
            log.error("the model of round %d cannot be kept: %s", plan.round, error)
            return
        self._next = asset, data
        self.tend()

    def note_absent(self, plan: Plan) -> None:
        """A round's plan has no file to fill its weights into: say so once a job, after its first steps."""
        if self.keeps_current and plan.state == "open" and plan.round > 2 and self._without != plan.job:
            self._without = plan.job
            log.warning(
                "model.keep is current, and the coordinator sends no file for it: its operator may set"
                " current_models in fleet.yaml for the next job. The finished model is kept"
            )

    def _settle(self, asset: AssetTerms, *, is_finished: bool) -> None:
        self._settled, self._requests = asset.digest, 0
        self._not_before[is_finished] = self._clock.monotonic() + _LEAST_S

    def _take_written(self) -> None:
        """See whether the file is written, and begin with the next one."""
        if self._writing is not None and not self._writing.is_alive():
            is_another, self._writing = self._writing.is_another, None
            if is_another:
                self._tell()
        if self._writing is None and self._next is not None:
            self._writing, self._next = _Writing(self.file, *self._next, self._data), None
            self._writing.start()

    @property
    def is_writing(self) -> bool:
        """Whether a file is being written, or its end has not been seen yet (:meth:`tend`)."""
        return self._writing is not None

    def _tell(self) -> None:
        """Run the owner's command."""
        self.stop()
        if not self._command:
            return
        try:
            self._running = OwnersCommand([*self._command, str(self.file)])
        except OSError as error:
            log.error("model.command %s cannot be run: %s", self._command[0], error.strerror)
            return
        self._ends_at = self._clock.monotonic() + _COMMAND_S

    def tend(self) -> None:
        """See how the file and the owner's command do; call it now and then. Waits for nothing."""
        self._take_written()
        if self._running is None:
            return
        code, why_not = self._running.code(), self._running.why_not_run()
        if code is not None:
            self._running = None
            if why_not is not None:
                log.error("model.command %s cannot be run: %s", self._command[0], why_not)
            elif code:
                log.error("model.command %s ended with exit code %d", self._command[0], code)
        elif self._clock.monotonic() >= self._ends_at:
            log.error("model.command %s took more than %g s and was ended", self._command[0], _COMMAND_S)
            self.stop()

    def stop(self) -> None:
        """End the owner's command, if it runs, with the programs that it has started."""
        if self._running is not None:
            self._running.end()
            self._running = None


class _Writing(threading.Thread):
    """Replaces the file, which is done in one step, and keeps the one before.

    Args:
        file: to be replaced.
        asset: what a signed plan says of the model.
        data: the model.
        declared: of the board's records, to be compared with what the model says.

    Attributes:
        is_another: whether the file is another now; once the thread has ended.
    """

    def __init__(self, file: Path, asset: AssetTerms, data: bytes, declared: DataSettings) -> None:
        super().__init__(name="latest model", daemon=True)
        self._file, self._asset, self._data, self._declared = file, asset, data, declared
        self.is_another = False

    def run(self) -> None:
        """As of :class:`threading.Thread`."""
        if self._asset.digest in _known_in(self._file):
            return
        try:
            self._write()
        except StorageError as error:
            log.error("the latest model is not kept: %s", error)
            return
        self.is_another = True
        log.info("the latest model is in %s", self._file)
        for sentence in disagreements(self._data, self._declared):
            log.warning("%s; correct agent.yaml, or ask the operator", sentence)

    def _write(self) -> None:
        file, data = self._file, self._data
        with disk_errors(file):
            file.parent.mkdir(parents=True, exist_ok=True)
            if shutil.disk_usage(file.parent).free < 2 * len(data) + SPACE_LEFT:
                raise StorageError(
                    f"{file.parent} has no room for {2 * len(data) >> 20} MiB besides what the ledger "
                    "needs. Free some space, and start the agent again."
                )
            _keep_previous(file)
        write_atomically(file, data)


def current_asset(plan: Plan) -> AssetTerms:
    """What names the model of a round: its weights."""
    return AssetTerms(role="export", digest=plan.model.digest, size=plan.model.size)


def _keep_previous(file: Path) -> None:
    """Give the file its other name, too: a second copy would wear the disk as much as the new model does.

    Raises:
        OSError, StorageError: It cannot be kept.
    """
    if not file.is_file():
        return
    previous = real_path(previous_of(file))
    link = previous.with_name(f".{previous.name}.new")
    link.unlink(missing_ok=True)
    try:
        os.link(real_path(file), link)
    except OSError:  # Of a file system without links, or of two.
        write_atomically(previous, file.read_bytes())
        return
    replace_durably(previous, link)
    link.unlink(missing_ok=True)  # It stays where both names are one file already.


def previous_of(file: Path) -> Path:
    """Where the model before is kept."""
    return file.with_name(f"{file.stem}.previous{file.suffix}")


def personal_of(file: Path) -> Path:
    """Where the copy is that ``dpagent personalise`` makes of a board's model."""
    return file.with_name(f"{file.stem}.personal{file.suffix}")


def disagreements(model: bytes, data: DataSettings) -> list[str]:
    """Where this board declares records to be others than the model was trained on, a sentence each.

    Both are public: no record is looked at. It is for the owner, and changes nothing that the board does,
    since what a model says of its inputs is only the operator's word.

    Args:
        model: the file of a finished model, whoever wrote it.
        data: as the board declares them.
    """
    try:
        text, own = metadata_of(model).get(METADATA_KEY), InputForm.of(data)
        differences = [] if text is None or own is None else InputForm.parse(text).differences(own)
    except DpagentError as error:
        return [f"what the model says of its inputs cannot be read: {error}"]
    return [
        f"data.{key} is {_short(given)} on this board, and its fleet's model was trained with"
        f" {_short(expected)}"
        for key, expected, given in differences
    ]


def _short(value: object) -> str:
    text = repr(value)
    return text if len(text) <= _MOST_SHOWN else f"{text[:_MOST_SHOWN]}…"


def _known_in(file: Path) -> tuple[bytes | None, ...]:
    """What may name the model in a file: SHA-256 of it, or of the weights that were filled in."""
    try:
        data = file.read_bytes() if file.is_file() else None
    except OSError:
        data = None
    return () if data is None else (content_digest(data), weights_digest_of(data))
