"""One small Ray for all tests of virtual fleets on a worker."""

from __future__ import annotations

from collections.abc import Iterator
from importlib.util import find_spec
from typing import Any

import pytest

from simulation.virtual.cluster import ClusterRequest, ray_on


@pytest.fixture(scope="session")
def ray() -> Iterator[Any]:
    if find_spec("ray") is None:  # Not imported: that reads variables which are set for it.
        pytest.skip("Ray is not installed")
    with ray_on(ClusterRequest(cores=2)) as started:
        yield started
