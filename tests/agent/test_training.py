"""What the board keeps from round to round: the engine it chose or was told, and the features."""

from __future__ import annotations

import gc
import hashlib
import importlib
import json
import logging
import math
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import cbor2
import numpy as np
import pytest
from devices import started_trainer
from fleets import DIGITS, digits, make_task, terms, write_agent
from frozen_networks import choosy
from neighbours import decode_here
from numpy.typing import NDArray

from agent.declined import Declined
from agent.effort import Effort
from agent.profile import load_profile
from agent.settings import load_agent_settings
from agent.training import Trainer, Update
from agent.worker import training_settings
from dpagent import storage
from dpagent.errors import ConfigurationError, StorageError
from dpagent.learning.data.dataset import DIGEST_BYTES, ArrayDataset, Dataset
from dpagent.learning.data.derived import Unfailing
from dpagent.learning.front_end.features import reserve
from dpagent.learning.models.description import from_description
from dpagent.learning.training import engine_choice
from dpagent.learning.training.engine import MAX_LOT_MICROBATCHES
from dpagent.learning.training.engine_choice import UnsuitableEngineError
from dpagent.learning.training.numpy_engine.engine import NumpyEngine
from dpagent.learning.training.onnx_graph.build import build_training_graph
from dpagent.learning.training.parallel_engine import ParallelEngine
from dpagent.protocol.signing import Signer, new_signing_secret
from dpagent.protocol.task import RoundTask

pytestmark = pytest.mark.usefixtures("brief_trials")
KEY = Signer(new_signing_secret(), "testers").public_key
WEIGHTS = DIGITS.initial_weights(0)
GRAPH = {"training-graph": build_training_graph(DIGITS)}
TASK_AT_HALF = make_task(**terms(rate=0.5))
TASK = make_task(**terms(rate=1.0), step=1_025)


def trainer(directory: Path, *, features_mib: int = 1, **changes: Any) -> Trainer:
    data = {"features_mib": features_mib} | changes.pop("data", {})
    settings = load_agent_settings(
        write_agent(directory, None, KEY, data=data, **({"engine": "auto"} | changes))
    )
    return started_trainer(settings)


def run(board: Trainer, task: RoundTask, assets: Mapping[str, bytes], weights: NDArray[np.float32]) -> Update:
    """Both parts of a round, without a charge between them."""
    return board.noisy_update(board.prepare(task, assets, weights))


def choice(directory: Path) -> Any:
    return json.loads((directory / "state" / "engine.json").read_text())


@pytest.fixture(autouse=True)
def _logged(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)


