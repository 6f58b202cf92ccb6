"""The agent on emulated ARM boards: jobs of every method with coordinator and broker on this machine, and the
tests of engines, samplers, ledger and codec on each processor.

They need the roots that `make arm-root` makes, and are skipped without. Nothing about time, power or memory
follows from an emulator.
"""

from __future__ import annotations

import signal
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from arm.single_gradients import MODELS, single_gradients
from brokers import Broker, wait_until
from children import Child
from emulated_boards import ARMHF, DPAGENT, MEMORY, PYTHON, SOURCE, EmulatedBoard, boards
from fleets import run_coordinator, write_agent, write_fleet
from learning.small_models import records

from agent.audit import verify
from agent.heads import second_head_beside
from coordinator.keys import load_signer

JOB_S = 3_000.0
TESTS_S = 3_500.0

BOARDS = [
    pytest.param(
        board, id=board.architecture,
        marks=pytest.mark.skipif(not board.is_made, reason=f"make arm-root BOARD={board.architecture}"),
    )
    for board in boards()
]  # fmt: skip
PROCESSORS = [
    pytest.param(board, processor, id=f"{board.architecture}-{processor}", marks=each.marks)
    for each in BOARDS
    for board in each.values
    if isinstance(board, EmulatedBoard)
    for processor in board.processors
]
MODULES = [
    pytest.param(
        board, processor, module, id=f"{board.architecture}-{processor}-{Path(module).stem[5:]}",
        marks=each.marks,
    )
    for each in PROCESSORS
    for board, processor in [each.values]
    if isinstance(board, EmulatedBoard) and isinstance(processor, str)
    for module in board.tests
]  # fmt: skip
"""A test for each, since all of one processor's take two hours on a core that others use."""

pytestmark = [pytest.mark.slow, pytest.mark.timeout(3_600)]

METHODS: dict[str, dict[str, Any]] = {
    "dp-sgd": {"privacy": {"method": "dp-sgd"}},
    "incrementing": {"privacy": {"method": "incrementing", "schedule": {"kind": "incrementing"}}},
    "ldp-fl": {
        "privacy": {"method": "ldp-fl", "epsilon": 30.0, "sampling_rate": 0.5}, "cap": {"kind": "none"},
        "optimiser": {"learning_rate": 1.0, "momentum": 0.0},
    },
    "central": {"privacy": {"method": "central"}, "cap": {"kind": "none"}},
}  # fmt: skip


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize(("emulated", "processor"), PROCESSORS)
def test_a_job_of_each_method_ends_well_on_each_processor(
    tmp_path: Path, mosquitto: Broker, emulated: EmulatedBoard, processor: str, method: str
) -> None:
    fleet = f"{emulated.architecture}-{method}-{processor[-3:]}"
    changes = METHODS[method]
    file = write_fleet(
        tmp_path / "coordinator", mosquitto, fleet=fleet, devices=1, rounds=2,
        **{**changes, "round": {"deadline_s": 1_800.0, "compute_slot_s": 5.0, "jitter_window_s": 0.5}},
    )  # fmt: skip
    key = load_signer(tmp_path / "coordinator" / "keys", fleet).public_key
    trusting = {} if method != "central" else {
        "budget": {"coordinator": {"epsilon": 40.0, "delta": 1e-3}},
        "limits": {"methods": ["central"], "trust": ["coordinator"]},
    }  # fmt: skip
    engine, profile = "numpy", "auto"
    if method == "dp-sgd":  # On ONNX Runtime where there is one, which takes twice its memory under QEMU.
        engine, profile = emulated.engines[-1], str(tmp_path / "roomy.yaml")
        Path(profile).write_text(f"extends: {emulated.profile}\nengine_memory_mib: 400\n")
    board = write_agent(
        tmp_path / "board", mosquitto, key, fleet=fleet, engine=engine, profile=profile,
        **{"budget": {"epsilon": 40.0}, **trusting},
    )  # fmt: skip
    command = emulated.command(processor, DPAGENT, "run", "--config", board)
    with run_coordinator(file) as coordinator, Child(command, board.with_suffix(".log")) as agent:
        wait_until(lambda: not coordinator.is_running(), "the end of the job", JOB_S)
        assert coordinator.wait() == 0, coordinator.said()[-2_000:] + agent.said()[-2_000:]
        said = agent.said()
        agent.stop()
    assert f"board profile {emulated.profile if profile == 'auto' else profile}" in said
    assert f"engine for digits: {engine}" in said
    state = board.with_name("state")
    assert verify(state, second_head_beside(state)).charges == 2
    status = (tmp_path / "coordinator" / "state" / "jobs" / "first" / "model.onnx").stat()
    assert status.st_size > 0


