"""A fleet from Python: settled without a trace, run over a real broker, told to a listener, gone on with."""

from __future__ import annotations

import doctest
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest
from demos import own

import simulation
from dpagent import wording
from dpagent.errors import BrokerError, ConfigurationError
from dpagent.learning.data.dataset import ArrayDataset
from dpagent.learning.data.formats.npz import save_npz
from simulation import chance, request
from simulation.fleet import Fleet, Listener
from simulation.observer import Glimpse
from simulation.programs import broker as broker_module
from simulation.programs.broker import BrokerAddress
from simulation.programs.timing import RoundTimes
from simulation.request import BrokerRequest, DataSelection, Request

EMBEDDED = BrokerRequest(broker="embedded")


class Recorder(Listener):
    """Writes down what it is told."""

    def __init__(self, looked: Callable[[Glimpse], None] = lambda glimpse: None) -> None:
        self.told: list[str] = []
        self.glimpses: list[Glimpse] = []
        self._looked = looked

    def goes_on(self, fleet: Fleet, closed: int, *, is_finished: bool) -> None:
        self.told.append(f"goes on after {closed}{', finished' * is_finished}")

    def begins(self, fleet: Fleet) -> None:
        self.told.append("begins")

    def starts(self, fleet: Fleet, times: RoundTimes, broker: BrokerAddress) -> None:
        self.told.append(f"starts over {broker.name}")

    def looked(self, glimpse: Glimpse) -> None:
        self.glimpses.append(glimpse)
        self._looked(glimpse)


def blobs(path: Path) -> DataSelection:
    """Three classes that lie apart, in a file."""
    labels = np.arange(300, dtype=np.int64) % 3
    inputs = np.random.default_rng(1).normal(size=(300, 4)).astype(np.float32)
    inputs[:, :3] += 4 * np.eye(3, dtype=np.float32)[labels]
    save_npz(path, ArrayDataset(inputs, labels, 3))
    return own(path)


def test_a_fleet_trains_and_its_directory_remembers(tmp_path: Path) -> None:
    wanted = Request(data=blobs(tmp_path / "x.npz"), devices=2, rounds=3, epsilon=20, engine="numpy")
    root = tmp_path / "run"
    fleet = Fleet(wanted, root, broker=EMBEDDED)
    assert not fleet.goes_on
    assert not root.exists()
    assert (fleet.settings.form.train_records, fleet.settings.records_per_device) == (240, 120)
    recorder = Recorder()
    record = fleet.run(recorder)
    assert recorder.told == ["begins", "starts over embedded (amqtt)"]
    assert recorder.glimpses[-1].rounds[-1].number == 3
    assert len(record.accuracy_history) == len(record.baseline_history) == 3
    assert record.fragments.charged == record.fragments.counted > 0
    assert record.unverified == ()
    assert 0.99 * 20 < record.epsilon <= 20
    assert record.majority_class_accuracy == pytest.approx(1 / 3)
    assert record.has_learned
    assert record.layout.trained_model.exists()
    # The same request finds the run finished; another one finds the directory taken.
    again = Fleet(wanted, root)
    assert again.goes_on
    recorder = Recorder()
    assert again.run(recorder) == record
    assert recorder.told == ["goes on after 3, finished"]
    with pytest.raises(ConfigurationError, match="`rounds` was 3 and is 4"):
        Fleet(wanted.with_values({"rounds": 4}), root)


@pytest.mark.slow
def test_a_listener_that_raises_stops_the_fleet_and_it_goes_on(tmp_path: Path) -> None:
    def stop_after_a_round(glimpse: Glimpse) -> None:
        if any(record.closed_at is not None for record in glimpse.rounds):
            raise KeyboardInterrupt

    wanted = Request(data=blobs(tmp_path / "x.npz"), devices=2, rounds=4, baseline=False, engine="numpy")
    root = tmp_path / "run"
    with pytest.raises(KeyboardInterrupt):
        Fleet(wanted, root, broker=EMBEDDED).run(Recorder(stop_after_a_round))
    fleet = Fleet(wanted, root, broker=EMBEDDED)
    seconds = fleet.notes.seconds
    recorder = Recorder()
    record = fleet.run(recorder)
    assert recorder.told[0] in {f"goes on after {closed}" for closed in (1, 2, 3)}
    assert len(record.accuracy_history) == 4
    assert record.baseline_history == ()
    assert record.fragments.lost == 0
    assert record.notes.seconds > seconds > 0


def test_a_broker_that_does_not_answer_is_an_error_and_costs_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(broker_module, "_READY_S", 1.0)
    wanted = Request(data=blobs(tmp_path / "x.npz"), devices=2, rounds=2)
    broker = BrokerRequest(broker="mqtt://127.0.0.1:1")
    with pytest.raises(BrokerError, match=r"127\.0\.0\.1:1"):
        Fleet(wanted, tmp_path / "run", broker=broker).run()
    assert not list((tmp_path / "run").glob("device-*/state/*"))


@pytest.mark.parametrize("module", [simulation, request, chance, wording], ids=lambda module: module.__name__)
def test_examples_in_docstrings_are_true(module: ModuleType) -> None:
    outcome = doctest.testmod(module)
    assert outcome.attempted > 0
    assert outcome.failed == 0