def test_a_choice_is_kept_for_the_next_start(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    update = run(trainer(tmp_path), TASK, GRAPH, WEIGHTS)
    assert update.values.shape == (DIGITS.parameter_count,)
    assert "engine for digits" in caplog.text
    assert choice(tmp_path)["engine"] in ("numpy", "onnx")
    caplog.clear()
    again = trainer(tmp_path)
    run(again, TASK, GRAPH, WEIGHTS)
    run(again, TASK, GRAPH, WEIGHTS)
    assert "engine for" not in caplog.text
    # Without the graph it is another question.
    run(trainer(tmp_path), TASK, {}, WEIGHTS)
    assert "the coordinator sent no training graph" in caplog.text
    assert choice(tmp_path)["engine"] == "numpy"


def test_processes_are_kept_with_the_choice_and_made_anew_where_one_has_ended(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(engine_choice._Lot, "seconds", lambda lot, engine: 1.0 / engine.processes)
    settings = load_agent_settings(write_agent(tmp_path, None, KEY, engine="numpy"))
    started_trainer(settings)
    profile = load_profile("generic-x86-64").with_values({"processes": 3})
    board = Trainer(training_settings(settings, profile))
    work = board.prepare(TASK, {}, WEIGHTS)
    assert isinstance(work.engine, ParallelEngine)
    assert (work.engine.processes, choice(tmp_path)["processes"]) == (3, 3)
    again = Trainer(training_settings(settings, profile))
    monkeypatch.setattr("agent.board_engine.choose_engine", None)
    assert again.prepare(TASK, {}, WEIGHTS).engine is not None, "by the choice that is kept"
    tried = []
    try_memory = Effort.try_memory
    monkeypatch.setattr(Effort, "try_memory", lambda self: tried.append(1) or try_memory(self))
    assert board.prepare(TASK, {}, WEIGHTS).engine is work.engine
    assert not tried
    work.engine.close()
    fresh = board.prepare(TASK, {}, WEIGHTS).engine
    assert isinstance(fresh, ParallelEngine)
    assert fresh.is_whole
    assert tried, "its processes are others"
    fresh.close()


@pytest.mark.parametrize("kept", ["", "{", "[]", '{"engine": "abacus", "purpose": 1}'])
def test_a_damaged_choice_is_made_again(tmp_path: Path, kept: str) -> None:
    one = trainer(tmp_path)
    (tmp_path / "state" / "engine.json").write_text(kept)
    run(one, TASK, GRAPH, WEIGHTS)
    assert choice(tmp_path)["engine"] in ("numpy", "onnx")


def test_another_runtime_needs_a_new_trial_whatever_its_package_is_called(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Before, all that are not of the usual name were one."""
    module = tmp_path / "runtime_of_the_board"
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr("agent.board_engine.ONNX_RUNTIME", module.name)
    found = [_purpose_now(tmp_path)]
    (module / "capi").mkdir(parents=True)
    (module / "__init__.py").touch()
    found.append(_purpose_now(tmp_path))
    assert _purpose_now(tmp_path) == found[-1]
    package = tmp_path / f"{module.name}-1.0.dist-info"
    package.mkdir()
    found.append(_purpose_now(tmp_path))
    package.rename(tmp_path / f"{module.name}_gpu-1.0.dist-info")
    found.append(_purpose_now(tmp_path))
    (module / "capi" / "state.cpython-312.so").write_bytes(b"a build of the board's own")
    found.append(_purpose_now(tmp_path))
    assert len(set(found)) == len(found)


def _purpose_now(directory: Path) -> str:
    importlib.invalidate_caches()
    run(trainer(directory), TASK, GRAPH, WEIGHTS)
    return str(choice(directory)["purpose"])


def test_a_runtime_that_is_one_file_keeps_no_round_from_running(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "runtime_of_the_board.py").touch()
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr("agent.board_engine.ONNX_RUNTIME", "runtime_of_the_board")
    run(trainer(tmp_path), TASK, GRAPH, WEIGHTS)


def test_an_engine_that_was_told_is_taken_or_the_round_declined(tmp_path: Path) -> None:
    settings = load_agent_settings(write_agent(tmp_path, None, KEY, engine="onnx"))
    started_trainer(settings)
    unlimited = load_profile("generic-x86-64").with_values({"engine_memory_mib": None})
    run(Trainer(training_settings(settings, unlimited)), TASK, GRAPH, WEIGHTS)
    assert not (tmp_path / "state" / "engine.json").exists(), "there is nothing to try"
    limited = unlimited.with_values({"engine_memory_mib": 256})
    run(Trainer(training_settings(settings, limited)), TASK, GRAPH, WEIGHTS)
    assert choice(tmp_path)["engine"] == "onnx", "whether it fits into the profile's limit is tried"
    with pytest.raises(UnsuitableEngineError, match="the coordinator sent no training graph"):
        run(trainer(tmp_path, engine="onnx"), TASK, {}, WEIGHTS)


def test_a_round_is_declined_if_no_engine_fits_into_the_memory_that_the_profile_leaves_it(
    tmp_path: Path,
) -> None:
    settings = load_agent_settings(write_agent(tmp_path, None, KEY))
    started_trainer(settings)
    small, enough = (
        load_profile("generic-x86-64").with_values({"engine_memory_mib": mib}) for mib in (1, 256)
    )
    run(Trainer(training_settings(settings, enough)), TASK, GRAPH, WEIGHTS)
    with pytest.raises(UnsuitableEngineError, match=r"takes \d+ MiB; engine_memory_mib of the profile is 1"):
        # The choice that is kept was another limit's.
        Trainer(training_settings(settings, small)).prepare(TASK, GRAPH, WEIGHTS)


def test_a_plan_that_allows_too_little_for_float_sums_is_declined(tmp_path: Path) -> None:
    task = make_task(**terms(clipping={"accumulation_slack": 1e-6}))
    with pytest.raises(Declined, match=r"can add 0\.0003\d+ to a record's influence; the plan's"):
        run(trainer(tmp_path, engine="numpy"), task, {}, WEIGHTS)


POOLING = {"random": {"layers": [{"average_pool2d": {"kernel": 4, "stride": 4}}]}}


def features_task(stage: dict[str, Any] = POOLING) -> RoundTask:
    """A round whose model has a front end; without another, it makes 4 features of a record."""
    spec = from_description(DIGITS.describe() | {"front_end": [stage], "layers": [{"dense": 10}]})
    return make_task(
        model={
            "description": cbor2.dumps(spec.describe(), canonical=True),
            "parameters": spec.parameter_count,
            "architecture": spec.digest(),
        },
        **terms(rate=1.0),
        wire={"block": 50},
        step=1_025,
    )


def test_features_are_computed_once(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    task = features_task()
    board = trainer(tmp_path, engine="numpy")
    for _ in range(2):
        update = run(board, task, {}, np.zeros(50, np.float32))
        assert update.values.shape == (50,)
    assert caplog.text.count("computed features of 50 records") == 1
    (file,) = (tmp_path / "state").glob("features.f32")
    features = np.fromfile(file, np.float32)[: 50 * 4].reshape(50, 2, 2)  # with room for more
    inputs, _ = digits(0, 50).batch(np.arange(50))
    pooled = inputs.reshape(50, 2, 4, 2, 4).mean(axis=(2, 4))
    np.testing.assert_allclose(features, (pooled - 0.3) / 0.37, rtol=1e-4, atol=1e-5)


CIFAR = {
    "kind": "cifar", "path": "batches", "classes": 10, "cifar": {"layout": "cifar-10"}, "shape": None,
    "dtype": None,
}  # fmt: skip


@pytest.mark.parametrize(
    ("data", "front_end", "expected"),
    [
        ({"dtype": "float32"}, False, "float32"),
        ({"dtype": "uint8"}, False, "uint8"),
        ({"dtype": "uint8"}, True, "float32"),
        (CIFAR, False, "uint8"),
    ],
    ids=["declared", "bytes", "features of bytes", "the format's own"],
)
def test_made_up_records_are_stored_as_the_declared_ones_are(
    tmp_path: Path, data: dict[str, Any], front_end: bool, expected: str
) -> None:
    """What a trial reads and converts is what training does: of features, those of the file of features."""
    settings = load_agent_settings(
        write_agent(tmp_path, None, KEY, engine="numpy", data={"features_mib": 1} | data)
    )
    reserve(settings.state_dir, 1 << 20, 60)
    board = Trainer(training_settings(settings, load_profile("generic-x86-64")))
    task = features_task() if front_end else TASK
    effort = board.prepare(task, {}, np.zeros(task.spec.parameter_count, np.float32)).effort
    assert effort is not None
    assert effort.filling.made_up.dtype == np.dtype(expected)


NETWORK = choosy((8, 8, 1))
DIGEST = hashlib.sha256(NETWORK).hexdigest()
NETWORK_TASK = features_task({"onnx": {"digest": DIGEST, "output_shape": [8, 8, 1]}})
WITH_NETWORK = {"frozen-network": NETWORK}


def test_a_frozen_network_is_run_only_if_its_owner_trusts_its_digest(tmp_path: Path) -> None:
    for trusted in ([], ["0" * 64]):
        with pytest.raises(Declined, match=rf"SHA-256 {DIGEST}, which is not in trusted_graphs .*model show"):
            run(
                trainer(tmp_path, engine="numpy", trusted_graphs=trusted),
                NETWORK_TASK,
                WITH_NETWORK,
                np.zeros(650, np.float32),
            )
    assert not (tmp_path / "state" / "features.json").exists()
    board = trainer(tmp_path, engine="numpy", trusted_graphs=[DIGEST])
    update = run(board, NETWORK_TASK, WITH_NETWORK, np.zeros(650, np.float32))
    assert update.values.shape == (650,)
    # The digest that the plan names is not enough: the bytes are looked at.
    with pytest.raises(ConfigurationError, match="its network is not the one that the model names"):
        run(
            trainer(tmp_path, engine="numpy", trusted_graphs=[DIGEST]),
            NETWORK_TASK,
            {"frozen-network": choosy((8, 8, 2))},
            np.zeros(650, np.float32),
        )


def test_a_record_that_a_network_fails_on_does_not_show(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """The round goes on without the record, and only the board's own log tells."""
    board = trainer(tmp_path, engine="numpy", trusted_graphs=[DIGEST])
    data = digits(0, 50)
    data.inputs[7, 2, 3] = 1e6
    board.records.dataset = data
    update = run(board, NETWORK_TASK, WITH_NETWORK, np.zeros(650, np.float32))
    assert update.values.shape == (650,)
    assert "1 of 50 records have no finite features" in caplog.text
    (file,) = (tmp_path / "state").glob("features.f32")
    finite = np.isfinite(np.fromfile(file, np.float32)[: 50 * 64].reshape(50, -1)).all(axis=1)
    assert np.flatnonzero(~finite).tolist() == [7]


def test_a_plan_that_needs_more_room_than_declared_is_declined_whatever_the_disk_has(tmp_path: Path) -> None:
    """Room is for the most records that there may be: how many there are does not show."""
    board = trainer(tmp_path, features_mib=0)
    with pytest.raises(ConfigurationError, match=r"of 60 records .* take 1 MiB; data\.features_mib .* is 0"):
        board.prepare(features_task(), {}, np.zeros(50, np.float32))
    assert not list((tmp_path / "state").glob("features.*"))


def test_without_the_declared_room_for_features_the_agent_does_not_start(
    disk: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (disk / "state").mkdir()
    decode_here(load_agent_settings(write_agent(disk, None, KEY)).data, disk / "state")
    monkeypatch.setattr(storage, "SPACE_LEFT", 1 << 60)
    with pytest.raises(
        StorageError, match=r"features\.f32: features take 1,048,576 bytes more, and the disk"
    ):
        trainer(disk)
    monkeypatch.undo()
    trainer(disk)
    assert (disk / "state" / "features.f32").stat().st_blocks * 512 == 1 << 20


def test_a_lot_that_could_be_too_large_is_declined_however_few_records_there_are(tmp_path: Path) -> None:
    data = {"name": "digits", "path": "data.npz", "max_records": 600_000}
    board = trainer(tmp_path, engine="numpy", data=data)
    engine = board.prepare(TASK_AT_HALF, {}, WEIGHTS).engine
    assert engine is not None
    most = math.isqrt(MAX_LOT_MICROBATCHES * engine.microbatch) - engine.microbatch
    with pytest.raises(Declined, match=r"this board adds up at most"):  # By chance: as many are expected.
        board.prepare(make_task(**terms(rate=most / 600_000)), {}, WEIGHTS)
    with pytest.raises(Declined, match=r"a lot of 600,000 records \(data.max_records\) can have 600,000"):
        board.prepare(TASK, {}, WEIGHTS)


class Treacherous(ArrayDataset):
    """Records whose reading fails in an unexpected way."""

    error: Exception = ConfigurationError("a sentence")

    def _read(self, indices: Any) -> Any:
        raise type(self.error)(*self.error.args)  # a new one: an error keeps what it came through

    def digests(self) -> Any:
        """As of rows, which read no record for them."""
        return np.ones((len(self), DIGEST_BYTES), np.uint8)


def treacherous(error: Exception, told: list[str]) -> Dataset:
    """Such records as a board has them; ``told`` gets the sentences for its log."""
    data = Treacherous(digits(0, 50).inputs, np.zeros(50, np.int64), 10)
    data.error = error
    return Unfailing(data, told.append)


ODD_ERRORS = [RuntimeError("odd"), OSError(5, "Input/output error"), MemoryError()]


@pytest.mark.parametrize("error", ODD_ERRORS, ids=repr)
@pytest.mark.parametrize("task", [TASK, features_task()], ids=["records", "features"])
def test_whatever_a_record_raises_costs_that_record_alone(
    tmp_path: Path, task: RoundTask, error: Exception
) -> None:
    board, told = trainer(tmp_path, engine="numpy"), []
    board.records.dataset = treacherous(error, told)
    update = run(board, task, {}, np.zeros(task.spec.parameter_count, np.float32))
    assert update.failure is None
    assert len(told) == 50
    assert all(sentence.startswith(f"{type(error).__name__}: ") for sentence in told)


@pytest.mark.parametrize("error", [ConfigurationError("a sentence"), StorageError("no disk")], ids=repr)
@pytest.mark.parametrize("task", [TASK, features_task()], ids=["records", "features"])
def test_what_no_record_can_cause_leaves_noise_alone(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, task: RoundTask, error: Exception
) -> None:
    board = trainer(tmp_path, engine="numpy")
    board.records.dataset = treacherous(error, [])
    update = run(board, task, {}, np.zeros(task.spec.parameter_count, np.float32))
    assert update.failure == str(error)
    spread = task.release.mechanism.deviation_units / task.release.terms.step
    assert 0.5 * spread < update.values.std() < 2 * spread
    assert "Traceback" not in caplog.text


class Broken(NumpyEngine):
    """An engine that fails whatever it is to compute."""

    error: Exception

    def clipped_sum(self, *_: Any, **__: Any) -> Any:
        raise self.error


@pytest.mark.parametrize("error", ODD_ERRORS[:2], ids=repr)
def test_an_engine_that_always_fails_leaves_noise_alone(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, error: Exception
) -> None:
    board, engine = trainer(tmp_path, engine="numpy"), Broken(DIGITS, microbatch=2)
    engine.error = error
    update = board.noisy_update(replace(board.prepare(TASK, {}, WEIGHTS), engine=engine))
    assert str(error) in str(update.failure)
    assert "failed with 50 of the 50 records" in caplog.text
    spread = TASK.release.mechanism.deviation_units / TASK.release.terms.step
    assert 0.5 * spread < update.values.std() < 2 * spread


def test_features_are_made_again_after_they_could_not_be(tmp_path: Path) -> None:
    """What was closed is not read from: its descriptor may be another file's by now."""
    task, weights = features_task(), np.zeros(50, np.float32)
    board = trainer(tmp_path, engine="numpy")
    run(board, task, {}, weights)
    good = board.records.dataset
    board.records.dataset = treacherous(StorageError("no disk"), [])
    assert run(board, task, {}, weights).failure
    gc.collect()  # the descriptor of the failure, which would serve by chance
    board.records.dataset = good
    assert run(board, task, {}, weights).failure is None


def test_features_that_were_cut_short_are_made_again_for_the_next_round(tmp_path: Path) -> None:
    """No record does that: the round gets noise alone rather than the rest of the records."""
    task, weights = features_task(), np.zeros(50, np.float32)
    board = trainer(tmp_path, engine="numpy")
    work = board.prepare(task, {}, weights)
    board.noisy_update(work)
    (file,) = (tmp_path / "state").glob("features.f32")
    whole = file.read_bytes()
    file.write_bytes(whole[:100])
    assert "was cut short while in use" in (board.noisy_update(work).failure or "")
    assert run(board, task, {}, weights).failure is None
    assert whole.startswith(file.read_bytes())


def test_a_first_round_for_a_projection_is_answered_with_second_moments(tmp_path: Path) -> None:
    spec = from_description(DIGITS.describe() | {"front_end": [{"projection": 6}], "layers": [{"dense": 10}]})
    task = make_task(
        model={
            "description": cbor2.dumps(spec.describe(), canonical=True),
            "parameters": spec.parameter_count,
            "architecture": spec.digest(),
        },
        projection={"values": 64, "record_norm": 3.0},
        **terms(rate=1.0),
        step=1_025,
    )
    update = run(trainer(tmp_path), task, {}, np.zeros(spec.parameter_count, np.float32))
    assert update.values.shape == (64 * 65 // 2,)
    assert not (tmp_path / "state" / "engine.json").exists()
