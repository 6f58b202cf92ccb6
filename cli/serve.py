"""``dpagent serve``: the latest model's answers for the board's other programs."""

from __future__ import annotations

import typer

from cli.configurations import agent_settings
from cli.daemons import LogFormat, LogLevel, StopSignals, start_logging
from cli.options.daemons import AgentConfig, LogFormatOption, LogLevelOption


def serve(
    config: AgentConfig = None,
    log_level: LogLevelOption = LogLevel.INFO,
    log_format: LogFormatOption = LogFormat.TEXT,
) -> None:
    """Answer predictions with the latest model of this board, until SIGTERM or Ctrl-C.

    Programs of the board ask over a local socket, a line of JSON each (docs/predict.md), or over a topic of a
    broker on the board. A model that a finished job brings is taken when it comes. No network is needed.
    The section `serve` of agent.yaml says where, and who may ask.
    """
    from agent.marked_log import is_private
    from dpagent.extras import require_onnx_runtime

    require_onnx_runtime("`dpagent serve`")
    # When another model is taken tells whether there was room for it, or what the board's own records made.
    start_logging(log_level, log_format, "answers", is_private=is_private)
    stop = StopSignals()
    from agent.serving.server import serve as run

    run(agent_settings(config), stop.serving())
    raise typer.Exit(stop.exit_code)
