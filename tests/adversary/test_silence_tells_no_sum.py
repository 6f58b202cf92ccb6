"""A coordinator makes a device's own arithmetic fail on some noisy sums, and hears by its silence which.

Claim: whether a device answers a plan, with how many fragments of how many bytes, is a function of the plan,
the configuration and the ledger. No record and no noise takes part, however odd the plan and the record are.

Before, a cap on the device divided by the plan's ``expected_lot``: near 4e-309 that overflowed exactly where
a noisy coordinate exceeded a threshold of the coordinator's choice. The device declined, charged nothing, and
drew again when the plan was announced again: eleven free answers to one charge. Whatever could raise between
the first record and the charge was such a channel.

Power: the plans are drawn, the answers compared exactly. On the code of before the first test below, a record
    whose reading fails, is answered by a decline each time; on this code equality has no error of chance.
"""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from devices import Device, open_device
from fleets import DIGITS, digits, make_plan, model_section, report_plan
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from agent.noisy_sums import clipped_sum
from dpagent.learning.data.dataset import ArrayDataset
from dpagent.learning.models.description import from_description
from dpagent.learning.training.numpy_engine.engine import NumpyEngine
from dpagent.privacy.mechanisms.registry import MECHANISMS
from dpagent.protocol.chunks import content_digest
from dpagent.protocol.messages import Plan
from dpagent.protocol.task import RoundTask
from dpagent.protocol.weights import weights_to_bytes
from dpagent.schema.problems import SchemaError

ROWS = digits(0, 30)
PROJECTED = from_description(
    DIGITS.describe() | {"front_end": [{"projection": 6}], "layers": [{"dense": 10}]}
)
"""Its first round asks for second moments."""


def with_record(record: NDArray[np.float32]) -> ArrayDataset:
    return ArrayDataset(
        np.concatenate([ROWS.inputs, record[np.newaxis]]), np.append(ROWS.labels, 3), ROWS.classes
    )


class Treacherous(ArrayDataset):
    """Records of which one breaks whatever reads it."""

    def _read(self, indices: Any) -> Any:
        if (np.asarray(indices) == len(ROWS)).any():
            raise MemoryError
        return super()._read(indices)


def odd_records() -> dict[str, ArrayDataset]:
    shape = ROWS.shape
    treacherous = with_record(np.zeros(shape, np.float32))
    return {
        "none": ROWS,
        "zeros": with_record(np.zeros(shape, np.float32)),
        "huge": with_record(np.full(shape, 3e38, np.float32)),
        "tiny": with_record(np.full(shape, 1e-45, np.float32)),
        "undefined": with_record(np.full(shape, np.nan, np.float32)),
        "infinite": with_record(np.full(shape, -np.inf, np.float32)),
        "treacherous": Treacherous(treacherous.inputs, treacherous.labels, treacherous.classes),
    }


def answer(device: Device, plan: Plan, weights: bytes) -> tuple[object, ...]:
    """Everything that the coordinator and the broker can see of a round, and what the ledger says of it."""
    device.take_plan(plan)
    device.give(weights)
    device.advance()
    rows = device.state.connection.execute("SELECT length(message), count(*) FROM messages GROUP BY 1")
    declined = [row[1] for row in device.declined()]
    return device.charged(), declined, [tuple(row) for row in rows]


@st.composite
def hostile_plans(draw: st.DrawFn) -> dict[str, Any]:
    """Values at the ends of their ranges, and beyond what a coordinator of ours would choose."""
    return {
        "method": draw(st.sampled_from(["dp-sgd", "incrementing", "incrementing"])),
        "sampling": {
            "rate": draw(st.sampled_from([1e-300, 1e-9, 0.5, 1.0])),
            "expected_lot": draw(st.sampled_from([1e-6, 1.0, 1e7])),
            "local_steps": draw(st.sampled_from([1, 2, 5])),
            "local_learning_rate": draw(st.sampled_from([0.0, 1.0, 1e3])),
        },
        "clipping": {
            "norms": [draw(st.sampled_from([1e-9, 1.0, 1e6]))],
            "count_weight": draw(st.sampled_from([0.0, 0.0, 1e-9, 1.0])),
        },
        "augmentation": draw(st.sampled_from([None, None, {"views": 2, "shift": 2, "flip": True}])),
        "mechanism": {
            "name": draw(st.sampled_from(sorted(MECHANISMS))),
            "noise_multipliers": [draw(st.sampled_from([0.5, 2.0, 12.0]))] * 3,
            "parameters": {"resolution": draw(st.sampled_from([256, 65_536, 1 << 20, 1 << 30]))},
        },
        "cap": {
            "kind": draw(st.sampled_from(["none", "clamp"])), "where": "device",
            "regularisation": draw(st.sampled_from([5e-324, 1.0, 1e6])),
            "floor": draw(st.sampled_from([5e-324, 1.0, 1e6])),
        },
        "wire": {
            "block": draw(st.sampled_from([100, 5_000])), "bytes": draw(st.sampled_from([1_319, 5_000])),
            "step": draw(st.sampled_from([1, 65_537, 2**40 - 1])),
        },
        "sealing_key": draw(st.sampled_from([bytes(range(32)), b"\xff" * 32, bytes(32)])),
    }  # fmt: skip


