"""``dpagent run``: the agent daemon."""

from __future__ import annotations

import logging

import typer

from agent.marked_log import MarkedFormatter, is_private
from cli.configurations import AgentConfig, SetOptions, agent_settings
from cli.daemons import LogFormat, LogFormatOption, LogLevel, LogLevelOption, StopSignals, start_logging

log = logging.getLogger(__name__)


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
    start_logging(log_level, log_format, "agent", MarkedFormatter(), is_private)
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

        agent = Agent(settings, opening=opening)  # It may decode records for a long time.
    finally:
        opening.end()
    agent.run(stop.serving())
    raise typer.Exit(stop.exit_code)
