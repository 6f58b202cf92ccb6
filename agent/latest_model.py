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
import threading
from dataclasses import dataclass
from pathlib import Path
from typing import Final, NamedTuple

from agent.data_settings import DataSettings
from agent.errand import Errand
from agent.owners_command import OwnersCommand
from agent.settings import AgentSettings
from dpagent.clock import Clock
from dpagent.errors import DpagentError
from dpagent.protocol.messages import AssetTerms, Plan

log = logging.getLogger(__name__)

_PROGRAM: Final = "agent.model_keeping"
_COMMAND_S: Final = 60.0
_WRITING_S: Final = 30.0
"""A process that writes a model has so long before the owner's command begins, and"""
_SLOWEST: Final = 1 << 20
"""a second more for so many bytes. On a disk that takes longer, the command begins, and ends, later."""
_REQUESTS: Final = 5
"""For chunks that do not come, of one model or of several: the broker answers each with all that it has."""
_ENDING_S: Final = 5.0
"""That is enough for programs that are killed to be gone."""
_LEAST_S: Final = 600.0
"""From one model to the next, and from the last of those requests to the next one."""


class CurrentParts(NamedTuple):
    """What the model of a round is made of: its plan, and what that names."""

    plan: Plan
    export: bytes
    weights: bytes


@dataclass(frozen=True, slots=True)
class KeepQuestion:
    """Which file is to have what model.

    Attributes:
        file: to be replaced.
        asset: what a signed plan says of the model.
        model: whole, or its parts.
        declared: of the board's records, to be compared with what the model says.
    """

    file: Path
    asset: AssetTerms
    model: bytes | CurrentParts
    declared: DataSettings


class Kept(NamedTuple):
    """What became of the file.

    Attributes:
        is_another: whether it has been replaced.
        disagreements: as of :func:`agent.model_keeping.disagreements`.
    """

    is_another: bool
    disagreements: tuple[str, ...] = ()


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
        self._next: tuple[AssetTerms, bytes | CurrentParts] | None = None
        """What is written after that."""
        self._requests = 0
        self._not_before = {True: -math.inf, False: -math.inf}
        """When a model is taken again, of a finished job or of a round (monotonic)."""
        self._without: bytes | None = None
        """The last job whose coordinator was found not to send what :attr:`keeps_current` needs."""
        self._running: OwnersCommand | None = None
        self._killed: list[OwnersCommand] = []
        """That are ended, and may not have let go of their memory yet. Nothing waits for that: how much they
        have is a matter of records."""
        self._ends_at = math.inf
        """When the time of the owner's command is over (monotonic), whether one has begun or not. Public."""
        self._over_at = -math.inf
        """When the time of a command was over last (monotonic): whether it was ended then, had ended by
        itself, or never began. Public."""
        self._came: AssetTerms | None = None
        """A model that has come, and for which a command's time is to begin."""
        self._is_written = False
        """Whether a file has been written, or not, since the last command was told."""
        self._is_to_tell = False
        """Whether the file is another than the owner's command was told of."""
        self._held_since: float | None = None
        """Since when that command stands still (monotonic)."""

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
        self._next, self._came = (asset, data), asset
        self.tend()

    def take_current(self, plan: Plan, export: bytes, weights: bytes) -> None:
        """As :meth:`take`, of the model of a round.

        Args:
            plan: of the round, signed.
            export, weights: what it names, of its digests.
        """
        asset = current_asset(plan)
        self._settle(asset, is_finished=False)
        self._next, self._came = (asset, CurrentParts(plan, export, weights)), asset
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
            self._is_to_tell |= self._writing.is_another
            self._is_written, self._writing = True, None
        if self._writing is None and self._next is not None:
            question = KeepQuestion(self.file, *self._next, self._data)
            self._next, writing = None, _Writing(question)
            try:
                writing.start()
            except RuntimeError as error:  # The system has no room for a thread more.
                log.error("the latest model is not kept: %s", error)
                return
            self._writing = writing

    @property
    def is_writing(self) -> bool:
        """Whether a file is being written, or its end has not been seen yet (:meth:`tend`)."""
        return self._writing is not None

    @property
    def processes(self) -> list[int]:
        """The ids of the owner's commands, until their ends have been seen (:meth:`tend`)."""
        running, killed = self._running, self._killed  # Another thread may ask.
        return [each.process for each in (running, *killed) if each is not None]

    @property
    def started(self) -> list[int]:
        """The ids of all processes that this has started: of the owner's commands, and of one that writes a
        file. When they end is a matter of records, or of how full the disk is."""
        writing = self._writing
        writer = None if writing is None else writing.process
        return [*self.processes, *([] if writer is None else [writer])]

    @property
    def may_be_ending(self) -> bool:
        """Whether a command would be ending now, had it gone on for all of its time. Public."""
        return self._clock.monotonic() < self._over_at + _ENDING_S

    def hold(self) -> None:
        """Let the owner's command stand still until :meth:`go_on`, and begin none.

        It may read records, as ``dpagent personalise`` does, and take as long as they make it take. So it
        computes nothing in the times in which a look at the data computes nothing.
        """
        if self._held_since is None:
            self._held_since = self._clock.monotonic()
            if self._running is not None:
                self._running.hold(is_held=True)

    def go_on(self) -> None:
        """Let it go on."""
        if self._held_since is not None:
            self._ends_at += self._clock.monotonic() - self._held_since
            self._held_since = None
            if self._running is not None:
                self._running.hold(is_held=False)

    def _begin_time(self, asset: AssetTerms) -> None:
        """A model has come: a command before it ends, and one has its time, whether there will be another
        file to tell it of or not, and whenever there is one."""
        if self._command:
            self.stop()
            self._over_at = self._clock.monotonic()
            self._ends_at = self._over_at + _WRITING_S + asset.size // _SLOWEST + _COMMAND_S

    def _tell(self) -> None:
        """Run the owner's command, if there is another file."""
        is_to_tell, self._is_written, self._is_to_tell = self._is_to_tell, False, False
        if not (self._command and is_to_tell):
            return
        if (ends_at := self._clock.monotonic() + _COMMAND_S) > self._ends_at or self._ends_at == math.inf:
            self._ends_at = ends_at  # The disk is very slow.
        self.stop()
        try:
            self._running = OwnersCommand([*self._command, str(self.file)], reads_records=True)
        except OSError as error:
            log.error("model.command %s cannot be run: %s", self._command[0], error.strerror)

    def tend(self) -> None:
        """See how the file and the owner's command do; call it now and then. Waits for nothing."""
        self._take_written()
        if self._held_since is not None:
            return
        if self._came is not None:
            came, self._came = self._came, None
            self._begin_time(came)
        if self._is_written:
            self._tell()
        self._killed = [each for each in self._killed if not each.is_over()]
        code = None
        if self._running is not None:
            is_over, code = self._running.is_over(), self._running.code()
            if is_over:
                if (why_not := self._running.why_not_run()) is not None:
                    log.error("model.command %s cannot be run: %s", self._command[0], why_not)
                elif code:
                    log.error("model.command %s ended with exit code %d", self._command[0], code)
                self._running = None
        if (now := self._clock.monotonic()) < self._ends_at:
            return
        self._over_at, self._ends_at = now, math.inf
        if self._running is not None:
            hint = "" if code is None else "; what it starts and is to go on has to leave its group (setsid)"
            log.error(
                "model.command %s took more than %g s and was ended%s", self._command[0], _COMMAND_S, hint
            )
            self.stop()

    def close(self) -> None:
        """End what goes on, since the agent ends."""
        self.stop()
        for each in self._killed:
            each.end()
        if self._writing is not None:
            self._writing.end()

    def stop(self) -> None:
        """End the owner's command, if it runs, with the programs that it has started. Waits for nothing."""
        if self._running is not None:
            self._running.kill()
            self._killed, self._running = [*self._killed, self._running], None


