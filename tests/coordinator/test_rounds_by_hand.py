"""Rounds of a coordinator without a broker: fragments are put into its store, and rounds closed."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
import yaml
from daemons import running_job
from fleets import DIGITS, write_fleet
from numpy.typing import NDArray

from agent.current_model import current_model
from coordinator import announcer, planning, queue
from coordinator.daemon import _BATCH, Coordinator
from coordinator.reader import StoreReader
from coordinator.seats import OpenedFragment
from coordinator.settings import FIRST_JOB, FleetSettings, load_fleet_settings
from dpagent import faults
from dpagent.errors import ConfigurationError, PlanError, UsageError
from dpagent.faults import FaultPoint
from dpagent.learning.data.input_form import InputForm
from dpagent.learning.data.settings import DatasetSettings
from dpagent.learning.inference.model_bytes import weights_of
from dpagent.learning.inference.prediction.exported_model import ExportedModel
from dpagent.learning.inference.prediction.reader import InputReader
from dpagent.protocol.chunks import content_digest
from dpagent.protocol.messages import MAX_WHOLE_BYTES
from dpagent.protocol.task import RoundTask
from dpagent.protocol.weights import weights_to_bytes
from dpagent.transport.events import Event, Received

Begin = Callable[[FleetSettings], Coordinator]


def settings_of(directory: Path, **changes: Any) -> FleetSettings:
    return load_fleet_settings(
        write_fleet(directory, None, **{"keep_models": "last", "cap": {"kind": "none"}} | changes)
    )


@pytest.fixture
def begin() -> Iterator[Begin]:
    """Coordinators that let go of their directories at the end, or when the next one starts."""
    running: list[Coordinator] = []

    def end() -> None:
        for coordinator in running:
            coordinator.close()
        running.clear()

    def start(settings: FleetSettings) -> Coordinator:
        end()
        running.append(Coordinator(settings))
        return running[-1]

    yield start
    end()


_identities = itertools.count()


def run_round(coordinator: Coordinator, *updates: Callable[[RoundTask], NDArray[np.int64]]) -> RoundTask:
    """Open a round, count each device's update and close it."""
    cycle = running_job(coordinator).cycle
    cycle.open()
    task = cycle._task
    assert task is not None
    number, block = task.plan.round, task.plan.wire.block
    for update in updates:
        values = update(task)
        values = np.concatenate([values, np.zeros(-len(values) % block, np.int64)]).reshape(-1, block)
        running_job(coordinator).store.count(
            [
                OpenedFragment(next(_identities).to_bytes(16, "big"), number, position, row, 0.0)
                for position, row in enumerate(values)
            ],
            number,
            seats=len(updates),
        )
    cycle._close(cycle.progress())
    return task


def noise(task: RoundTask) -> NDArray[np.int64]:
    return (
        np.random.default_rng(task.plan.round).integers(-500, 500, task.release.dimension) * 2 + 1
    )  # never 0


def projected_model(directory: Path) -> None:
    directory.mkdir(parents=True, exist_ok=True)
    model = {
        "name": "projected", "input_shape": [8, 8, 1], "classes": 10,
        "front_end": [{"projection": 6}], "layers": [{"dense": 10}],
    }  # fmt: skip
    (directory / "projected.yaml").write_text(yaml.safe_dump(model))


@pytest.mark.parametrize("has_projection", [False, True])
@pytest.mark.parametrize("restarts", [False, True])
def test_steps_are_counted_and_not_rounds(
    tmp_path: Path, begin: Begin, has_projection: bool, restarts: bool
) -> None:
    """Adam on gradients of one sign moves by the learning rate in each step, from the first on."""
    projected_model(tmp_path)
    settings = settings_of(
        tmp_path,
        rounds=3 + has_projection,
        model={"name": "projected.yaml" if has_projection else "digits"},
        optimiser={"kind": "adam", "learning_rate": 0.3, "final_learning_rate": 0.03},
    )
    coordinator = begin(settings)
    if has_projection:
        before = running_job(coordinator).store.model().weights
        run_round(coordinator, noise)
        assert np.array_equal(running_job(coordinator).store.model().weights, before)
    moved = []
    for _ in range(3):
        if restarts:
            coordinator = begin(settings)
        before = running_job(coordinator).store.model().weights.astype(np.float64)
        run_round(coordinator, lambda task: np.full(task.release.dimension, -7, np.int64))
        moved.append(running_job(coordinator).store.model().weights - before)
    # From 0.3 to 0.03 over three steps, as of their beginnings: 0.3, 0.21, 0.12.
    for step, expected in zip(moved, (0.3, 0.21, 0.12), strict=True):
        np.testing.assert_allclose(step, expected, rtol=1e-4)


