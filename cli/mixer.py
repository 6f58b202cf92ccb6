"""``dpagent mixer …``: hides from broker and coordinator which fragments belong together."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from cli.commands import Commands
from cli.daemons import LogLevel, LogLevelOption, StopSignals, start_logging

app = Commands(help="Mix a fleet's sealed fragments.", no_args_is_help=True)

ConfigOption = Annotated[Path, typer.Option(help="The mixer's mixer.yaml.")]


@app.command()
def run(config: ConfigOption, log_level: LogLevelOption = LogLevel.INFO) -> None:
    """Mix sealed fragments until SIGTERM or Ctrl-C.

    It cannot open a fragment. Run it apart from coordinator and broker, by someone whom the
    devices' owners trust not to work with them.
    """
    start_logging(log_level)
    stop = StopSignals()
    from mixer.daemon import Mixer
    from mixer.settings import load_mixer_settings

    Mixer(load_mixer_settings(config)).run(stop.serving())
    raise typer.Exit(stop.exit_code)


@app.command()
def key(config: ConfigOption) -> None:
    """Print the mixer's public key (`mixer_key` in fleet.yaml, `limits.mixer_keys` in agent.yaml)."""
    from dpagent.protocol.mixing import key_text
    from mixer.keys import load_outer_opener
    from mixer.settings import load_mixer_settings

    settings = load_mixer_settings(config)
    typer.echo(key_text(load_outer_opener(settings.keys_dir, settings.fleet).public_key))