class _Writing(threading.Thread):
    """Has the file replaced, which is done in one step and in a process of its own, and the one before kept.

    Args:
        question: for that process.

    Attributes:
        is_another: whether the file is another now; once the thread has ended.
    """

    def __init__(self, question: KeepQuestion) -> None:
        super().__init__(name="latest model", daemon=True)
        self._question = question
        self._errand: Errand | None = None
        self._is_ended = False
        self.is_another = False

    @property
    def process(self) -> int | None:
        """The id of the process that writes; None: it has not been started."""
        return None if self._errand is None else self._errand.process

    def end(self) -> None:
        """End the process: the agent ends. The file is the one before, or the new one."""
        self._is_ended = True
        if self._errand is not None:
            self._errand.end()

    def run(self) -> None:
        """As of :class:`threading.Thread`."""
        try:
            self._errand = Errand(_PROGRAM)
            kept: Kept = self._errand.wait(self._question)
        except DpagentError as error:
            if not self._is_ended:
                log.error("the latest model is not kept: %s", error)
            return
        self.is_another = kept.is_another
        if kept.is_another:
            log.info("the latest model is in %s", self._question.file)
        for sentence in kept.disagreements:
            log.warning("%s; correct agent.yaml, or ask the operator", sentence)


def current_asset(plan: Plan) -> AssetTerms:
    """What names the model of a round: its weights."""
    return AssetTerms(role="export", digest=plan.model.digest, size=plan.model.size)


def previous_of(file: Path) -> Path:
    """Where the model before is kept."""
    return file.with_name(f"{file.stem}.previous{file.suffix}")


def personal_of(file: Path) -> Path:
    """Where the copy is that ``dpagent personalise`` makes of a board's model."""
    return file.with_name(f"{file.stem}.personal{file.suffix}")