def test_a_crash_between_the_directions_and_the_close_changes_no_plan(
    tmp_path: Path, begin: Begin, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A device that is charged for the round runs it again only for the plan that it was charged for."""
    projected_model(tmp_path)
    settings = settings_of(tmp_path, model={"name": "projected.yaml"})

    def crash(point: FaultPoint) -> None:
        if point is FaultPoint.COORDINATOR_STEPPED:
            raise KeyboardInterrupt

    monkeypatch.setattr(faults, "reached", crash)
    plans = []
    for _ in range(2):
        coordinator = begin(settings)
        with pytest.raises(KeyboardInterrupt):
            run_round(coordinator, noise)
        task = running_job(coordinator).cycle._task
        assert task is not None
        plans.append(task.plan.with_values({"deadline": 0.0}))
        assert "projection" in running_job(coordinator).models.assets
    assert plans[0] == plans[1]
    assert plans[0].round == 1


@pytest.mark.slow
def test_a_bounded_cap_goes_by_what_is_spent_also_after_a_restart_and_ends_a_job_that_meets_it_no_more(
    tmp_path: Path, begin: Begin
) -> None:
    """A cap of 2.2 clip norms costs ε = 7.0 a round at q = 1/2: two rounds of four, with 16."""
    privacy = {"method": "incrementing", "noise": "laplace", "epsilon": 16.0}
    settings = settings_of(
        tmp_path,
        rounds=4,
        privacy=privacy,
        cap={"kind": "bounded", "regularisation": 1e-6, "floor": 0.088},
    )
    tasks, spent = [], [0.0]
    for _ in range(2):
        coordinator = begin(settings)
        running_job(coordinator).cycle.open()
        before = running_job(coordinator).cycle._task
        coordinator = begin(settings)
        tasks.append(run_round(coordinator, noise))
        assert before is not None
        same = {"deadline": 0.0}
        assert before.plan.with_values(same) == tasks[-1].plan.with_values(same)
        spent.append(running_job(coordinator).store.epsilon_spent())
    assert [task.release.terms.cap.spent for task in tasks] == spent[:2]
    assert 13.9 < spent[2] < 14.1
    for _ in range(2):
        coordinator = begin(settings)
        assert not running_job(coordinator).cycle.is_over
        running_job(coordinator).cycle.advance()
        assert running_job(coordinator).cycle.is_over
        assert running_job(coordinator).store.open_round() is None
        assert not running_job(coordinator).cycle.finish()  # no broker yet
        model = onnx.load_from_string((settings.directory_of(FIRST_JOB) / "model.onnx").read_bytes())
        metadata = {each.key: each.value for each in model.metadata_props}
        assert metadata["dpagent.round"] == "2"
        assert float(metadata["dpagent.epsilon_spent"]) == spent[2]


PIXELS = {"features": [f"p{number}" for number in range(64)], "offset": 8, "scale": 4}


def test_a_model_carries_what_its_inputs_are(
    tmp_path: Path, begin: Begin, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As fleet.yaml says, and else as the test data are declared, whose rows are as users have them."""
    monkeypatch.setattr(announcer, "_FAREWELL_S", 0.05)
    rows = np.random.default_rng(2).uniform(0, 16, (20, 64)).round(1)
    lines = [",".join([*map(str, row), str(number % 10)]) for number, row in enumerate(rows)]
    (tmp_path / "test.csv").write_text("\n".join([",".join([*PIXELS["features"], "label"]), *lines, ""]))
    test_data = {"path": "test.csv", "classes": 10, "shape": [8, 8, 1], "csv": PIXELS}
    for name, changes in {
        "said": {"model": {"inputs": {"csv": PIXELS}}},
        "tested": {"test_data": test_data | {"path": "../test.csv"}},
        "both": {
            "model": {"inputs": {"csv": PIXELS | {"scale": dict.fromkeys(PIXELS["features"], 4)}}},
            "test_data": test_data | {"path": "../test.csv"},
        },
    }.items():
        settings = settings_of(tmp_path / name, **changes)
        coordinator = begin(settings)
        run_round(coordinator, noise)
        assert not running_job(coordinator).cycle.finish()  # no broker
        model = ExportedModel(settings.directory_of(FIRST_JOB) / "model.onnx")
        form = InputForm.checked({"csv": PIXELS})
        assert model.inputs is not None
        assert model.inputs.differences(form) == []
        # Rows as they stand in the file are answered as the coordinator's test was.
        reader = InputReader(model, DatasetSettings(path=tmp_path, classes=10), lambda sentence: None)
        (first, *_) = reader.read(tmp_path / "test.csv")
        np.testing.assert_allclose(first.values, ((rows[0] - 8) / 4).reshape(8, 8, 1), rtol=1e-6)


@pytest.mark.parametrize(
    ("inputs", "test_scale", "said"),
    [
        (
            {"csv": PIXELS | {"features": ["a", "b"]}},
            None,
            "records of shape (2,), and the model takes (8, 8, 1)",
        ),
        ({"csv": {"scale": 2}}, None, "does not settle what a record is"),
        ({"csv": PIXELS}, 5.0, "model.inputs.csv.scale is 4.0, and test_data.csv.scale is 5.0"),
    ],
)
def test_inputs_that_are_not_those_of_the_model_or_of_the_test_are_refused(
    tmp_path: Path, inputs: dict[str, Any], test_scale: float | None, said: str
) -> None:
    changes: dict[str, Any] = {}
    if test_scale is not None:
        rows = [",".join([*PIXELS["features"], "label"]), ",".join(["1"] * 65)]
        (tmp_path / "test.csv").write_text("\n".join([*rows, ""]))
        changes["test_data"] = {
            "path": "test.csv", "classes": 10, "shape": [8, 8, 1], "csv": PIXELS | {"scale": test_scale}
        }  # fmt: skip
    with pytest.raises(ConfigurationError) as caught:
        Coordinator(settings_of(tmp_path, model={"inputs": inputs}, **changes))
    assert said in str(caught.value)


def huge(task: RoundTask) -> NDArray[np.int64]:
    return np.full(task.release.dimension, 30_000, np.int64)


@pytest.mark.parametrize("kind", ["gradients", "a projection", "a quantile"])
def test_a_median_of_three_devices_is_what_two_of_them_agree_on(
    tmp_path: Path, begin: Begin, kind: str
) -> None:
    """Weights, directions and the next clip norm do not change with what the third sends."""
    projected_model(tmp_path)
    changes: dict[str, Any] = {"rounds": 3, "devices": 3}
    if kind == "a projection":
        changes["model"] = {"name": "projected.yaml"}
    if kind == "a quantile":
        changes["privacy"] = {"clipping": {"kind": "quantile"}}
    found = []
    for number, (kinds, third) in enumerate(itertools.product(("median-of-means", "mean"), (noise, huge))):
        coordinator = begin(
            settings_of(
                tmp_path, state_dir=f"state-{number}", aggregation={"kind": kinds, "groups": 3}, **changes
            )
        )
        for _ in range(2):
            task = run_round(coordinator, noise, noise, third)
        norms = running_job(coordinator).store.model().clip_norm
        assets = sorted(running_job(coordinator).models.assets.items())
        found.append(
            (
                running_job(coordinator).store.model().weights.tobytes(),
                norms,
                assets,
                task.release.clipping.norms,
            )
        )
    assert found[0] == found[1] == found[2]
    assert found[3] != found[2]


def test_a_median_of_groups_goes_on_with_fewer_devices_than_groups(tmp_path: Path, begin: Begin) -> None:
    """Two of five come: the median of two groups of one is their mean."""
    found = []
    for kinds in ("median-of-means", "mean"):
        settings = settings_of(tmp_path, state_dir=kinds, devices=5, aggregation={"kind": kinds, "groups": 5})
        coordinator = begin(settings)
        run_round(coordinator, noise, huge)
        found.append(running_job(coordinator).store.model().weights)
    np.testing.assert_allclose(found[0], found[1], rtol=1e-5)


def test_a_job_with_a_projection_and_no_round_to_step_in_is_refused(tmp_path: Path, begin: Begin) -> None:
    projected_model(tmp_path)
    with pytest.raises(PlanError, match="rounds is 1; expected at least 2"):
        begin(settings_of(tmp_path, rounds=1, model={"name": "projected.yaml"}))
    begin(settings_of(tmp_path, rounds=2, model={"name": "projected.yaml"}))  # no job had begun


def test_the_round_that_all_others_need_cannot_be_given_up(tmp_path: Path, begin: Begin) -> None:
    projected_model(tmp_path)
    settings = settings_of(tmp_path, rounds=3, model={"name": "projected.yaml"})
    coordinator = begin(settings)
    running = running_job(coordinator)
    orders = queue.Queue(running.store.database)
    running.cycle.open()
    with pytest.raises(UsageError, match=r"Round 1 of job 'first' finds the directions that all others need"):
        orders.give_up("first", settings)
    run_round(coordinator, noise)
    running.cycle.open()
    assert orders.give_up("first", settings).gives_up == 2


@pytest.mark.parametrize(("first", "are_within"), [(999_999.0, False), (1.1e-9, True)])
@pytest.mark.parametrize("method", ["dp-sgd", "central"])
def test_a_norm_that_follows_a_quantile_never_leaves_what_plans_allow(
    tmp_path: Path, begin: Begin, method: str, first: float, are_within: bool
) -> None:
    clipping = {"kind": "quantile", "rate": 1.0}
    settings = settings_of(
        tmp_path, rounds=3, privacy={"method": method, "clip_norm": first, "clipping": clipping}
    )

    def update(task: RoundTask) -> NDArray[np.int64]:
        values = np.zeros(task.release.dimension, np.int64)
        values[-1] = 10**8 if are_within else -(10**8)
        return values

    coordinator = begin(settings)
    for _ in range(2):
        run_round(coordinator, update)
    coordinator = begin(settings)  # and it is what the next start finds
    run_round(coordinator, update)
    end = 1e-9 if are_within else 1e6
    reader = StoreReader(settings.state_dir)
    assert [each.clip_norm for each in reader.rounds()] == [first, end, end]
    reader.close()


def test_what_is_too_large_to_send_is_refused_before_the_job_begins(
    tmp_path: Path, begin: Begin, monkeypatch: pytest.MonkeyPatch
) -> None:
    planning.require_sendable(DIGITS, {"frozen-network": bytes(MAX_WHOLE_BYTES)})
    with pytest.raises(PlanError, match="frozen-network of model 'digits': 200,000,001 bytes; expected at"):
        planning.require_sendable(DIGITS, {"projection": b"", "frozen-network": bytes(MAX_WHOLE_BYTES + 1)})
    monkeypatch.setattr(planning, "MAX_WHOLE_BYTES", 4 * DIGITS.parameter_count - 1)
    with pytest.raises(PlanError, match="weights of model 'digits': "):
        begin(settings_of(tmp_path))
    reader = StoreReader(tmp_path / "state")
    assert reader.jobs() == []
    reader.close()


class Queue:
    """Stands in for a session: what is queued comes at once, and then nothing."""

    def __init__(self, topic: str, messages: list[bytes]) -> None:
        self.events: list[Event] = [Received(topic, message) for message in messages]
        self.acknowledged: list[Received] = []

    def next_event(self, _timeout_s: float) -> Event | None:
        return self.events.pop(0) if self.events else None

    def acknowledge(self, messages: list[Received]) -> None:
        self.acknowledged.extend(messages)


def test_no_message_is_dropped_between_two_batches(
    tmp_path: Path, begin: Begin, monkeypatch: pytest.MonkeyPatch
) -> None:
    coordinator = begin(settings_of(tmp_path))
    running_job(coordinator).cycle.open()
    number = 2 * _BATCH + 1
    queued = Queue(coordinator._topics.fragments, [b"rubbish"] * number)
    monkeypatch.setattr(coordinator, "_session", queued)
    for left in (_BATCH + 1, 1, 0):
        coordinator._take_events()
        assert len(queued.events) == left
        assert len(queued.acknowledged) == number - left
    reader = StoreReader(tmp_path / "state")
    assert reader.counters() == {"rejected: unsupported version": number}
    reader.close()


@pytest.mark.parametrize("has_projection", [False, True])
@pytest.mark.parametrize("restarts", [False, True])
def test_devices_are_sent_the_models_file_from_the_first_step_on_if_the_operator_says_so(
    tmp_path: Path, begin: Begin, has_projection: bool, restarts: bool
) -> None:
    projected_model(tmp_path)
    settings = settings_of(
        tmp_path, rounds=4, current_models=True, keep_models="all",
        model={"name": "projected.yaml" if has_projection else "digits", "precision": "float32"},
    )  # fmt: skip
    spec, coordinator = settings.model.spec(), begin(settings)
    for number in (1, 2, 3):
        task = run_round(coordinator, noise)
        export = task.plan.export
        assert (export is not None) == (number > 1 + has_projection)
        if export is not None:
            models = running_job(coordinator).cycle._models
            file = models.assets["export"]
            assert (export.digest, export.size) == (content_digest(file), len(file))
            before = models.of_round(number - 1)
            weights = weights_to_bytes(weights_of(before.read_bytes(), spec), "float32")
            (tmp_path / "filled.onnx").write_bytes(current_model(task.plan, file, weights))
            theirs, ours = ExportedModel(before), ExportedModel(tmp_path / "filled.onnx")
            inputs = np.full((1, 8, 8, 1), 0.5, np.float32)
            assert np.array_equal(ours.probabilities(inputs), theirs.probabilities(inputs))
            assert (ours.round, ours.inputs) == (number - 1, theirs.inputs)
            assert theirs.spent
            assert not ours.spent
        if restarts:
            coordinator = begin(settings)


def test_by_default_devices_are_sent_no_file_of_the_model(tmp_path: Path, begin: Begin) -> None:
    coordinator = begin(settings_of(tmp_path))
    run_round(coordinator, noise)
    assert run_round(coordinator, noise).plan.export is None
