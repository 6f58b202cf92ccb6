"""``dpagent coordinator enrolment``: the endpoint at which boards enrol and renew their certificates."""

from __future__ import annotations

from datetime import UTC, datetime

import typer

from cli.configurations import coordinator_settings
from cli.daemons import LogFormat, LogLevel, StopSignals, start_logging
from cli.options.daemons import FleetConfig, LogFormatOption, LogLevelOption, SetOptions


def enrolment(
    config: FleetConfig = None,
    options: SetOptions = None,
    log_level: LogLevelOption = LogLevel.INFO,
    log_format: LogFormatOption = LogFormat.TEXT,
) -> None:
    """Let boards enrol and renew their certificates, until SIGTERM or Ctrl-C.

    A small HTTPS server on the port of enrolment.address, apart from the coordinator, which goes on without
    it. Boards without an invitation or a certificate get nothing from it.
    """
    start_logging(log_level, log_format, "enrolment")
    stop = StopSignals()
    from coordinator.authority import load_authorities
    from coordinator.endpoint import Endpoint
    from coordinator.enrolment import Enrolment, told_of_broker
    from coordinator.keys import load_signer

    settings = coordinator_settings(config, options)
    authorities = load_authorities(settings.members_dir, now=datetime.now(UTC))
    key = load_signer(settings.keys_dir, settings.fleet).public_key
    desk = Enrolment(settings, authorities, key, told_of_broker(settings))
    endpoint = Endpoint(desk)
    desk.catch_up()
    endpoint.serve(stop.serving())
    raise typer.Exit(stop.exit_code)
