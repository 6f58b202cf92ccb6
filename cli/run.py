"""``dpagent run``: the agent daemon."""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path

import typer

from cli.daemons import LogFormat, LogLevel
from cli.interpreter import program
from cli.options.daemons import AgentConfig, LogFormatOption, LogLevelOption, SetOptions


def run(
    config: AgentConfig = None,
    options: SetOptions = None,
    log_level: LogLevelOption = LogLevel.INFO,
    log_format: LogFormatOption = LogFormat.TEXT,
) -> None:
    """Run the agent on this device until SIGTERM or Ctrl-C.

    The agent waits for plans from its fleet's coordinator, trains on its own data, charges its
    ledger and publishes noisy fragments. All durable state is in its state directory;
    after a crash, start it again and it continues. `dpagent budget init` begins its ledger, once.
    """
    from agent.child_programs import LITTLE_MEMORY
    from cli.agent_program import run_agent, words_for

    given = config, options or [], log_level, log_format
    if _is_own_process():
        # The agent needs nothing of what has read its options, and the memory that they took. A signal waits
        # until that program handles it: the interpreter's start would end with a traceback by Ctrl-C, and the
        # first process of a container would not hear one.
        signal.pthread_sigmask(signal.SIG_BLOCK, (signal.SIGINT, signal.SIGTERM))
        command = [*program("cli.agent_program"), *words_for(*given)]
        os.execve(sys.executable, command, LITTLE_MEMORY | os.environ)
    raise typer.Exit(run_agent(*given))


def _is_own_process() -> bool:
    """Whether this process is the command's own, and no program's that has called it."""
    own = sys.modules["__main__"]
    spec = getattr(own, "__spec__", None)
    if spec is None:
        return Path(getattr(own, "__file__", "")).name == "dpagent"
    return bool(spec.name == "cli.main")
