"""``dpagent home-assistant``: the board's status in its owner's Home Assistant."""

from __future__ import annotations

from typing import Annotated

import typer

from cli.configurations import agent_settings
from cli.daemons import LogFormat, LogLevel, StopSignals, start_logging
from cli.options.daemons import AgentConfig, LogFormatOption, LogLevelOption, SetOptions
from dpagent.wording import counted


def home_assistant(
    config: AgentConfig = None,
    options: SetOptions = None,
    remove: Annotated[
        bool, typer.Option("--remove", help="Have Home Assistant forget this board, and end.")
    ] = False,
    log_level: LogLevelOption = LogLevel.INFO,
    log_format: LogFormatOption = LogFormat.TEXT,
) -> None:
    """Tell your Home Assistant what this board does, over your own broker, until SIGTERM or Ctrl-C.

    The section `home_assistant` of agent.yaml names that broker, which may not be the fleet's. Home Assistant
    finds the board by itself (MQTT discovery). It is told what `metrics` hold: who reads that broker learns
    in which rounds the board takes part, unless limits.dummy_traffic hides it; nothing of its records.
    """
    start_logging(log_level, log_format, "home-assistant")
    stop = StopSignals()
    from agent.home_assistant import HomeAssistant
    from agent.overview import overview_of
    from agent.profile import open_profile
    from agent.sensors import Sensors
    from agent.settings import on_board

    loaded = agent_settings(config, options)
    settings = on_board(loaded, open_profile(loaded.profile).profile)
    sensors = Sensors()
    teller = HomeAssistant(settings, lambda: overview_of(settings, sensors))
    if remove:
        typer.echo(f"Home Assistant forgets this board: {counted(teller.remove(), 'entity')}.")
        return
    teller.run(stop.serving())
    raise typer.Exit(stop.exit_code)