@settings(max_examples=12, deadline=None, suppress_health_check=list(HealthCheck))
@given(hostile_plans(), st.sampled_from([0.0, 1.0, 1e30, 3e38]), st.booleans())
def test_no_record_changes_the_answer_to_any_plan(
    changes: dict[str, Any], scale: float, is_projected: bool
) -> None:
    spec = PROJECTED if is_projected else DIGITS
    weights = weights_to_bytes(spec.initial_weights(0).clip(-1, 1) * np.float32(scale), "float32")
    model = model_section(spec) | {"digest": content_digest(weights)}
    projection = {"values": 64, "record_norm": 1.0} if is_projected else None
    try:
        plan = make_plan(model=model, projection=projection, **changes)
    except SchemaError:
        return  # No plan: refused as a message.
    answers = {}
    for name, records in odd_records().items():
        with tempfile.TemporaryDirectory() as directory, open_device(Path(directory)) as device:
            device.trainer.records.dataset = records
            answers[name] = answer(device, plan, weights)
    assert all(each == answers["none"] for each in answers.values()), answers
    charged, _, fragments = answers["none"]
    assert bool(charged) == bool(fragments), "what is charged leaves, and nothing else"


@st.composite
def hostile_report_plans(draw: st.DrawFn) -> dict[str, Any]:
    """The same for reports of trained weights."""
    return {
        "coordinates": draw(st.sampled_from([1, 40, DIGITS.parameter_count])),
        "release": {
            "noise_multipliers": [draw(st.sampled_from([1 / 32, 0.5, 1e4]))] * 3,
            "radii": [draw(st.sampled_from([1e-6, 1.0, 1e6])) for _ in DIGITS.parameter_shapes],
            "training": {
                "steps": draw(st.sampled_from([1, 3])),
                "batch": draw(st.sampled_from([1, 8])),
                "learning_rate": draw(st.sampled_from([5e-324, 0.1, 1e3])),
            },
        },
        "sealing_key": draw(st.sampled_from([bytes(range(32)), b"\xff" * 32, bytes(32)])),
    }  # fmt: skip


@settings(max_examples=5, deadline=None, suppress_health_check=list(HealthCheck))
@given(hostile_report_plans(), st.sampled_from([0.0, 1.0, 1e30, 3e38]))
def test_no_record_changes_the_answer_to_any_plan_for_reports(changes: dict[str, Any], scale: float) -> None:
    weights = weights_to_bytes(DIGITS.initial_weights(0).clip(-1, 1) * np.float32(scale), "float32")
    plan = report_plan(model={"digest": content_digest(weights)}, block=2_000, **changes)
    answers = {}
    for name, records in odd_records().items():
        with tempfile.TemporaryDirectory() as directory, open_device(Path(directory)) as device:
            device.trainer.records.dataset = records
            answers[name] = answer(device, plan, weights)
    assert all(each == answers["none"] for each in answers.values()), answers
    charged, _, fragments = answers["none"]
    assert bool(charged) == bool(fragments), "what is charged leaves, and nothing else"


def test_a_record_that_breaks_its_reader_is_left_out_alone(tmp_path: Path) -> None:
    """Neither a decline nor noise alone: both would tell of it. The sum is that of the other records."""
    plan = make_plan(
        sampling={"rate": 1.0, "expected_lot": 30.0},
        mechanism={"noise_multipliers": [0.4] * 3},
        step=1,
        delta=1e-4,
    )
    with open_device(tmp_path, budget={"epsilon": 900.0, "delta": 1e-3}) as device:
        trainer, task = device.trainer, RoundTask.of(plan)
        work = trainer.prepare(task, {}, DIGITS.initial_weights(0))
        truth = (
            clipped_sum(task.release, work.weights, ROWS, NumpyEngine(DIGITS))
            / task.release.mechanism.granularity
        )
        length, deviation = np.linalg.norm(truth), task.release.mechanism.deviation_units
        assert length > 11 * deviation, "noise alone would show"
        for name in ("none", "treacherous"):
            trainer.records.dataset = odd_records()[name]
            update = trainer.noisy_update(work)
            assert update.failure is None
            # Along the others' sum it is that sum, up to 5.5 deviations of the noise.
            assert abs(update.values @ truth / length - length) < 5.5 * deviation


@pytest.mark.parametrize(
    ("key", "is_one"), [(bytes(32), False), (b"\x01" + bytes(31), False), (b"\xff" * 32, True)]
)
def test_a_key_that_is_none_is_found_before_a_record_is_read(
    tmp_path: Path, key: bytes, is_one: bool
) -> None:
    """Before, training ran first, and a plan that could not be sealed was free."""
    reads: list[int] = []

    class Watched(ArrayDataset):
        def _read(self, indices: Any) -> Any:
            reads.append(len(indices))
            return super()._read(indices)

    with open_device(tmp_path) as device:
        device.trainer.records.dataset = Watched(ROWS.inputs, ROWS.labels, ROWS.classes)
        plan = make_plan(sealing_key=key)
        charged, declined, fragments = answer(
            device, plan, weights_to_bytes(DIGITS.initial_weights(0), "float32")
        )
        if is_one:
            assert (charged, declined) == ([1], [])
            assert reads
        else:
            assert len(declined) == 1
            assert (charged, fragments, reads) == ([], [], [])
