"""A broker for all tests of a file that need one with passwords, and what they see of it."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from observed import Observations
from servers import SOFTWARE, Server


@pytest.fixture(scope="module", params=SOFTWARE)
def server(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    server = Server(request.param, tmp_path_factory.mktemp(request.param) / "server")
    try:
        yield server.start()
    finally:
        server.give_up()


@pytest.fixture
def observations(server: Server) -> Observations:
    return Observations(server.software)
