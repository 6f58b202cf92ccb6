"""``dpagent metrics``: a board's metrics for Prometheus, as a file for node_exporter or at a local port."""

from __future__ import annotations

import sys
import threading
import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Final
from wsgiref.simple_server import WSGIRequestHandler, WSGIServer, make_server

import typer

from cli.configurations import agent_settings
from cli.daemons import StopSignals
from cli.options.daemons import AgentConfig
from dpagent.errors import ConfigurationError

if TYPE_CHECKING:
    from prometheus_client import CollectorRegistry

_REQUEST_S: Final = 5.0


def metrics(
    config: AgentConfig = None,
    out: Annotated[
        Path | None,
        typer.Option("--out", help="Write them to this file, as a text file for node_exporter (NAME.prom)."),
    ] = None,
    every: Annotated[
        float | None,
        typer.Option("--every", metavar="SECONDS", min=1, max=86_400, help="With --out: again and again."),
    ] = None,
    port: Annotated[
        int | None,
        typer.Option("--listen", metavar="PORT", min=1, max=65_535, help="Serve them at this loopback port."),
    ] = None,
) -> None:
    """Print the board's metrics, or write them to a file, or serve them on this board.

    They say what `status` says, without what sensors read, and tell nothing of a record. Who reads them
    learns which rounds this board took part in, unless limits.dummy_traffic hides that. At a loopback port,
    every user of the board reads them.
    """
    from dpagent.extras import extra_needed

    with extra_needed("metrics", "This command"):
        registry = _registry(config)
        from prometheus_client import generate_latest
    if port is not None:
        stop = StopSignals()
        server = _server(port, registry)
        serving = threading.Thread(target=server.serve_forever, name="metrics")
        serving.start()
        stop.serving().wait()
        server.shutdown()
        serving.join()
        server.server_close()
        raise typer.Exit(stop.exit_code)
    if out is None:
        sys.stdout.write(generate_latest(registry).decode())
        return
    _write(out, registry)
    if every is not None:
        stop = StopSignals()
        event, due = stop.serving(), time.monotonic()
        while not event.wait(max(0.0, due - time.monotonic())):
            _write(out, registry)
            due = max(due + every, time.monotonic())
        raise typer.Exit(stop.exit_code)


class _Handler(WSGIRequestHandler):
    timeout = _REQUEST_S

    def log_message(self, format: str, *args: Any) -> None:
        """Nothing: a request a minute is no news."""


def _server(port: int, registry: CollectorRegistry) -> WSGIServer:
    """A server at a loopback port, under its own names alone: no site that a browser here shows reads it."""
    from prometheus_client import make_wsgi_app

    answer = make_wsgi_app(registry)

    def application(environment: dict[str, Any], start_response: Any) -> Any:
        if environment.get("HTTP_HOST", "").partition(":")[0] not in ("127.0.0.1", "localhost"):
            start_response("421 Misdirected Request", [("Content-Type", "text/plain")])
            return [b"Ask for 127.0.0.1.\n"]
        return answer(environment, start_response)

    try:
        return make_server("127.0.0.1", port, application, handler_class=_Handler)
    except OSError as error:
        raise ConfigurationError(
            f"metrics: cannot listen on 127.0.0.1, port {port} ({error.strerror}). Give another --listen."
        ) from error


def _write(out: Path, registry: CollectorRegistry) -> None:
    from prometheus_client import generate_latest

    from dpagent.storage import write_atomically

    write_atomically(out, generate_latest(registry), mode=0o644)


def _registry(config: Path | None) -> CollectorRegistry:
    from agent.metrics import registry_of
    from agent.overview import overview_of
    from agent.profile import open_profile
    from agent.sensors import Sensors
    from agent.settings import on_board

    loaded = agent_settings(config)
    settings = on_board(loaded, open_profile(loaded.profile).profile)
    sensors = Sensors()
    return registry_of(settings, lambda: overview_of(settings, sensors))
