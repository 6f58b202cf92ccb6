"""Every decoder of the wire against mutated messages; ``python -m tests.fuzz`` is the long run."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import fuzz
import pytest
from fuzz import TARGETS, Decoder, Target
from hypothesis import given, settings
from hypothesis import strategies as st

from dpagent.errors import ConfigurationError
from dpagent.learning.models.description import from_description
from dpagent.protocol.codec import MessageError

ROOT = Path(__file__).parents[2]
ANYTHING = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5) | st.binary(max_size=5),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=5) | st.integers(), inner),
    max_leaves=8,
)
MODEL = {"name": "m", "input_shape": [6], "classes": 2, "layers": ["tanh", {"dense": 2}]}


@pytest.mark.heavy
def test_no_decoder_ends_in_another_error_or_takes_too_long() -> None:
    outcome = fuzz.run(seed=0, first=0, inputs=30_000)
    assert outcome.findings == []
    assert outcome.inputs == 30_000
    # Each decoder has seen messages of both kinds, or a wrong seal and signature at least.
    assert outcome.refused.keys() == TARGETS.keys()
    assert outcome.accepted.keys() >= TARGETS.keys() - {"open signed", "open sealed", "open for the mixer"}


def test_an_input_is_the_same_each_time() -> None:
    first, second = ([fuzz.mutated(3, number)[:2] for number in range(200)] for _ in range(2))
    assert first == second
    assert first != [fuzz.mutated(4, number)[:2] for number in range(200)]


def planted(monkeypatch: pytest.MonkeyPatch, decoder: Decoder) -> None:
    monkeypatch.setattr(fuzz, "TARGETS", dict.fromkeys(TARGETS, Target(decoder, [b"message"])))


def test_an_undocumented_error_is_a_finding(monkeypatch: pytest.MonkeyPatch) -> None:
    def decoder(data: bytes, _: Any) -> None:
        if len(data) % 2:
            raise MessageError("malformed", "as documented")
        raise IndexError("not documented")

    planted(monkeypatch, decoder)
    outcome = fuzz.run(seed=1, first=0, inputs=100)
    assert outcome.refused.total() + len(outcome.findings) == 100
    assert outcome.findings
    assert all("IndexError: not documented" in finding for finding in outcome.findings)


def test_an_input_that_takes_too_long_is_a_finding(monkeypatch: pytest.MonkeyPatch) -> None:
    def decoder(_data: bytes, _: Any) -> None:
        while True:
            pass

    planted(monkeypatch, decoder)
    monkeypatch.setattr(fuzz, "MOST_CPU_S", 0.05)
    outcome = fuzz.run(seed=1, first=0, inputs=2)
    assert ["TooLongError" in finding for finding in outcome.findings] == [True, True]


@pytest.mark.heavy
def test_an_input_that_takes_too_much_memory_is_a_finding_and_fails_the_program() -> None:
    script = (
        "import sys; sys.path.insert(0, 'tests'); import fuzz\n"
        "hungry = fuzz.Target(lambda data, _: bytearray(2 * fuzz.MOST_MEMORY), [b'message'])\n"
        "fuzz.TARGETS.update(dict.fromkeys(fuzz.TARGETS, hungry))\n"
        "sys.exit(fuzz.main())\n"
    )
    command = [sys.executable, "-c", script, "--inputs", "3"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 1, done.stderr
    assert done.stdout.count("MemoryError") == 3


@pytest.mark.heavy
def test_the_long_run_is_a_program() -> None:
    command = [sys.executable, "-m", "tests.fuzz", "--inputs", "500", "--every", "200"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "500 inputs, 0 findings" in done.stdout


@pytest.mark.heavy
@settings(max_examples=100)
@given(st.sampled_from([*MODEL, "front_end", "input_scale"]), ANYTHING)
def test_a_description_with_anything_in_it_is_a_model_or_refused(key: str, value: object) -> None:
    for description in (MODEL | {key: value}, value, MODEL | {"layers": [{"dense": value}, value]}):
        try:
            spec = from_description(description)
        except ConfigurationError:
            continue
        assert spec.parameter_count > 0
