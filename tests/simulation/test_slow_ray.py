"""What a user is told where Ray's own processes take too long to begin."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from dpagent.errors import ClusterError
from simulation.virtual import cluster
from simulation.virtual.cluster import ClusterRequest, ray_on


def too_slow(**_settings: Any) -> None:
    """As Ray does after half a minute on a machine that others keep busy."""
    raise Exception("The current node timed out during startup.")


@pytest.mark.parametrize("address", [None, "127.0.0.1:1"])
def test_a_start_that_takes_too_long_is_said_without_a_traceback(
    address: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Before, an internal error."""
    slow = SimpleNamespace(init=too_slow, shutdown=lambda: None)
    monkeypatch.setattr(cluster, "ray_package", lambda _request: slow)
    with pytest.raises(ClusterError, match="timed out during startup"), ray_on(ClusterRequest(address)):
        pass
