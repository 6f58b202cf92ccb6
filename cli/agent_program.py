"""The agent, as ``dpagent run`` goes on once its options are read: ``python -m cli.agent_program CONFIG LEVEL
FORMAT [KEY=VALUE]…``.

It runs for years, on a board of little memory, and has no use for what reads options: typer, and pydantic by
which that checks them, would stay with it.
"""

from __future__ import annotations

import contextlib
import logging
import os
import signal
import sys
from collections.abc import Sequence
from pathlib import Path

if __name__ == "__main__":
    # Until it starts, signals end the program at once, with the exit codes of StopSignals.
    signal.signal(signal.SIGINT, lambda *_: os._exit(130))
    signal.signal(signal.SIGTERM, lambda *_: os._exit(0))
    signal.pthread_sigmask(signal.SIG_UNBLOCK, (signal.SIGINT, signal.SIGTERM))  # `dpagent run` held them.

    from dpagent.put_off import put_off

    # Libraries import them for what the agent does not do: signatures of classes without docstrings (from
    # Python 3.12 on, dataclasses use `inspect` all the same), files in other encodings, identifiers made of
    # network cards. They take 1.5 MiB of Python 3.11.
    for module in ("inspect", "locale", "uuid"):
        put_off(module)

from agent.child_programs import LITTLE_MEMORY, keep_from_children
from agent.marked_log import MarkedFormatter, is_private
from cli.configurations import agent_settings
from cli.daemons import LogFormat, LogLevel, StopSignals, start_logging
from cli.reporting import reported
from dpagent.errors import ExitCode

log = logging.getLogger(__name__)


def run_agent(config: Path | None, options: Sequence[str], level: LogLevel, shape: LogFormat) -> ExitCode:
    """Run the agent until it is told to stop.

    Args:
        config: its file; None for the usual place.
        options: settings over the file's, ``KEY=VALUE``.
        level: the least one that is logged.
        shape: of the log's lines.

    Returns:
        How it ends.

    Raises:
        DpagentError: It cannot start, or go on.
    """
    start_logging(level, shape, "agent", MarkedFormatter(), is_private, waits=False)
    try:
        return _run(config, options)
    finally:
        for handler in logging.getLogger().handlers:
            handler.flush()  # Before the sentence of an error.


def _run(config: Path | None, options: Sequence[str]) -> ExitCode:
    stop = StopSignals()
    from dpagent.resident_memory import has_swap, stay_in_memory

    if not stay_in_memory() and has_swap():
        log.warning(
            "this board has a swap, and the limit on locked memory lets the system move this program there,"
            " for a picture that takes much memory to decode: a round may then take longer, which shows."
            " Set LimitMEMLOCK=infinity (systemd), --ulimit memlock=-1 (containers) or `ulimit -l unlimited`"
        )
    settings = agent_settings(config, options)
    from agent.opening import Opening

    opening = Opening()  # It gets ready while this program loads the rest.
    try:
        from agent.daemon import Agent
        from agent.quiet_end import program_age_s

        agent = Agent(
            settings, opening=opening, age_s=program_age_s()
        )  # It may decode records for a long time.
    finally:
        opening.end()
    agent.run(stop.serving())
    return stop.exit_code


def words_for(config: Path | None, options: Sequence[str], level: LogLevel, shape: LogFormat) -> list[str]:
    """The arguments of this program, for :func:`run_agent`."""
    return [str(config or ""), level, shape, *options]


def main() -> None:
    """Run the agent; report every error as a sentence and an exit code."""
    with contextlib.suppress(OSError):
        # `top` and `pgrep` know it by the name of the command, which the start of another program took.
        Path("/proc/self/comm").write_text("dpagent")
    keep_from_children(LITTLE_MEMORY)
    config, level, shape, *options = sys.argv[1:]
    arguments = Path(config) if config else None, options, LogLevel(level), LogFormat(shape)
    reported(lambda: sys.exit(run_agent(*arguments)))


if __name__ == "__main__":
    main()
