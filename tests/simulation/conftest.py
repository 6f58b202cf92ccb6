"""One small Ray for all tests of virtual fleets on a worker, which ends with the last of them."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack
from importlib.util import find_spec
from typing import Any

import pytest

from simulation.virtual.cluster import ClusterRequest, ray_on

RUNNING = pytest.StashKey[tuple[Any, ExitStack]]()
IS_WANTED = pytest.StashKey[bool]()
"""By the test that comes next."""


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_teardown(item: pytest.Item, nextitem: pytest.Item | None) -> None:
    """Look ahead, before fixtures of the module end."""
    item.session.stash[IS_WANTED] = "ray" in getattr(nextitem, "fixturenames", ())


@pytest.fixture(scope="module")
def ray(request: pytest.FixtureRequest) -> Iterator[Any]:
    """It takes 5 s of a processor to start, and 4 % of one for as long as it runs."""
    if find_spec("ray") is None:  # Not imported: that reads variables which are set for it.
        pytest.skip("Ray is not installed")
    stash = request.session.stash
    if RUNNING not in stash:
        with ExitStack() as starting:
            started = starting.enter_context(ray_on(ClusterRequest(cores=2)))
            stash[RUNNING] = started, starting.pop_all()
    started, ending = stash[RUNNING]
    yield started
    if not stash[IS_WANTED]:
        del stash[RUNNING]
        ending.close()
