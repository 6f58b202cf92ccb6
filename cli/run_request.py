"""What demo and simulation have in common: options as a request, places for results, an orderly stop."""

from __future__ import annotations

import os
import shlex
import signal
import sys
import tempfile
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from cli.options.table import Given
from dpagent.errors import ConfigurationError, DpagentError, ExitCode, ParameterError, UsageError
from dpagent.wording import named

if TYPE_CHECKING:
    from simulation.request import Request

    RequestT = TypeVar("RequestT", bound=Request)


class RunStopped(DpagentError):
    """The run was stopped before its end."""

    exit_code = ExitCode.INTERRUPTED


@dataclass(frozen=True, slots=True)
class Places:
    """Where a run leaves what it makes."""

    root: Path
    json_file: Path | None
    report: Path

    @property
    def prints(self) -> bool:
        """Whether standard output is for people."""
        return str(self.json_file) != "-"


def request_of(kind: type[RequestT], run: Given, data: Given) -> RequestT:
    """What the options ask for.

    Args:
        kind: Of request.
        run: The options of a run.
        data: How the data are read.

    Raises:
        UsageError: Options exclude each other, or a value cannot be read.
        ParameterError: A number is out of range.
    """
    from dpagent.learning.data.settings import DatasetSettings
    from dpagent.norm import Norm
    from dpagent.privacy.mechanisms.registry import mechanism_of
    from dpagent.privacy.methods import DEFAULT_METHOD, method_named

    dataset, path = run.values["data.dataset"], run.values["data.train.path"]
    test_path, test_share = run.values["data.test"], run.values["data.test_share"]
    if dataset == "digits" and path is not None:
        raise excluded("data.dataset", f"the digits are bundled. Leave it out to train on {named('path')}.")
    if dataset == "mnist" and path is None:
        raise excluded("data.dataset", f"mnist needs {named('path')}, the directory of the MNIST IDX files.")
    if path is None and (test_path is not None or test_share is not None):
        raise excluded(
            "data.test" if test_share is None else "data.test_share", f"goes with {named('path')}."
        )
    if path is None and (unused := [row for row in data.table.rows if data.values[row.setting] is not None]):
        raise UsageError(
            f"{', '.join(named(row.setting) for row in unused)}: the digits are read in one way. Give "
            f"{named('path')}, the data to be read so."
        )
    if test_path is not None and test_share is not None:
        raise excluded("data.test", f"not together with {named('test_share')}: give one of them.")
    if run.values["cap_at"] == "device" and run.values["clipping"] not in (None, "whole"):
        raise excluded(
            "cap_at", f"a cap on the device knows one clip norm; give {named('clipping', 'whole')}."
        )
    cap, method = run.values["cap"], method_named(run.values["method"] or DEFAULT_METHOD)
    if cap is not None and cap not in method.caps:
        raise excluded("cap", f"got {cap}; expected {' or '.join(method.caps)}, the caps of {method.name}.")
    if cap in ("bounded", "published") and run.values["noise"] != "laplace":
        raise excluded("cap", f"{cap} goes with Laplace noise; give {named('noise', 'laplace')}.")
    if cap == "published" and not run.values["allow_unproven"]:
        raise excluded(
            "cap",
            "published guarantees no privacy: it releases exact gradients wherever it acts. Give clamp or "
            f"bounded, or, for data that are not private, {named('allow_unproven')} too.",
        )
    selection: dict[str, Any] = {}
    if path is not None:
        known = {"kind": "idx"} if dataset == "mnist" else {}
        selection["train"] = data.settings(DatasetSettings, path=path.absolute(), **known)
        if test_path is not None:
            selection["test"] = data.settings(
                DatasetSettings, path=test_path.absolute(), half="test", **known
            )
    request = run.settings(kind, data=selection)
    _require_effect(run, request)
    mechanism = mechanism_of(method_named(request.method), request.noise)
    for setting, fitting in (("clipping", ("whole",)), ("engine", ("auto", "numpy"))):
        if (
            mechanism.norm is Norm.L1
            and (given := getattr(request, setting)) not in fitting
            and run.table.row(setting)
        ):
            raise excluded(
                setting,
                f"{given} clips records in L2, and {mechanism.name} needs {mechanism.norm}; give "
                f"{named(setting, fitting[-1])}.",
            )
    return request


