"""``dpagent mixer …``: hides from broker and coordinator which fragments belong together."""

from __future__ import annotations

import typer

from cli.commands import Commands
from cli.configurations import mixer_settings
from cli.daemons import LogFormat, LogLevel, StopSignals, start_logging
from cli.options.daemons import LogFormatOption, LogLevelOption, MixerConfig, SetOptions

app = Commands(help="Mix a fleet's sealed fragments.", no_args_is_help=True)


@app.command()
def run(
    config: MixerConfig = None,
    options: SetOptions = None,
    log_level: LogLevelOption = LogLevel.INFO,
    log_format: LogFormatOption = LogFormat.TEXT,
) -> None:
    """Mix sealed fragments until SIGTERM or Ctrl-C.

    It cannot open a fragment. Run it apart from coordinator and broker, by someone whom the
    devices' owners trust not to work with them.
    """
    start_logging(log_level, log_format, "mixer")
    stop = StopSignals()
    from mixer.daemon import Mixer

    Mixer(mixer_settings(config, options)).run(stop.serving())
    raise typer.Exit(stop.exit_code)


@app.command()
def key(config: MixerConfig = None) -> None:
    """Print the mixer's public key (`mixer_key` in fleet.yaml, `limits.mixer_keys` in agent.yaml)."""
    from dpagent.protocol.mixing import key_text
    from mixer.keys import load_outer_opener

    settings = mixer_settings(config)
    typer.echo(key_text(load_outer_opener(settings.keys_dir, settings.fleet).public_key))
