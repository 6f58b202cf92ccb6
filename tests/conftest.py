"""What all tests share: the order in which they start, the profiles of Hypothesis, the brokers."""

from __future__ import annotations

import gc
import os
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

# Read when numpy is first imported. Several processes share the cores: each has one thread.
os.environ["OPENBLAS_NUM_THREADS"] = "1"

import hypothesis
import launching.starts
import pytest
from brokers import Broker, BrokerFactory, Software
from hypothesis import HealthCheck, Phase
from postgresql import Postgresql, new_place, postgresql_server

from coordinator.database.settings import StorePlace

MEMORY = Path("/dev/shm")
"""A file system in memory, on Linux."""
ROOM_BYTES = 4 << 30
"""More than the tests' files take at a time."""


def has_room(place: Path) -> bool:
    """Whether the files of the tests fit there."""
    try:
        disk, memory = os.statvfs(place), Path("/proc/meminfo").read_text()
    except OSError:
        return False
    (available,) = [line for line in memory.splitlines() if line.startswith("MemAvailable:")]
    room = min(disk.f_bavail * disk.f_frsize, int(available.split()[1]) << 10)
    return os.access(place, os.W_OK) and room >= ROOM_BYTES


# The programs wait for a disk after everything that they promise to keep. No test cuts the power.
if has_room(MEMORY):
    os.environ.setdefault("PYTEST_DEBUG_TEMPROOT", str(MEMORY))

# What a developer has set for a board of their own is no setting of a test's.
for variable in [name for name in os.environ if name.startswith("DPAGENT_")]:
    del os.environ[variable]

# No deadline: the machines of tests are busy. `explore` looks at other examples in every run.
# A machine that is busy is no finding.
hypothesis.settings.register_profile(
    "suite", derandomize=True, deadline=None, suppress_health_check=[HealthCheck.too_slow]
)
hypothesis.settings.register_profile("explore", deadline=None, print_blob=True)
# A mutant is found by the first failure: looking for a smaller example takes longer than the test.
hypothesis.settings.register_profile(
    "mutation", derandomize=True, deadline=None, database=None, phases=[Phase.explicit, Phase.generate]
)
hypothesis.settings.load_profile("suite")


SERVER_OF_FORKS = pytest.StashKey[launching.starts.Server]()
"""Of the process that hands tests to workers."""


@pytest.hookimpl(tryfirst=True)
def pytest_configure(config: pytest.Config) -> None:
    """Start programs by forks of one process for all workers, and the workers by forks of another."""
    hands_out = bool(config.getoption("numprocesses", None)) and not hasattr(config, "workerinput")
    if not hands_out:
        gc.disable()  # Until the tests are collected, of which nothing is garbage.
    if getattr(config.option, "executed", False):
        return
    if hasattr(config, "workerinput"):
        launching.starts.use(config.workerinput["server_of_forks"])
    elif not hands_out:
        launching.starts.use(None)
    else:
        is_measured = launching.starts.is_measured(os.environ)  # Workers are executed then.
        server = launching.starts.Server(None if is_measured else config.invocation_params.args)
        config.stash[SERVER_OF_FORKS] = server
        launching.starts.use(server.address, hands_out=True)


def pytest_collection_finish() -> None:
    """Look for garbage from now on, and not among the tests."""
    gc.freeze()
    gc.enable()


@pytest.hookimpl(optionalhook=True)
def pytest_configure_node(node: Any) -> None:
    """Tell a worker where it is."""
    if (server := node.config.stash.get(SERVER_OF_FORKS, None)) is not None:
        node.workerinput["server_of_forks"] = server.address


def pytest_unconfigure(config: pytest.Config) -> None:
    """End it, and what it has forked."""
    launching.starts.close()
    if (server := config.stash.get(SERVER_OF_FORKS, None)) is not None:
        server.close()


def pytest_addoption(parser: pytest.Parser) -> None:
    """Options of the tests' own."""
    parser.addoption("--executed", action="store_true", help="start every program anew, and fork none")


@pytest.fixture
def executed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Programs are started anew: for a test of a start, of memory, or of who is whose parent."""
    monkeypatch.setenv(launching.starts.EXECUTED, "1")


@pytest.fixture
def disk() -> Iterator[Path]:
    """A directory where boards have theirs: the kernel counts what is written there, and blocks of files."""
    with tempfile.TemporaryDirectory(prefix="dpagent-tests-") as directory:
        yield Path(directory)


@pytest.fixture
def brief_trials(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each engine is timed five times, and not for half a second: no test is about which is faster."""
    monkeypatch.setattr("dpagent.learning.training.engine_choice._TRIED_S", 0.0)


HEAVY_FOLDERS = {"accounting", "e2e", "examples", "noise", "simulation", "training", "transport"}
"""Oracles, statistics, every engine against the definition, whole fleets and their reports, brokers."""
HEAVY_FIXTURES = {"amqtt", "mosquitto", "new_broker"}
"""A broker, and mostly daemons at it."""


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark what is heavy by rule, and let it start first: no worker is left with it at the end.

    What wants a Ray comes before all others, and so on one worker, which has nothing else in between.
    """
    for item in items:
        fixtures = getattr(item, "fixturenames", ())
        if not HEAVY_FOLDERS.isdisjoint(item.path.parts) or not HEAVY_FIXTURES.isdisjoint(fixtures):
            item.add_marker("heavy")
    items.sort(
        key=lambda item: (
            "ray" not in getattr(item, "fixturenames", ()), item.get_closest_marker("heavy") is None,
        )
    )  # fmt: skip


@pytest.fixture
def new_broker(tmp_path: Path) -> Iterator[BrokerFactory]:
    """Makes brokers, not yet started, that end with the test."""
    made: list[Broker] = []

    def make(software: Software = "mosquitto", protocol: str = "auto", options: Sequence[str] = ()) -> Broker:
        directory = tmp_path / f"broker-{len(made)}"
        directory.mkdir()
        made.append(Broker(software, directory, protocol, options=options))
        return made[-1]

    yield make
    for broker in made:
        broker.give_up()


@pytest.fixture(scope="session")
def mosquitto(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Broker]:
    """One Mosquitto a worker for all tests that leave it running; their fleets' names keep them apart."""
    broker = Broker("mosquitto", tmp_path_factory.mktemp("mosquitto"))
    broker.tests_by_fleet = {}
    broker.start()
    yield broker
    broker.give_up()


@pytest.fixture(scope="session")
def postgresql() -> Iterator[Postgresql]:
    """One PostgreSQL a worker for all tests that leave it running; each has a schema of its own."""
    with postgresql_server() as server:
        yield server


@pytest.fixture(params=["sqlite", "postgresql"])
def place(request: pytest.FixtureRequest, tmp_path: Path) -> StorePlace:
    """A place for a coordinator's state, of each kind."""
    if request.param == "sqlite":
        return tmp_path
    server: Postgresql = request.getfixturevalue("postgresql")
    return new_place(server)


@pytest.fixture
def amqtt(tmp_path: Path) -> Iterator[Broker]:
    """An amqtt of its own for each test: it waits for a subscriber that left with messages under
    way, and keeps the others waiting meanwhile."""
    directory = tmp_path / "amqtt"
    directory.mkdir()
    broker = Broker("amqtt", directory).start()
    yield broker
    broker.give_up()