def _require_effect(run: Given, request: Request) -> None:
    """See that no option was given that the method does not look at.

    Raises:
        UsageError: One was.
    """
    from dpagent.privacy.mechanisms.registry import mechanism_of
    from dpagent.privacy.methods import method_named

    method = method_named(request.method)
    is_clipped = mechanism_of(method, request.noise).norm is not None
    for setting, has_effect, why in (
        ("sampling_rate", not method.trains_locally, f"{method.name} draws no lots of records"),
        ("clip_norm", is_clipped, f"{method.name} cuts weights to ranges"),
        ("device_noise", method.name == "central", "it is noise beside the coordinator's, for central alone"),
        ("step", request.schedule in (None, "incrementing"), f"a {request.schedule} schedule has none"),
    ):
        if run.values[setting] is not None and not has_effect:
            raise excluded(setting, f"{why}. Leave it out.")


def require_whole(option: str, value: int, most: int) -> None:
    """Refuse a number that is below 1, or above ``most``.

    Raises:
        ParameterError: Naming the option.
    """
    if not 1 <= value <= most:
        expected = "a number of at least 1" if value < 1 else f"a number of at most {most}"
        raise ParameterError(f"{option}: got {value}; expected {expected}.")


def excluded(setting: str, why: str) -> UsageError:
    """That an option cannot stand with another."""
    return UsageError(f"{named(setting)}: {why}")


def places_of(output: Given, folder: str) -> Places:
    """State directory, JSON file and report; refused now if they could not be written in the end.

    Args:
        output: The options.
        folder: Of runs for which no directory is named.

    Raises:
        UsageError, ConfigurationError: One cannot be written.
    """
    values = output.values
    root = values["state_dir"] or Path(folder) / f"{datetime.now():%Y%m%d-%H%M%S}-{os.getpid()}"
    if any(character < " " for character in str(root)):
        raise UsageError(
            f"{named('state_dir')}: got {str(root)!r}; expected a path without control characters."
        )
    json_file, report = values["json"], values["report"] or root / "report"
    if json_file is not None and str(json_file) != "-":
        parent = json_file.absolute().parent
        if json_file.is_dir() or not parent.is_dir() or _why_unwritable(parent):
            raise ConfigurationError(f"--json {json_file}: give a file in a directory that can be written.")
    for setting, directory in (("state_dir", root), ("report", report)):
        if problem := _why_unwritable(directory):
            raise ConfigurationError(
                f"{named(setting)}: got {str(directory)!r}, which cannot be made or written ({problem}); "
                "expected a directory that can."
            )
    return Places(root, json_file, report)


class Stop:
    """How Ctrl-C and SIGTERM end a command: at once, or when the command next looks.

    Args:
        how_to_go_on: The end of the sentence that is shown then.
    """

    def __init__(self, how_to_go_on: str) -> None:
        self._text = f"Stopped. Everything was shut down; to go on, {how_to_go_on}"
        self._is_deferred = self._is_asked = False
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, self._take)

    def defer(self) -> None:
        """From now on, end when :meth:`check` is called: the command calls a library that no exception may
        interrupt."""
        self._is_deferred = True

    def check(self) -> None:
        """End here, if a signal has come.

        Raises:
            RunStopped: One has.
        """
        if self._is_asked:
            raise RunStopped(self._text)

    def _take(self, _number: int, _frame: object) -> None:
        self._is_asked = True
        if not self._is_deferred:
            self.check()


def _why_unwritable(directory: Path) -> str:
    """Why nothing can be written there, or could be once it is made; empty if it can."""
    place = directory.absolute()
    while not place.exists():
        place = place.parent
    try:
        # Permissions alone do not tell: root may write anywhere but below /proc, or on a read-only disk.
        with tempfile.TemporaryDirectory(dir=place):
            return ""
    except OSError as error:
        return error.strerror or str(error)


def command_line(root: Path) -> str:
    """What was typed; with the state directory, if it was left to us."""
    words = ["dpagent", *sys.argv[1:]]
    is_named = any(word == "--state-dir" or word.startswith("--state-dir=") for word in words)
    return shlex.join(words if is_named else [*words, "--state-dir", str(root)])
