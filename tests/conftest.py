"""Fixtures for tests that need a broker."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from brokers import Broker, Software

BrokerFactory = Callable[..., Broker]


@pytest.fixture
def new_broker(tmp_path: Path) -> Iterator[BrokerFactory]:
    """Makes brokers, not yet started, that end with the test."""
    made: list[Broker] = []

    def make(software: Software = "mosquitto", protocol: str = "auto") -> Broker:
        directory = tmp_path / f"broker-{len(made)}"
        directory.mkdir()
        made.append(Broker(software, directory, protocol))
        return made[-1]

    yield make
    for broker in made:
        broker.stop()


@pytest.fixture(scope="session")
def mosquitto(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Broker]:
    """One Mosquitto for all tests that leave it running; their fleets' names keep them apart."""
    broker = Broker("mosquitto", tmp_path_factory.mktemp("mosquitto")).start()
    yield broker
    broker.stop()


@pytest.fixture
def amqtt(tmp_path: Path) -> Iterator[Broker]:
    """An amqtt of its own for each test: it waits for a subscriber that left with messages under
    way, and keeps the others waiting meanwhile."""
    directory = tmp_path / "amqtt"
    directory.mkdir()
    broker = Broker("amqtt", directory).start()
    yield broker
    broker.stop()