@pytest.mark.parametrize(("emulated", "processor", "module"), MODULES)
def test_engines_samplers_ledger_and_codec_keep_their_promises_on_each_processor(
    emulated: EmulatedBoard, processor: str, module: str
) -> None:
    ended = emulated.run(
        "/bin/sh", "-c",
        f"cd {SOURCE} && exec {PYTHON} -m pytest -q -p no:cacheprovider --executed --timeout 1800 "
        # Debian's Hypothesis warns of a generator that it registers itself.
        "-W ignore::hypothesis.errors.HypothesisWarning "
        f"{' '.join(f'--deselect {test}' for test in MEMORY)} {module}",
        processor=processor, patience_s=TESTS_S,
    )  # fmt: skip
    assert ended.returncode == 0, ended.stdout[-4_000:] + ended.stderr[-1_000:]


@pytest.mark.parametrize(("emulated", "processor"), PROCESSORS)
def test_gradients_agree_with_those_of_this_machine(
    tmp_path: Path, emulated: EmulatedBoard, processor: str
) -> None:
    """Each record's alone, to 1e-5 of its length."""
    given: dict[str, Any] = {}
    for name, spec in MODELS.items():
        for part, values in zip(("weights", "inputs", "labels"), records(spec, 3), strict=True):
            given[f"{name}/{part}"] = values
    np.savez(tmp_path / "records.npz", **given)
    ended = emulated.run(
        "env", f"PYTHONPATH={SOURCE}:{SOURCE}/tests", PYTHON, f"{SOURCE}/tests/arm/single_gradients.py",
        tmp_path / "records.npz", tmp_path / "gradients.npz", *emulated.engines,
        processor=processor, patience_s=TESTS_S,
    )  # fmt: skip
    assert ended.returncode == 0, ended.stderr[-2_000:]
    expected = single_gradients(given, emulated.engines)
    with np.load(tmp_path / "gradients.npz") as found:
        assert set(found) == set(expected)
        apart = {
            name: (np.linalg.norm(found[name] - here, axis=1) / np.linalg.norm(here, axis=1)).max()
            for name, here in expected.items()
        }
    print(f"{emulated.architecture}, {processor}: at most {max(apart.values()):.1e} apart")
    assert max(apart.values()) <= 1e-5, apart


@pytest.mark.parametrize("emulated", BOARDS)
def test_a_board_is_seen_as_what_it_is(emulated: EmulatedBoard) -> None:
    found = emulated.run(DPAGENT, "profiles", "detect")
    assert found.returncode == 0, found.stderr
    assert f"architecture  {emulated.machine}" in found.stdout
    assert emulated.profile in found.stdout


needs_armhf = pytest.mark.skipif(
    ARMHF not in boards() or not ARMHF.is_made, reason="make arm-root BOARD=armhf"
)


@needs_armhf
def test_what_a_board_of_32_bits_cannot_is_said(tmp_path: Path) -> None:
    shown = ARMHF.run(DPAGENT, "profiles", "show")
    assert "board.cannot" in shown.stdout
    assert "predict" in shown.stdout
    (tmp_path / "model.onnx").touch()
    asked = ARMHF.run(DPAGENT, "predict", tmp_path / "model.onnx", tmp_path)
    assert asked.returncode == 3
    assert "onnxruntime" in asked.stderr
    assert "32 bits" in asked.stderr
    key = "A" * 43 + "="
    examined = write_agent(tmp_path / "board", None, key, engine="onnx")
    found = ARMHF.run(DPAGENT, "doctor", "--no-broker", "--config", examined)
    assert "32 bits" in found.stdout, found.stderr


@needs_armhf
def test_debians_32_bits_do_not_run_on_armv6() -> None:
    """As docs/boards.md says of the first Raspberry Pi and the Zero."""
    ended = ARMHF.run("/usr/bin/python3", "-c", "print(1)", processor="arm1176")
    assert ended.stdout == ""
    assert ended.returncode in (-signal.SIGILL, 128 + signal.SIGILL)
